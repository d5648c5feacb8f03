"""How runs end that do not end by themselves: arms that die or cannot start, signals, and SIGKILL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.commands.main import main
from tailgate.loadtests.experiments.reading import to_toml
from tailgate.loadtests.trials.run import Orchestrator
from tailgate.loadtests.trials.trial_schedule import draw
from tests.fakes.credentials import TLS, Watched, give, search, start
from tests.fakes.processes import PATIENCE_S, command_of, family, wait_for
from tests.fakes.whole_run import (
    FAKE_ARM,
    children_of_this_process,
    ended,
    experiment,
    records,
    requests,
    run,
    summary_of,
    tailgate,
    trial_facts,
)

LONG = """
name = "small"
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "compiled-padded"
[traffic]
design = "split"
duration_s = 60
rate = 20
length_scale = 0.05
block_s = 1
workers = 2
[trials]
starting_at_once = 2
[machines]
reference_s = 0
"""


def checks(summary: dict[str, Any]) -> dict[str, str]:
    """The reasons of the checks that do not hold."""
    return {row["check"]: row["reason"] for row in summary["validity"] if not row["ok"]}


@pytest.mark.process
def test_an_arm_that_dies_in_a_compile_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome, status = run(experiment(), tmp_path, "--die", "naive-0=1", "--stall-s", "100")
    assert outcome.complete, outcome.error
    (death,) = trial_facts(outcome.run_dir)["deaths"]
    assert (death["arm"], death["replica"], death["exit_code"]) == ("naive", "naive-0", 9)
    assert death["compiling"]["shape"].startswith("1x")
    assert death["compiling"]["start_ns"] < death["at_ns"]
    assert "the device fell off the bus" in status.notes[0]
    rows = requests(outcome.run_dir)
    eager = [row["status"] for row in rows if row["arm"] == "eager"]
    assert eager == ["OK"] * trial_facts(outcome.run_dir)["planned"]["eager"], "the run went on"
    failed = [row for row in rows if row["status"] != "OK"]
    assert failed
    assert all(row["arm"] in ("naive", None) for row in failed)
    summary = analyze(outcome.run_dir)
    assert summary["overall"] != "PASS"
    assert "alive" in checks(summary)


@pytest.mark.process
def test_an_arm_that_cannot_start_ends_the_run_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = children_of_this_process()
    (tmp_path / "small.toml").write_text(to_toml(experiment()))
    command = [sys.executable, str(FAKE_ARM), "--fail-start", "naive-0"]
    assert (
        main(["run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--json"], arm_command=command) == 1
    )
    out, err = capsys.readouterr()
    line = json.loads(out.splitlines()[-1])
    assert (line["exit_code"], line["complete"]) == (1, False)
    for words in ('arm "naive": naive-0 ended with exit code 3', "the weights are missing", "naive-0.log"):
        assert words in line["error"]
    assert "\n" not in line["error"]
    assert err.splitlines()[-1] == f"tailgate: {line['error']}"
    assert "Traceback" not in err
    assert children_of_this_process() <= before


@pytest.mark.process
def test_an_arm_that_never_gets_ready_ends_the_run_after_its_time(tmp_path: Path) -> None:
    outcome, _ = run(experiment(trials={"ready_timeout_s": 1}), tmp_path, "--never-ready", "naive-0")
    assert outcome.error is not None
    for words in ("was not ready after 1 s", "it was at: ", "trials.ready_timeout_s"):  # any replica of a busy machine
        assert words in outcome.error


def wait_for_rows(folder: Path, process: subprocess.Popen[str], count: int) -> Path:
    """The trial's folder once so many requests are recorded."""

    def enough() -> list[Path]:
        assert process.poll() is None, (folder / "run.output").read_text()
        return [trial for trial in folder.glob("out/*/trial-01") if len(records(trial)) >= count]

    return wait_for(enough, every_s=0.1)[0]


@pytest.mark.process
def test_an_interrupted_run_keeps_and_judges_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(LONG)
    process = start(tmp_path, "run", tailgate("run", "small.toml", "--out", "out", "--json"))
    with ended(process):
        trial = wait_for_rows(tmp_path, process, 30)
        family_before = family(process.pid)[1:]
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    line = json.loads((tmp_path / "run.output").read_text().splitlines()[-1])
    assert process.returncode == line["exit_code"] == 1
    assert (line["verdict"], line["complete"]) == ("INCONCLUSIVE", False)
    assert "Records are missing: trial 1 was interrupted after" in line["headline"]
    assert len(records(trial)) >= 30
    assert {row["status"] for row in records(trial)} <= {"OK", "CANCELLED"}
    facts = trial_facts(trial.parent)
    assert not facts["complete"]
    assert "complete" in checks(summary_of(trial.parent))
    assert (trial.parent / "report.html").exists()
    assert not any(command_of(pid) for pid in family_before)


@pytest.mark.process
def test_a_killed_run_leaves_readable_records_and_no_process_or_secret(tmp_path: Path) -> None:
    pem = give(tmp_path)
    (tmp_path / "small.toml").write_text(LONG + TLS.format(token='token_env = "PLANTED_TOKEN"'))
    process = start(tmp_path, "run", tailgate("run", "small.toml", "--out", "out", "--json"))
    with ended(process), Watched(tmp_path / "tmp") as watched:
        watched.pids.append(process.pid)
        trial = wait_for_rows(tmp_path, process, 40)
        children = family(process.pid)[1:]
        assert len(children) >= 6  # two arms, Envoy, Locust's master, two workers
        before = {row["request_id"] for row in records(trial)}
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not any(command_of(pid) for pid in children))
        ended_ns = time.time_ns()
    search(tmp_path, watched, pem)
    rows = records(trial)
    assert before <= {row["request_id"] for row in rows}
    assert max(row["sent_ns"] for row in rows) < ended_ns
    summary = analyze(trial.parent)
    assert summary["overall"] == "INCONCLUSIVE"
    assert "complete" in checks(summary)
    for worker in (0, 1):
        account = json.loads((trial / f"generator-{worker}.json").read_text())
        mine = [row for row in rows if int(row["request_id"].split("-")[1]) % 2 == worker]
        assert len(mine) >= account["finished"] - account["records"]["waiting_bytes"]


def test_what_was_read_of_a_trace_is_said_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = [f"2023-11-16 00:00:0{second},70,{answer}\n" for second, answer in ((0, 5), (1, 0), (9, 5))]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    traffic = {"rate": 0, "arrivals": "trace", "workload": "trace", "trace": str(path)}
    orchestrator = Orchestrator(experiment(traffic=traffic), out=tmp_path / "runs")
    orchestrator.prepare()
    assert "2 requests in 9 s" in orchestrator.status.notes[0]
    assert draw(orchestrator.experiment, orchestrator.source, 1).prompts["trace"]["failed"] == 1
