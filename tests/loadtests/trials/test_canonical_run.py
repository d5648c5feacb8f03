"""One run by the command line, read by most tests of a whole run: TLS, a token, replicas, load workers, two trials."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import COMPILE_EVENTS, STEPS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.experiments.reading import from_table
from tailgate.loadtests.traffic.schedule import Schedule
from tests.fakes.credentials import TLS, Certificates, Watched, check_listeners, give, search, start
from tests.fakes.processes import command_of
from tests.fakes.whole_run import ended, requests, summary_of, tailgate, trial_facts

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("canonical")]

EXPERIMENT = """
name = "small"
seed = 3
[engine]
max_prompt_tokens = 128
max_new_tokens = 8
[[arms]]
name = "eager"
preset = "eager"
control = true
replicas = 2
[[arms]]
name = "naive"
preset = "compiled-naive"
replicas = 2
[traffic]
duration_s = 2
rate = 10
length_scale = 0.05
block_s = 1
timeout_s = 10
workers = 2
[trials]
count = 2
starting_at_once = 3
[machines]
reference_s = 0
"""
TRIALS = (1, 2)
REPLICAS = ("eager-0", "eager-1", "naive-0", "naive-1")


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """The run: its folder, what it printed, what was seen of its processes."""

    folder: Path
    run_dir: Path
    code: int
    output: str
    line: dict[str, Any]
    pem: Certificates
    watched: Watched

    def table(self, trial: int, name: str, schema: Any) -> list[dict[str, Any]]:
        rows, truncated = read_table(self.run_dir / f"trial-{trial:02d}" / name, schema)
        assert not truncated
        return rows.to_pylist()


@pytest.fixture(scope="session")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Canonical:
    folder = tmp_path_factory.mktemp("canonical")
    pem = give(folder)
    (folder / "small.toml").write_text(EXPERIMENT + TLS.format(token='token_env = "PLANTED_TOKEN"'))
    process = start(folder, "run", tailgate("run", "small.toml", "--out", "out", "--json"))
    with ended(process), Watched(folder / "tmp") as watched:
        watched.pids.append(process.pid)
        process.wait(240)
    output = (folder / "run.output").read_text()
    run_dir = next((folder / "out").glob("*-small"), None)
    assert run_dir is not None, output
    line = json.loads(output.splitlines()[-1])
    return Canonical(
        folder=folder, run_dir=run_dir, code=process.returncode, output=output, line=line, pem=pem, watched=watched
    )


def test_the_run_ends_with_its_verdict_as_exit_code_and_json(canonical: Canonical) -> None:
    line = canonical.line
    assert (canonical.code, line["exit_code"], line["verdict"]) == (99, 99, "FAIL"), canonical.output
    assert (line["complete"], line["arms"]) == (True, {"naive": "FAIL"})
    assert canonical.folder / line["run_dir"] == canonical.run_dir
    assert canonical.folder / line["report"] == canonical.run_dir / "report.html"
    for stage in ("starting arms", "requests", "ttft p50", "judging"):
        assert stage in canonical.output


def test_the_directory_holds_the_experiment_that_was_run_and_the_machine(canonical: Canonical) -> None:
    given, ran = (
        from_table(tomllib.loads(path.read_text()))
        for path in (canonical.folder / "small.toml", canonical.run_dir / "experiment.toml")
    )
    assert given.replace(splitter=ran.splitter, security=ran.security) == ran
    assert ran.splitter.tls_key == str(canonical.folder / given.splitter.tls_key)
    environment = json.loads((canonical.run_dir / "environment.json").read_text())
    assert {"python", "versions", "cpu", "gpus", "clock"} <= set(environment)
    assert environment["versions"]["locust"]
    assert len(environment["machine"]) == 12


@pytest.mark.parametrize("trial", TRIALS)
def test_every_planned_request_is_recorded_once_for_each_arm(canonical: Canonical, trial: int) -> None:
    facts, rows = trial_facts(canonical.run_dir, trial), requests(canonical.run_dir, f"trial-{trial:02d}")
    assert facts["complete"]
    assert facts["deaths"] == []
    assert facts["planned"]["eager"] == facts["planned"]["naive"] > 0
    assert Counter(row["arm"] for row in rows) == facts["planned"]
    assert {row["status"] for row in rows} == {"OK"}
    assert len({(row["pair_id"], row["arm"]) for row in rows}) == len(rows)
    assert {row["replica"] for row in rows} == {*REPLICAS}
    assert min(row["scheduled_ns"] for row in rows) >= facts["start_ns"] > facts["ready_ns"]
    for row in rows:
        assert row["output_tokens"] == row["max_tokens"] == len(row["token_ns"])
        assert row["scheduled_ns"] <= row["sent_ns"] <= row["server_recv_ns"] <= row["first_token_ns"] <= row["end_ns"]


def test_trials_send_different_traffic(canonical: Canonical) -> None:
    first, second = (requests(canonical.run_dir, f"trial-{trial:02d}") for trial in TRIALS)
    assert [row["prompt_tokens"] for row in first] != [row["prompt_tokens"] for row in second]


@pytest.mark.parametrize("trial", TRIALS)
def test_both_load_workers_account_for_what_they_sent(canonical: Canonical, trial: int) -> None:
    folder = canonical.run_dir / f"trial-{trial:02d}"
    accounts = [json.loads((folder / f"generator-{worker}.json").read_text()) for worker in (0, 1)]
    rows = requests(canonical.run_dir, folder.name)
    (start_ns,) = {account["start_ns"] for account in accounts}
    offsets = Schedule.read(folder / "schedule.arrow", ()).offset_ns.tolist()
    for row in rows:
        assert row["scheduled_ns"] - start_ns == offsets[int(row["request_id"].split("-")[1])]
    assert [account["complete"] for account in accounts] == [True, True]
    assert all(account["started"] == account["finished"] == account["planned"] > 0 for account in accounts)
    assert sum(account["planned"] for account in accounts) == len(rows)


@pytest.mark.parametrize("trial", TRIALS)
def test_compiles_under_load_name_the_requests_that_waited(canonical: Canonical, trial: int) -> None:
    rows = {
        row["request_id"]: row for row in requests(canonical.run_dir, f"trial-{trial:02d}") if row["arm"] == "naive"
    }
    events = canonical.table(trial, "compile_events.arrow", COMPILE_EVENTS)
    serving = [event for event in events if event["phase"] == "serving"]
    assert serving
    assert {event["arm"] for event in serving} == {"naive"}
    for event in serving:
        for name in event["request_ids"]:
            assert rows[name]["sent_ns"] < event["end_ns"]
            assert rows[name]["end_ns"] > event["start_ns"]
            assert rows[name]["compile_stall_ns"] > 0


@pytest.mark.parametrize("trial", TRIALS)
def test_steps_and_counters_agree_with_the_requests(canonical: Canonical, trial: int) -> None:
    """The questions about equal answers after the traffic are in no record."""
    rows = requests(canonical.run_dir, f"trial-{trial:02d}")
    steps = canonical.table(trial, "steps.arrow", STEPS)
    assert Counter(step["replica"] for step in steps) == Counter(row["replica"] for row in rows)
    events = Counter(event["replica"] for event in canonical.table(trial, "compile_events.arrow", COMPILE_EVENTS))
    final = trial_facts(canonical.run_dir, trial)["final"]
    for replica in REPLICAS:
        assert final[replica]["counters"]["compile_events"] == events[replica]
        assert final[replica]["counters"]["answered"] == sum(row["replica"] == replica for row in rows)


def test_each_replica_answers_the_control_s_questions_alike(canonical: Canonical) -> None:
    answers = trial_facts(canonical.run_dir)["answers"]
    assert answers["control"] == "eager-0"
    assert {row["replica"] for row in answers["replicas"]} == {*REPLICAS}
    assert all(row["same"] == row["of"] > 0 for row in answers["replicas"])


def test_the_machine_and_every_process_are_sampled(canonical: Canonical) -> None:
    records = read_run(canonical.run_dir)
    assert records.problems == ()
    assert records.machines is not None
    assert {(row["kind"], row["name"], row["arm"]) for row in records.machines.to_pylist()} == {
        ("host", "run", None),
        *(("process", name, name[:-2]) for name in REPLICAS),
        ("process", "splitter", None),
        ("process", "load", None),
    }
    machines = trial_facts(canonical.run_dir)["monitor"]
    assert (machines["interval_s"], machines["devices"], machines["before"]) == (1.0, {}, [])
    assert "samples" not in {item["what"] for item in machines["unreadable"]}


def test_the_summary_joins_spikes_to_compiles_and_finds_the_records_whole(canonical: Canonical) -> None:
    summary = summary_of(canonical.run_dir)
    assert (summary["overall"], [arm["name"] for arm in summary["arms"]]) == ("FAIL", ["eager", "naive"])
    naive = summary["arms"][1]["compile"]
    assert naive["recompiles"] == len(summary["events"]) > 0
    assert naive["longest_stall_s"] >= 0.4
    assert all("size mismatch" in event["reason"] and event["requests_hit"] >= 1 for event in summary["events"])
    failed = {gate["gate"] for gate in summary["gates"] if gate["verdict"] == "FAIL"}
    assert "recompiles" in failed
    broken = {check["check"] for check in summary["validity"] if not check["ok"]}
    assert not broken & {"complete", "alive", "cut requests", "pairs", "telemetry"}


def test_reports_for_people_and_for_programs_are_written(canonical: Canonical) -> None:
    ET.parse(canonical.run_dir / "junit.xml")
    for name in ("report.md", "report.html"):
        text = (canonical.run_dir / name).read_text()
        assert "naive" in text
        assert "FAIL" in text
    logs = {path.name for path in (canonical.run_dir / "trial-01" / "logs").iterdir()}
    assert {*(f"{name}.log" for name in REPLICAS), "envoy.log", "locust.log"} <= logs


def test_no_secret_is_in_any_file_or_command_line(canonical: Canonical) -> None:
    search(canonical.folder, canonical.watched, canonical.pem)


def test_nothing_is_left_running_and_caches_and_sockets_are_gone(canonical: Canonical) -> None:
    assert not any(str(canonical.folder) in command_of(pid) for pid in psutil.pids())
    assert not list(canonical.run_dir.glob("trial-*/compile-cache"))
    assert not [item for item in canonical.watched.sockets if not item.port and Path(item.address).exists()]
    each_trial = {"an arm": 4, "the splitter": 1, "Envoy's admin interface": 1, "Locust's master of a run": 1}
    check_listeners(canonical.watched.sockets, {"the live page": 1} | {row: 2 * n for row, n in each_trial.items()})
