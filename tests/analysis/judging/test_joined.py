"""Joined runs judged as one: every check sees all trials, and each machine is a stratum."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.judging.comparisons import comparisons
from tailgate.analysis.judging.judgement import Judgement, judge
from tailgate.analysis.records.joining import listed_runs, write_run_list
from tailgate.analysis.records.run_records import check_runs, read_run
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.run.run import Run
from tailgate.analysis.summary.summary import analyze
from tests.fakes.request_rows import append_rows
from tests.fakes.runs import EAGER, SECOND, SEPARATE_DAYS, Compile, FakeArm, FakeRun, run_in, start_of, write_run

RUN = FakeRun(duration_s=300, rate=3, gates={"metrics": ["e2e"], "max_error_pct": 1.0})
TIGHT = {"p90_e2e_ms": 700}


def on(machine: str, *, slower: float = 1.0, ratio: float = 1.0, **more: Any) -> FakeRun:
    """Describe a run on a machine that is `slower` for both arms, `ratio` times as much for the treatment."""
    arms = (replace(EAGER, ratio=slower), FakeArm(name="compiled", ratio=slower * ratio))
    return replace(RUN, **{"arms": arms, "environment": {"machine": machine}, **more})


def joined(folder: Path, *runs: FakeRun) -> Path:
    directories = [
        write_run(folder / f"run-{day}", replace(run, seed=run.seed + day, day=day * SEPARATE_DAYS))
        for day, run in enumerate(runs)
    ]
    listed = listed_runs(directories)
    check_runs(listed)
    write_run_list(folder / "joined", listed)
    return folder / "joined"


def judged(folder: Path) -> tuple[Run, Judgement]:
    run = run_in(folder)
    return run, judge(run)


def check(judgement: Judgement, name: str) -> Any:
    return next(item for item in judgement.checks if item.check == name)


def test_joined_runs_pass_every_check_that_each_of_them_passes(tmp_path):
    run, judgement = judged(joined(tmp_path, on("a", trials=2), on("a", trials=1), on("b", trials=2)))
    assert (len(run.trials), len(run.machines)) == (5, 2)
    assert [item.check for item in judgement.checks if not item.ok] == []
    assert run.planned == {"eager": 4500, "compiled": 4500}
    assert check(judgement, "pairs").ok
    assert check(judgement, "heterogeneity").ok
    assert judgement.overall == "PASS"


def test_a_fault_of_one_run_concerns_all_and_names_its_trial(tmp_path):
    folder = joined(tmp_path, on("a"), on("a", trials=2))
    path = tmp_path / "run-1" / "trial-02" / "trial.json"
    info = json.loads(path.read_text())
    death = {"arm": "compiled", "replica": "compiled-0", "exit_code": -9}
    counters = {"compile_events": 9}
    final = {"eager-0": {"counters": {}}, "compiled-0": {"counters": counters}}
    path.write_text(json.dumps({**info, "complete": False, "deaths": [death], "final": final}))
    _, judgement = judged(folder)
    assert "trial 3 (trial 2 of run-1) stopped before its end" in check(judgement, "complete").reason
    assert any(item.gate == "deaths" and item.verdict == "FAIL" for item in judgement.gates)
    lost = [item.reason for item in judgement.checks if item.check == "telemetry" and not item.ok]
    assert any("compiled-0 in trial 3 counted 9 compile events" in reason for reason in lost)


def test_missing_events_are_counted_under_the_new_number_of_their_trial(tmp_path):
    compiling = FakeArm(name="compiled", compiles=(Compile(at_s=100, seconds=1),))
    folder = joined(tmp_path, replace(RUN, arms=(EAGER, compiling)), replace(RUN, arms=(EAGER, compiling)))
    path = tmp_path / "run-1" / "trial-01" / "compile_events.arrow"
    row = {"trial": 1, "arm": "compiled", "replica": "compiled-0", "kind": "compile", "phase": "warmup"}
    start = start_of(1, day=SEPARATE_DAYS) - SECOND
    row |= {"event_id": "1-compiled-0-7", "start_ns": start, "end_ns": start + 1}
    append_rows(path, COMPILE_EVENTS, [row])
    _, judgement = judged(folder)
    reasons = [item.reason for item in judgement.checks if item.check == "telemetry" and not item.ok]
    assert len(reasons) == 1
    assert "compiled-0 in trial 2 counted 8 compile events, and 3 are recorded" in reasons[0]


def test_runs_of_one_seed_share_schedules(tmp_path):
    one = write_run(tmp_path / "a", on("a", trials=2))
    other = write_run(tmp_path / "b", on("a", trials=2, day=SEPARATE_DAYS))
    write_run_list(tmp_path / "joined", listed_runs([one, other]))
    _, judgement = judged(tmp_path / "joined")
    said = check(judgement, "schedules")
    assert not said.ok
    assert "1 and 3; 2 and 4" in said.reason
    assert said.opens == ()
    assert judgement.overall == "PASS", "a mirrored schedule favours neither arm"


def test_a_slow_machine_does_not_make_the_ratio_of_all(tmp_path):
    folder = joined(tmp_path, on("a", slower=4.0, ratio=1.0), on("b", ratio=1.5))
    run = Run.of(replace(read_run(folder), experiment={**read_run(folder).experiment, "gates": {"question": "run"}}))
    items = comparisons(run)
    (e2e,) = (item for item in items.gated if item.metric == "e2e")
    assert 1.15 < e2e.ratio < 1.35, "the tail of both machines"
    ratios = {item.machine: item.ratio for item in items.by_machine if item.metric == "e2e"}
    assert ratios == {"a": pytest.approx(1.0, abs=0.06), "b": pytest.approx(1.5, abs=0.09)}


@pytest.mark.parametrize(
    ("key", "values", "least", "most"),
    [("slower", (1.0, 2.0, 0.7), 0.0, 1.5), ("ratio", (0.9, 1.0, 1.1), 2.5, math.inf)],
)
def test_machines_that_differ_in_the_ratio_widen_it_and_in_speed_do_not(tmp_path, key, values, least, most):
    def width(folder: Path) -> float:
        (item,) = comparisons(run_in(folder)).gated
        return math.log((item.high or math.inf) / (item.low or 0.01))

    alike = width(joined(tmp_path / "alike", *(on(name) for name in "abc")))
    differing = (on(name, **{key: value}) for name, value in zip("abc", values, strict=True))
    assert least * alike < width(joined(tmp_path / "differing", *differing)) < most * alike


@pytest.mark.parametrize(
    ("others", "last", "kind", "words"),
    [
        ({"ratio": 0.7}, {"ratio": 1.4}, "noninferiority", ""),
        ({"slo": TIGHT}, {"slo": TIGHT, "slower": 2.0}, "slo", "p90_e2e_ms is missed on d"),
        ({}, {"arms": (EAGER, FakeArm(name="compiled", error_share=0.03))}, "error", "missed on d alone"),
    ],
    ids=["ratio", "objective", "errors"],
)
def test_a_machine_that_contradicts_the_others_leaves_its_gate_open(tmp_path, others, last, kind, words):
    runs = [*(on(name, trials=2, **others) for name in "abc"), on("d", **last)]
    _, judgement = judged(joined(tmp_path, *runs))
    gates = {item.kind: item for item in judgement.gates if item.gate != "deaths"}
    assert gates[kind].verdict == "INCONCLUSIVE"
    assert words in check(judgement, "heterogeneity").reason
    if words:
        assert gates[kind].blocked_by == ("heterogeneity",)
        assert gates["noninferiority"].blocked_by == ()


def test_the_summary_names_runs_and_machines(tmp_path):
    summary = analyze(joined(tmp_path, on("a", trials=2), on("b")))
    facts = summary["joined"]
    assert [(row["name"], row["machine"], row["trials"]) for row in facts["runs"]] == [
        ("run-0", "a", [1, 2]),
        ("run-1", "b", [3]),
    ]
    assert facts["machines"] == 2
    assert "machine" not in summary["environment"]
    again = analyze(tmp_path / "joined")
    assert again == summary


def test_a_trial_without_compile_events_among_others_leaves_gates_open(tmp_path):
    run = write_run(tmp_path / "run", on("a", trials=2))
    (run / "trial-02" / "compile_events.arrow").unlink()
    _, judgement = judged(run)
    assert "trial-02" in check(judgement, "complete").reason
    assert judgement.overall == "INCONCLUSIVE"
