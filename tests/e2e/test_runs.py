"""Whole runs with paced fake arms that take too long for the default suite, and commands at a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.trials import replicas
from tailgate.loadtests.trials.frontier import FrontierSearch
from tailgate.loadtests.trials.status import Status
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run
from tests.fakes.whole_run import (
    FAKE_ARM,
    ROOT,
    experiment,
    last_line,
    requests,
    run,
    summary_of,
    trial_facts,
    with_fake_arms,
)


def test_a_run_until_decided_ends_when_it_is_decided(tmp_path: Path) -> None:
    settings = ["--until-decided", "--at-most", "440s", "--set", "seed=3", "--out", "out"]
    settings += ["--set", "traffic.block_s=1", "--set", "traffic.rate=30", "--set", "gates.cold_s=2"]
    settings += ["--set", "trials.starting_at_once=3", "--set", "trials.count=2"]
    # A busy machine sends late.
    settings += ["--set", "gates.max_generator_lag_ms=2000", "--set", "gates.margin=1.0"]
    settings += ["--set", "gates.max_other_cpu_pct=100", "--set", "gates.max_steal_pct=100"]
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
    assert not blocking & {"complete", "arms", "cut requests", "pairs", "blocks"}
    analyses = [json.loads(text) for text in (run_dir / "interim.jsonl").read_text().splitlines()]
    assert {name: arm["decision"] for name, arm in analyses[-1]["arms"].items()} == {
        "compiled-padded": "PASS",
        "compiled-naive": "FAIL",
    }
    assert "SIGKILL" not in (run_dir / "interim.log").read_text()


def test_an_endless_compile_and_a_death_after_the_last_answer_are_recorded(
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
    assert not checks["telemetry", "naive"]["ok"]
    assert not checks["alive", "last"]["ok"]


def test_a_run_whose_arms_all_died_is_broken(tmp_path: Path) -> None:
    outcome, _ = run(experiment(traffic={"duration_s": 60}), tmp_path, "--die", "naive-0=2", "--die", "eager-0=2")
    assert not outcome.complete
    assert "every arm died" in (outcome.error or "")
    assert requests(outcome.run_dir)
    assert not trial_facts(outcome.run_dir)["complete"]


def test_an_arm_that_hangs_is_abandoned_within_the_limits_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_STOP_GRACE_S", 1.0)
    outcome, _ = run(experiment(traffic={"timeout_s": 3}), tmp_path, "--freeze", "naive-0=8")
    assert outcome.complete, outcome.error
    (hung,) = [row for row in trial_facts(outcome.run_dir)["answers"]["replicas"] if row["arm"] == "naive"]
    assert hung["error"] == "an answer was not complete after 18 s"  # six times the limit of a request
    lost = [row for row in requests(outcome.run_dir) if row["arm"] == "naive" and row["status"] != "OK"]
    assert {row["status"] for row in lost} == {"DEADLINE_EXCEEDED"}
    assert max(row["end_ns"] - row["scheduled_ns"] for row in lost) < 10e9


def test_a_search_in_turns_records_one_arm_a_trial_and_compares_their_answers(tmp_path: Path) -> None:
    arms = [{"name": "eager", "preset": "eager", "control": True}, {"name": "dynamic", "preset": "compiled-dynamic"}]
    traffic = {"arrivals": "saturation", "rate": 0, "rates": [4, 16], "duration_s": 6, "step_s": 2, "settle_s": 0.5}
    what = experiment(arms=arms, traffic=traffic, slo={"p90_ttft_ms": 400})
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
    trials = [trial_facts(outcome.run_dir, number)["arms"] for number in (1, 2, 3)]
    assert [[row["name"] for row in arms] for arms in trials] == [["eager"], ["dynamic"], ["eager"]]
    summary = analyze(outcome.run_dir)
    (gate,) = [gate for gate in summary["gates"] if gate["kind"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("dynamic", "FAIL")
    # Without verdicts, an arm with other answers is not offered.
    assert not summary["frontier"]["gated"]
    assert any("dynamic is FAIL" in line for line in summary["frontier"]["answer"])
    assert not any("dynamic holds" in line for line in summary["frontier"]["answer"])


NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(3)])
SUMMARIZE = (
    "import sys; from pathlib import Path; from tailgate.analysis.summary.summary import analyze, write_summary; "
    "write_summary(analyze(Path(sys.argv[1])), Path(sys.argv[2]))"
)


def test_a_summary_is_the_same_bytes_whatever_the_hash_seed_and_threads(tmp_path: Path) -> None:
    run = FakeRun(duration_s=60, rate=1, arms=(EAGER, NAIVE))
    directory = write_run(tmp_path / "run", run)
    for number in (1, 2):
        threads = {name: str(number) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS")}
        environment = {**os.environ, **threads, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SUMMARIZE, str(directory), str(tmp_path / f"{number}.json")]
        subprocess.run(command, env=environment, check=True)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
