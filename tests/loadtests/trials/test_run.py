import json
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS, STEPS
from analysis.records.tables import read_table
from analysis.run.run import Run
from analysis.summary.summary import analyze
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table
from loadtests.experiments.writing import to_table, to_toml
from loadtests.trials import replicas
from loadtests.trials.live_page import LivePage
from loadtests.trials.progress import Status
from loadtests.trials.run import Orchestrator, RunOutcome
from servers.clock import ANCHOR_NS
from servers.fields import ConfigError
from tests.fakes.http1 import DONE, HttpPeer, Request, answer, plain, said, scripted, usage

FAKE_ARM = Path(__file__).resolve().parents[2] / "fakes" / "arm.py"


def experiment(**tables: dict[str, Any]) -> Experiment:
    table: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "model": {"device": "cpu", "dtype": "float32"},
        "engine": {"max_prompt_tokens": 128, "max_new_tokens": 16},
        "arms": [
            {"name": "eager", "preset": "eager", "control": True},
            {"name": "naive", "preset": "compiled-naive"},
        ],
        "traffic": {"duration_s": 2, "rate": 8, "length_scale": 0.05, "block_s": 1, "timeout_s": 10},
        "trials": {"starting_at_once": 2},
        "bed": {"reference_s": 0},
    }
    for key, value in tables.items():
        table[key] = {**table.get(key, {}), **value}
    return from_table(table)


def run(
    what: Experiment, out: Path, *flags: str, status: Status | None = None, page: LivePage | None = None
) -> tuple[RunOutcome, Status]:
    status = status or Status()
    command = [sys.executable, str(FAKE_ARM), *flags]
    return Orchestrator(what, out=out, status=status, page=page, arm_command=command).run(), status


def trial_facts(outcome: RunOutcome, number: int = 1) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((outcome.run_dir / f"trial-{number:02d}" / "trial.json").read_text())
    return facts


def requests(outcome: RunOutcome, number: int = 1) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted((outcome.run_dir / f"trial-{number:02d}").glob("requests*.arrow")):
        rows += read_table(path, REQUESTS)[0].to_pylist()
    return rows


def children_of_this_process() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == str(os.getpid()):
            found.add(folder.name)
    return found


def encoders(**tables: dict[str, Any]) -> Experiment:
    base: dict[str, dict[str, Any]] = {
        "model": {"id": "example/encoder", "task": "embed"},
        "engine": {"max_prompt_tokens": 128, "max_new_tokens": 128},
    }
    return experiment(**{key: {**base.get(key, {}), **tables.get(key, {})} for key in {**base, **tables}})


@pytest.mark.parametrize("design", ["mirrored", "split", "switchback", "shadow"])
def test_encoders_are_sent_texts_and_judged_by_their_vectors(design: str, tmp_path: Path) -> None:
    outcome, _ = run(encoders(traffic={"design": design}), tmp_path, "--token", "naive-0=6")
    assert outcome.complete, outcome.error
    rows = requests(outcome)
    assert {row["arm"] for row in rows} == {"eager", "naive"}
    assert {row["status"] for row in rows} == {"OK"}
    assert {row["output_tokens"] for row in rows} == {row["first_token_ns"] for row in rows} == {None}
    assert all(row["padded_length"] == row["prompt_tokens"] for row in rows)
    steps = read_table(outcome.run_dir / "trial-01" / "steps.arrow", STEPS)[0].to_pylist()
    assert {step["kind"] for step in steps} == {"encode"}
    answers = {row["replica"]: row for row in trial_facts(outcome)["answers"]["replicas"]}
    assert answers["eager-0"]["cosine"] == pytest.approx(1.0)
    assert answers["naive-0"]["cosine"] == pytest.approx(0.5403, abs=1e-4)  # the fake's vector turns by one radian
    summary = analyze(outcome.run_dir)
    parity = [gate["verdict"] for gate in summary["gates"] if gate["gate"] == "parity"]
    assert parity == ["FAIL"]
    assert {row["metric"] for row in summary["comparisons"]} == {"e2e"}


def test_a_saturation_search_of_encoders_holds_steps_by_e2e(tmp_path: Path) -> None:
    search = {"arrivals": "saturation", "rate": 0.0, "rates": [4, 40], "step_s": 1, "settle_s": 0.2, "duration_s": 3}
    what = encoders(traffic=search, slo={"p99_e2e_ms": 2000})
    outcome, _ = run(what, tmp_path)
    assert outcome.complete, outcome.error
    assert {row["arm"] for row in analyze(outcome.run_dir)["saturation"]["brackets"]} == {"eager", "naive"}


def test_mirrored_trials_record_both_arms_and_leave_no_process(tmp_path: Path) -> None:
    before = children_of_this_process()
    what = experiment(trials={"count": 2, "starting_at_once": 2})
    outcome, status = run(what, tmp_path)
    assert outcome == RunOutcome(run_dir=outcome.run_dir, complete=True)
    assert children_of_this_process() <= before

    assert from_table(tomllib.loads((outcome.run_dir / "experiment.toml").read_text())) == what
    environment = json.loads((outcome.run_dir / "environment.json").read_text())
    assert environment["clock"]["anchor_ns"] == ANCHOR_NS
    assert {"python", "versions", "cpu", "gpus"} <= set(environment)
    assert len(environment["machine"]) == 12

    for number in (1, 2):
        facts = trial_facts(outcome, number)
        rows = requests(outcome, number)
        assert facts["complete"]
        assert facts["deaths"] == []
        assert facts["planned"]["eager"] == facts["planned"]["naive"] > 0
        assert len(rows) == 2 * facts["planned"]["eager"]
        assert {row["status"] for row in rows} == {"OK"}
        assert min(row["scheduled_ns"] for row in rows) >= facts["start_ns"] > facts["ready"]["eager"]
        pairs = [(row["pair_id"], row["arm"]) for row in rows]
        assert len(set(pairs)) == len(pairs)
        folder = outcome.run_dir / f"trial-{number:02d}"
        events = read_table(folder / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
        stalls = [event for event in events if event["phase"] == "serving"]
        assert stalls
        assert {event["arm"] for event in stalls} == {"naive"}
        assert {name for event in stalls for name in event["request_ids"]} <= {row["request_id"] for row in rows}
        steps = read_table(folder / "steps.arrow", STEPS)[0]
        assert steps.num_rows == len(rows)
        assert not (folder / "compile-cache").exists()
    # another trial is other traffic
    assert [row["prompt_tokens"] for row in requests(outcome, 1)] != [
        row["prompt_tokens"] for row in requests(outcome, 2)
    ]
    assert status.load.finished == len(requests(outcome, 2))


def test_the_machine_of_a_trial_and_its_processes_are_watched(tmp_path: Path) -> None:
    outcome, status = run(experiment(), tmp_path)
    assert outcome.complete, outcome.error
    records = read_run(outcome.run_dir)
    assert records.problems == ()
    assert records.bed is not None
    rows = records.bed.to_pylist()
    assert {(row["kind"], row["name"], row["arm"]) for row in rows} == {
        ("host", "run", None),
        ("process", "eager-0", "eager"),
        ("process", "naive-0", "naive"),
        ("process", "splitter", None),
        ("process", "load", None),
    }
    bed, environment = trial_facts(outcome)["bed"], records.environment
    assert bed["interval_s"] == 1.0
    assert bed["machines"]["run"]["machine"] == environment["machine"]
    assert (bed["devices"], bed["before"], bed["arms"]) == ({}, [], {"eager": "cpu", "naive": "cpu"})
    assert bed["watcher"]["cpu_s"] < bed["watcher"]["seconds"]
    assert bed["gaps"] == []
    assert status.notes == []


def test_machines_are_not_watched_where_the_experiment_leaves_that_out(tmp_path: Path) -> None:
    outcome, _ = run(experiment(bed={"sample_s": 0}, traffic={"duration_s": 1, "direct": True}), tmp_path)
    assert outcome.complete, outcome.error
    assert not (outcome.run_dir / "trial-01" / "bed.arrow").exists()
    assert "bed" not in trial_facts(outcome)


def test_split_by_weight_over_replicas_and_load_processes(tmp_path: Path) -> None:
    what = experiment(traffic={"design": "split", "workers": 2, "rate": 30})
    arms = [
        {"name": "eager", "preset": "eager", "control": True, "weight": 3, "replicas": 2},
        {"name": "naive", "preset": "compiled-naive", "weight": 1},
    ]
    table = tomllib.loads(to_toml(what)) | {"arms": arms}
    outcome, _ = run(from_table(table), tmp_path)
    assert outcome.complete, outcome.error
    rows = requests(outcome)
    assert len(rows) == trial_facts(outcome)["planned"]["*"]
    assert len(list((outcome.run_dir / "trial-01").glob("requests-*.arrow"))) == 2
    assert {row["replica"] for row in rows} == {"eager-0", "eager-1", "naive-0"}
    share = sum(row["arm"] == "eager" for row in rows) / len(rows)
    assert 0.5 < share < 0.95


def test_direct_traffic_needs_no_splitter(tmp_path: Path) -> None:
    outcome, _ = run(experiment(traffic={"direct": True}), tmp_path)
    assert outcome.complete, outcome.error
    assert {row["arm"] for row in requests(outcome)} == {"eager", "naive"}
    assert not (outcome.run_dir / "trial-01" / "envoy.json").exists()


def test_an_arm_that_dies_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    outcome, status = run(experiment(), tmp_path, "--die", "naive-0=3")
    assert outcome.complete, outcome.error
    (death,) = trial_facts(outcome)["deaths"]
    assert (death["arm"], death["replica"], death["exit_code"]) == ("naive", "naive-0", 9)
    rows = requests(outcome)
    assert {row["status"] for row in rows if row["arm"] == "eager"} == {"OK"}
    failed = [row for row in rows if row["status"] != "OK"]
    assert failed
    assert all(row["arm"] in ("naive", None) for row in failed)
    assert max(row["scheduled_ns"] for row in rows if row["arm"] == "eager") > death["at_ns"]
    assert "the device fell off the bus" in status.notes[0]


def test_an_arm_that_dies_in_the_midst_of_a_compile_is_known_to_have_compiled(tmp_path: Path) -> None:
    outcome, _ = run(experiment(), tmp_path, "--die", "naive-0=1", "--stall-s", "100")
    assert outcome.complete, outcome.error
    (death,) = trial_facts(outcome)["deaths"]
    assert death["compiling"]["shape"].startswith("1x")
    assert death["compiling"]["start_ns"] < death["at_ns"]


def test_a_compile_that_the_run_does_not_outlast_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STOP_GRACE_S", 1.0)
    what = experiment(traffic={"timeout_s": 1}, parity={"served": False})
    outcome, _ = run(what, tmp_path, "--stall-s", "100")
    assert outcome.complete, outcome.error
    compiling = trial_facts(outcome)["final"]["naive-0"]["compiling"]
    assert compiling["shape"].startswith("1x")
    assert compiling["seconds"] > 1.0
    checks = analyze(outcome.run_dir)["validity"]
    (counts,) = [row for row in checks if row["check"] == "event counts" and row["arm"] == "naive"]
    assert not counts["ok"]
    assert "s into a compile for 1x" in counts["reason"]


def test_a_replica_that_dies_after_its_last_answer_is_recorded(tmp_path: Path) -> None:
    what = experiment(parity={"served": False})
    outcome, _ = run(what, tmp_path, "--die-last", "naive-0")
    assert outcome.complete, outcome.error
    facts = trial_facts(outcome)
    assert {row["status"] for row in requests(outcome)} == {"OK"}
    assert list(facts["final"]) == ["eager-0"]
    assert [death["replica"] for death in facts["deaths"]] in (["naive-0"], [])  # its exit may not show yet
    summary = analyze(outcome.run_dir)
    (alive,) = [check for check in summary["validity"] if check["check"] == "alive" and check["arm"] == "naive"]
    assert not alive["ok"]


def test_trials_tell_how_their_arms_pad_and_which_compiles_stall(tmp_path: Path) -> None:
    what = experiment(engine={"prefill_chunk": 32})
    arms = [
        {"name": "eager", "preset": "eager", "control": True},
        {"name": "padded", "preset": "compiled-padded"},
        {"name": "buckets", "preset": "compiled-bucketed"},
    ]
    outcome, _ = run(from_table(to_table(what) | {"arms": arms}), tmp_path)
    facts = trial_facts(outcome)
    assert [row["length_ladder"] for row in facts["arms"]] == [[], [32, 128], [32, 64, 128]]
    assert "limit_hit" in facts["stalling_kinds"]
    judged = Run.of(read_run(outcome.run_dir))
    assert [judged.account(name).length_ladder for name in judged.arms] == [(), (32, 128), (32, 64, 128)]


def test_a_run_whose_arms_all_died_is_broken(tmp_path: Path) -> None:
    outcome, _ = run(experiment(traffic={"duration_s": 60}), tmp_path, "--die", "naive-0=2", "--die", "eager-0=2")
    assert not outcome.complete
    assert outcome.error is not None
    assert "every arm died" in outcome.error
    assert requests(outcome)
    assert not trial_facts(outcome)["complete"]


def test_an_arm_that_cannot_start_breaks_the_run_with_its_own_words(tmp_path: Path) -> None:
    before = children_of_this_process()
    outcome, _ = run(experiment(), tmp_path, "--fail-start", "naive-0")
    assert outcome.error is not None
    assert 'arm "naive": naive-0 ended with exit code 3' in outcome.error
    assert "the weights are missing" in outcome.error
    assert "\n" not in outcome.error
    assert children_of_this_process() <= before


def test_an_arm_that_never_gets_ready_breaks_the_run(tmp_path: Path) -> None:
    what = experiment(trials={"ready_timeout_s": 2})
    outcome, _ = run(what, tmp_path, "--never-ready", "naive-0")
    assert outcome.error is not None
    assert "naive-0 was not ready after 2 s (it was at: warm-up 3/3" in outcome.error
    assert "raise trials.ready_timeout_s" in outcome.error


def test_arms_that_report_different_dtypes_are_not_compared(tmp_path: Path) -> None:
    outcome, _ = run(experiment(), tmp_path, "--dtype", "naive-0=float16")
    assert outcome.error is not None
    assert "naive-0 runs with dtype float16 but the control with float32: not comparable" in outcome.error


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": {"device": "tpu"}}, 'model.device is "tpu": use auto, cpu, cuda or cuda:N'),
        ({"model": {"device": "cpu", "id": "./no-such-model"}}, 'model.id "./no-such-model" does not exist'),
        ({"traffic": {"rate": 0.001, "duration_s": 1}}, "would send no request"),
        ({"traffic": {"rate": 0, "arrivals": "trace", "trace": "/no/such.csv"}}, "/no/such.csv"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tables: dict[str, dict[str, Any]], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(experiment(**tables), tmp_path / "runs")
    assert expected in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_missing_compiler_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match='the C\\+\\+ compiler "no-such-compiler" is missing'):
        run(experiment(), tmp_path / "runs")


# --- External arms ----------------------------------------------------------------------------------------------------


def beside_external(address: str | list[str], **tables: dict[str, Any]) -> Experiment:
    own = {"name": "eager", "preset": "eager", "control": True}
    vllm = {"name": "vllm", "kind": "openai", "address": address, "model_name": "llama", **tables.pop("arm", {})}
    base = to_table(experiment(**tables))
    for table in ("splitter", "model", "engine"):
        del base[table]
    return from_table({**base, "compare_models": True, "arms": [own, vllm], "engine": {"max_new_tokens": 16}})


def test_external_arm_is_judged_beside_an_own_one_without_splitter_and_telemetry(tmp_path: Path) -> None:
    before = children_of_this_process()
    streamed = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)
    with HttpPeer(scripted([plain("200 OK"), streamed])) as peer:
        what = beside_external(
            [peer.address, peer.address.replace("127.0.0.1", "localhost")], traffic={"duration_s": 2}
        )
        outcome, status = run(what, tmp_path)
    assert outcome.complete, outcome.error
    assert children_of_this_process() <= before
    facts, rows = trial_facts(outcome), requests(outcome)
    assert {(row["arm"], row["status"]) for row in rows} == {("eager", "OK"), ("vllm", "OK")}
    assert {row["replica"] for row in rows} == {"eager-0", "vllm-0", "vllm-1"}
    own, vllm = facts["arms"]
    assert (own["kind"], vllm["kind"]) == ("tailgate", "openai")
    assert "config" not in vllm
    assert vllm["external"]["address"][0] == peer.address
    assert [probe["tokens"] for probe in vllm["probe"]] == [2, 2]
    assert set(facts["startup"]) == {"eager"}
    assert set(facts["ready"]) == {"eager", "vllm"}
    assert facts["deaths"] == []
    folder = outcome.run_dir / "trial-01"
    assert not (folder / "logs" / "envoy.log").exists()
    assert {event["arm"] for event in read_table(folder / "steps.arrow", STEPS)[0].to_pylist()} == {"eager"}
    assert any("answered 2 of 8 tokens" in note for note in status.notes)
    resolved = from_table(tomllib.loads((outcome.run_dir / "experiment.toml").read_text()))
    assert [arm.kind for arm in resolved.arms if arm.name == "vllm"] == ["openai"]


def test_external_arm_that_fails_shows_in_its_errors_and_its_token_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TOKEN", "s3cret-token")
    streamed = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)

    def script(request: Request) -> bool | None:
        if len(peer.requests) > 8:
            return False  # the server is going down: at first it drops what it is asked
        if len(peer.requests) > 5:
            request.send(plain("401 No", b'{"error": {"message": "s3cret-token is not known"}}'))
        else:
            request.send(streamed if request.line.startswith("POST") else plain("200 OK"))
        return None

    with HttpPeer(script) as peer:
        what = beside_external(peer.address, arm={"token_env": "VLLM_TOKEN"}, traffic={"duration_s": 2})
        outcome, _ = run(what, tmp_path)
    assert outcome.complete, outcome.error
    assert trial_facts(outcome)["deaths"] == []
    statuses = [row["status"] for row in requests(outcome) if row["arm"] == "vllm"]
    assert set(statuses) == {"OK", "UNAUTHENTICATED", "UNAVAILABLE"}
    assert {row["status"] for row in requests(outcome) if row["arm"] == "eager"} == {"OK"}
    assert "HTTP 401: *** is not known" in {row["error"] for row in requests(outcome)}
    assert {request.headers["authorization"] for request in peer.requests} == {"Bearer s3cret-token"}
    for path in outcome.run_dir.rglob("*"):
        assert path.is_dir() or b"s3cret-token" not in path.read_bytes(), path
    monkeypatch.delenv("VLLM_TOKEN")
    with pytest.raises(ConfigError, match="VLLM_TOKEN, which is not set"):
        Orchestrator(what, out=tmp_path / "none").run()
    assert not (tmp_path / "none").exists()


def test_external_arm_that_cannot_be_used_ends_the_run_before_anything_starts(tmp_path: Path) -> None:
    for number, (reply, says) in enumerate(
        (
            (plain("404 No", b'{"error": {"message": "no such model"}}'), "cannot be used: HTTP 404: no such model"),
            (plain("503 Busy", b"loading"), "was not ready after 1 s (HTTP 503: loading): start the server"),
        )
    ):
        with HttpPeer(scripted([reply])) as peer:
            what = beside_external(peer.address, trials={"ready_timeout_s": 1})
            outcome, _ = run(what, tmp_path / str(number))
        assert not outcome.complete
        assert outcome.error is not None
        assert f'arm "vllm": {peer.address} {says}' in outcome.error
        logs = {path.name for path in (outcome.run_dir / "trial-01" / "logs").iterdir()}
        assert logs == {"watcher.log"}  # the machines are watched before anything starts on them


def test_requests_that_do_not_fit_an_external_arm_end_the_run_before_its_load(tmp_path: Path) -> None:
    streamed = answer(said("a"), said(" b", finish="length"), usage(2, 9), DONE)
    models = plain("200 OK", b'{"data": [{"id": "llama", "max_model_len": 20}]}')

    def script(request: Request) -> None:
        request.send(streamed if request.line.startswith("POST") else models)

    with HttpPeer(script) as peer:
        outcome, _ = run(beside_external(peer.address), tmp_path)
    assert not outcome.complete
    assert re.fullmatch(
        rf'arm "vllm": {peer.address} takes 20 tokens for a prompt and its answer, and \d+ of \d+ requests have more, '
        r"\d+ at most: serve it with a longer context, or lower engine.max_prompt_tokens or engine.max_new_tokens",
        outcome.error or "",
    )
    assert sum(request.line.startswith("POST") for request in peer.requests) == 1


def test_a_saturation_search_goes_on_where_the_first_trial_left_off(tmp_path: Path) -> None:
    what = experiment(
        traffic={
            "arrivals": "saturation", "rate": 0, "rates": [50, 72], "step_s": 0.6, "settle_s": 0.1, "duration_s": 1.8,
            "block_s": 1,
        },
        trials={"count": 2, "starting_at_once": 2},
        slo={"p90_ttft_ms": 5000},
    )  # fmt: skip
    outcome, status = run(what, tmp_path)
    assert outcome.complete, outcome.error
    first, second = trial_facts(outcome, 1), trial_facts(outcome, 2)
    assert [step["rate"] for step in first["steps"]] == [50, 60, 72]
    # Every step was held, so that the search goes on above.
    rates = [step["rate"] for step in second["steps"]]
    assert rates == sorted(rates)
    assert rates[0] > 72
    assert any("trial 2 searches at" in note for note in status.notes)
    assert first["settle_s"] == 0.1
    assert sorted(first["start_order"]) == ["eager-0", "naive-0"]


def test_a_closed_loop_is_marked_in_the_trial(tmp_path: Path) -> None:
    what = experiment(traffic={"arrivals": "closed", "rate": 0, "concurrency": 2, "num_prompts": 5, "duration_s": 20})
    began = time.monotonic()
    outcome, _ = run(what, tmp_path)
    assert outcome.complete, outcome.error
    facts = trial_facts(outcome)
    assert (facts["loop"], facts["concurrency"], facts["open_loop"], facts["planned"]) == ("closed", 2, False, {})
    assert len(requests(outcome)) == 10
    assert time.monotonic() - began < 19


def test_an_arm_that_stands_still_holds_the_end_of_a_run_no_longer_than_its_limits_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STOP_GRACE_S", 1.0)
    what = experiment(traffic={"timeout_s": 3})
    began = time.monotonic()
    outcome, _ = run(what, tmp_path, "--freeze", "naive-0=8")
    # 2 s of traffic, 3 s for the last requests, 3 s in which it shows no life, 1 s to stop it, and the start
    assert time.monotonic() - began < 60
    assert outcome.complete
    (still,) = [row for row in trial_facts(outcome)["answers"]["replicas"] if row["arm"] == "naive"]
    assert still["error"] == "it stands still: no answer came and its processes did nothing for 3 s"
    lost = [row for row in requests(outcome) if row["arm"] == "naive" and row["status"] != "OK"]
    assert {row["status"] for row in lost} == {"DEADLINE_EXCEEDED"}


@pytest.mark.parametrize("what", ["*-small", "*-small/trial-01"])
def test_a_folder_that_is_removed_in_mid_run_is_named_as_the_reason(what: str, tmp_path: Path) -> None:
    def remove() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if any(path.stat().st_size > 8000 for path in tmp_path.glob("*-small/trial-01/requests-0.arrow")):
                while found := next(tmp_path.glob(what), None):  # what is written meanwhile makes it fail
                    shutil.rmtree(found, ignore_errors=True)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    outcome, _ = run(experiment(traffic={"duration_s": 20}), tmp_path)
    thread.join(120)
    assert not outcome.complete
    assert outcome.error is not None
    assert " was removed while the run went on: run again" in outcome.error
