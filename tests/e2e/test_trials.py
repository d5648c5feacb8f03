from __future__ import annotations

import shutil
import threading
import time
import tomllib
from pathlib import Path

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import STEPS
from analysis.records.tables import read_table
from analysis.run.run import Run
from analysis.summary.summary import analyze
from loadtests.experiments.reading import from_table
from loadtests.experiments.writing import to_table
from loadtests.trials import replicas
from tests.fakes.http1 import DONE, HttpPeer, answer, plain, said, scripted, usage
from tests.loadtests.trials.test_run import (
    beside_external,
    children_of_this_process,
    experiment,
    requests,
    run,
    trial_facts,
)


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


def test_a_run_whose_arms_all_died_is_broken(tmp_path: Path) -> None:
    outcome, _ = run(experiment(traffic={"duration_s": 60}), tmp_path, "--die", "naive-0=2", "--die", "eager-0=2")
    assert not outcome.complete
    assert outcome.error is not None
    assert "every arm died" in outcome.error
    assert requests(outcome)
    assert not trial_facts(outcome)["complete"]


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
