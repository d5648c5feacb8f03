"""Whole runs with paced fake arms that are too long or too special for the default suite."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from loadtests.trials import replicas
from loadtests.trials.frontier import FrontierSearch
from loadtests.trials.progress import Status
from tests.fakes.patience import wait_for
from tests.fakes.whole_run import (
    FAKE_ARM,
    console_script,
    experiment,
    last_line,
    requests,
    run,
    summary_of,
    trial_facts,
    with_fake_arms,
)

__all__ = ["FAKE_ARM", "console_script", "last_line", "requests", "with_fake_arms"]  # for other test modules

SHORT = ["--set", "traffic.duration_s=6", "--set", "traffic.block_s=1", "--set", "trials.starting_at_once=3"]


def test_a_run_under_pressure_says_so_and_its_tenant_is_in_no_record(tmp_path: Path) -> None:
    pressure = "[{end_s = 2, memory_share = 0.01, tenant_rps = 20}, {start_s = 2, compute_share = 0.2}]"
    done = with_fake_arms(["run", "demo", *SHORT, "--set", f"pressure.schedule={pressure}"], tmp_path)
    line = last_line(done)
    run_dir = tmp_path / line["run_dir"]
    assert line["complete"] is True, done.stderr
    facts = trial_facts(run_dir)
    memory, tenant, compute = facts["pressure"]
    assert [row["kind"] for row in (memory, tenant, compute)] == ["memory", "tenant", "compute"]
    assert {(row["device"], row["error"]) for row in facts["pressure"]} == {("cpu", None)}
    # on before the first request, and the second phase from two seconds on to the end
    assert memory["start_ns"] < facts["start_ns"] < memory["end_ns"] <= compute["start_ns"] < compute["end_ns"]
    assert compute["start_ns"] - facts["start_ns"] > 1.5e9
    assert tenant["answered"] > 0
    assert compute["had_share"] > 0
    assert len(requests(run_dir)) == sum(facts["planned"].values())
    assert "Under pressure" in (run_dir / "report.md").read_text()


def test_a_run_that_may_be_looked_at_ends_when_it_is_decided(tmp_path: Path) -> None:
    settings = ["--until-decided", "--at-most", "440s", "--seed", "3", "--out", "out"]
    settings += ["--set", "traffic.block_s=1", "--set", "traffic.rate=30", "--set", "gates.cold_s=2"]
    settings += ["--set", "trials.starting_at_once=3", "--set", "trials.count=2"]
    # A machine that is busy with other tests sends late. Of the naive arm the recompiles decide, of the other what
    # is left of its interval.
    settings += ["--set", "gates.max_generator_lag_ms=2000", "--set", "gates.margin=1.0"]
    settings += ["--set", "slo={p50_ttft_ms=2000,p50_e2e_ms=6000}"]
    done = with_fake_arms(["run", "demo", *settings], tmp_path, "--stall-s", "0.01")
    line = last_line(done)
    assert line["verdict"] == "FAIL", done.stderr
    run_dir = tmp_path / line["run_dir"]
    trial = trial_facts(run_dir)
    assert list(trial["ended_arms"]) == ["compiled-naive"]
    assert "recompile" in trial["ended_arms"]["compiled-naive"]["why"]
    assert trial["ended"].startswith("decided after")
    assert trial["duration_s"] < 210, "the decision ends a trial of 220 s"
    assert not (run_dir / "trial-02").exists()
    planned = trial["planned"]
    assert planned["compiled-naive"] < planned["eager"] == planned["compiled-padded"]
    assert len(requests(run_dir)) == sum(planned.values()), "all that was due was sent and has ended"
    blocking = {check["check"] for check in summary_of(run_dir)["validity"] if not check["ok"]}
    assert not blocking & {"complete", "arms", "load processes", "cut requests", "pairs", "blocks", "run length"}
    looks = [json.loads(text) for text in (run_dir / "looks.jsonl").read_text().splitlines()]
    assert looks[-1]["decided"]
    assert "SIGKILL" not in (run_dir / "looks.log").read_text()


def test_a_ramp_takes_a_candidate_back_while_it_compiles(tmp_path: Path) -> None:
    settings = ["--seed", "3", "--at-most", "60s", "--set", "ramp.candidate=compiled-naive", "--set", "gates.cold_s=1"]
    settings += ["--set", "traffic.block_s=1", "--set", "traffic.rate=40", "--set", "trials.starting_at_once=2"]
    settings += ["--set", "ramp.steps=[4,50,100]", "--set", "ramp.stall_limit_s=1"]
    line = last_line(with_fake_arms(["ramp", "demo", "--out", "out", *settings], tmp_path, "--stall-s", "12"))
    assert (line["verdict"], line["exit_code"]) == ("FAIL", 99)
    run_dir = tmp_path / line["run_dir"]
    back = json.loads((run_dir / "weights.jsonl").read_text().splitlines()[-1])
    assert (back["action"], back["weights"]) == ("rollback", {"eager": 10_000, "compiled-naive": 0})
    events = read_table(run_dir / "trial-01" / "compile_events.arrow", COMPILE_EVENTS)[0].to_pylist()
    first = next(event for event in events if event["phase"] == "serving")
    assert back["cause_ns"] - first["start_ns"] == 1e9, "the limit"
    assert back["done_ns"] < first["end_ns"], "it did not wait for the end of the compile"
    assert first["end_ns"] - first["start_ns"] >= 12e9, "the record is the compile as it was"


def test_a_closed_loop_goes_direct_and_machines_are_not_watched_where_it_is_off(tmp_path: Path) -> None:
    traffic = {"arrivals": "closed", "rate": 0, "concurrency": 2, "num_prompts": 5, "duration_s": 60, "direct": True}
    outcome, _ = run(experiment(traffic=traffic, bed={"sample_s": 0}), tmp_path)
    assert outcome.complete, outcome.error
    facts = trial_facts(outcome.run_dir)
    assert (facts["loop"], facts["concurrency"], facts["open_loop"], facts["planned"]) == ("closed", 2, False, {})
    rows = requests(outcome.run_dir)
    assert len(rows) == 10
    assert max(row["end_ns"] for row in rows) - facts["start_ns"] < 60e9, "its prompts end it, and not its duration"
    assert not (outcome.run_dir / "trial-01" / "envoy.json").exists()
    assert not (outcome.run_dir / "trial-01" / "bed.arrow").exists()
    assert "bed" not in facts


def test_a_compile_without_end_and_a_death_after_the_last_answer_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STOP_GRACE_S", 1.0)
    arms = [
        {"name": "eager", "preset": "eager", "control": True},
        {"name": "naive", "preset": "compiled-naive"},
        {"name": "last", "preset": "eager-padded"},
    ]
    what = experiment(arms=arms, traffic={"timeout_s": 1}, parity={"served": False})
    outcome, _ = run(what, tmp_path, "--stall-s", "100", "--die-last", "last-0")
    assert outcome.complete, outcome.error
    facts = trial_facts(outcome.run_dir)
    assert set(facts["final"]) == {"eager-0", "naive-0"}
    compiling = facts["final"]["naive-0"]["compiling"]
    assert compiling["shape"].startswith("1x")
    assert compiling["seconds"] > 1.0
    assert {row["status"] for row in requests(outcome.run_dir) if row["arm"] == "last"} == {"OK"}
    checks = {(row["check"], row["arm"]): row for row in analyze(outcome.run_dir)["validity"]}
    assert not checks["event counts", "naive"]["ok"]
    assert not checks["alive", "last"]["ok"]


def test_a_run_whose_arms_all_died_is_broken(tmp_path: Path) -> None:
    outcome, _ = run(experiment(traffic={"duration_s": 60}), tmp_path, "--die", "naive-0=2", "--die", "eager-0=2")
    assert not outcome.complete
    assert "every arm died" in (outcome.error or "")
    assert requests(outcome.run_dir)
    assert not trial_facts(outcome.run_dir)["complete"]


def test_an_arm_that_hangs_is_given_up_within_the_limits_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STOP_GRACE_S", 1.0)
    outcome, _ = run(experiment(traffic={"timeout_s": 3}), tmp_path, "--freeze", "naive-0=8")
    assert outcome.complete, outcome.error
    (hung,) = [row for row in trial_facts(outcome.run_dir)["answers"]["replicas"] if row["arm"] == "naive"]
    assert "3 s" in hung["error"]
    lost = [row for row in requests(outcome.run_dir) if row["arm"] == "naive" and row["status"] != "OK"]
    assert {row["status"] for row in lost} == {"DEADLINE_EXCEEDED"}
    assert max(row["end_ns"] - row["scheduled_ns"] for row in lost) < 10e9


def test_a_folder_that_is_removed_during_the_run_is_named_as_the_reason(tmp_path: Path) -> None:
    def remove() -> None:
        wait_for(lambda: any(path.stat().st_size > 8000 for path in tmp_path.glob("*-small/*/requests-0.arrow")))
        while found := next(tmp_path.glob("*-small/trial-01"), None):  # what is written meanwhile makes it fail
            shutil.rmtree(found, ignore_errors=True)
            time.sleep(0.05)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    outcome, _ = run(experiment(traffic={"duration_s": 20}), tmp_path)
    thread.join()
    assert not outcome.complete
    assert "trial-01 was removed" in (outcome.error or "")


def test_a_saturation_search_goes_on_where_the_first_trial_left_off(tmp_path: Path) -> None:
    traffic = {"arrivals": "saturation", "rate": 0, "rates": [50, 72], "step_s": 0.6, "settle_s": 0.1}
    what = experiment(
        traffic={**traffic, "duration_s": 1.8, "block_s": 1}, trials={"count": 2}, slo={"p90_ttft_ms": 5000}
    )
    outcome, status = run(what, tmp_path)
    assert outcome.complete, outcome.error
    first, second = (trial_facts(outcome.run_dir, trial) for trial in (1, 2))
    assert [step["rate"] for step in first["steps"]] == [50, 60, 72]
    rates = [step["rate"] for step in second["steps"]]
    assert rates == sorted(rates)
    assert rates[0] > 72, "every step was held, so that the search goes on above"
    assert any("trial 2 searches at" in note for note in status.notes)


def test_a_search_in_turns_records_one_arm_a_trial_and_compares_their_answers(tmp_path: Path) -> None:
    arms = [{"name": "eager", "preset": "eager", "control": True}, {"name": "dynamic", "preset": "compiled-dynamic"}]
    traffic = {"arrivals": "saturation", "rate": 0, "rates": [4, 16], "duration_s": 6, "step_s": 2, "settle_s": 0.5}
    what = experiment(arms=arms, traffic={**traffic, "direct": True}, slo={"p90_ttft_ms": 400}, bed={"sample_s": 0})
    status = Status()
    command = [sys.executable, str(FAKE_ARM), "--token", "dynamic-0=7"]
    searching = FrontierSearch(what, out=tmp_path, budget_s=600.0, status=status, arm_command=command)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set() and not (status.trial == 3 and status.load.arms):
            ended.wait(0.02)
        searching.interrupt()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcome = searching.run()
    finally:
        ended.set()
        watcher.join()
    assert outcome.interrupted, outcome.error
    turns = json.loads((outcome.run_dir / "frontier.json").read_text())["turns"]
    assert [turn["arms"] for turn in turns] == [["eager"], ["dynamic"], ["eager"]]
    summary = analyze(outcome.run_dir)
    answers = {arm["name"]: arm["answers"] for arm in summary["parity"]["arms"]}
    assert all(row["same"] == row["of"] > 0 for row in answers["eager"])
    (gate,) = [gate for gate in summary["gates"] if gate["kind"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("dynamic", "FAIL")
    # Verdicts were not asked for, and an arm with other answers is not one to ship all the same.
    assert (summary["frontier"]["search"]["gated"], summary["frontier"]["failed"]) == (False, ["dynamic"])
    assert {item["pick"] for item in summary["frontier"]["ranges"]} <= {"eager", None}
