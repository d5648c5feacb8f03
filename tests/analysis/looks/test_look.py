"""Looks at runs that go on: what is decided, what is still waited for, and that a look knows nothing of what comes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.judgement import judge
from analysis.judging.paths import Path as EvidencePath
from analysis.looks.journal import JOURNAL, append, read_looks, row_of
from analysis.looks.look import look_at, outlook_of
from analysis.looks.watch import Watch
from analysis.records.run_records import read_run
from analysis.records.weight_journal import WeightChange
from analysis.records.weight_journal import append as append_weights
from analysis.run.horizon import settled
from analysis.run.run import Run
from tests.fakes.resources import GIB, sample
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, start_of, write_run

GATES = {"draws": 99, "sequential": True}
SLO = {"p99_e2e_ms": 60_000}
LONG = FakeRun(duration_s=1800, rate=4, gates=GATES, slo=SLO)


def until(directory: Path, seconds: float | None, *, processes: int = 1) -> Path:
    """The run as it lies there while it goes on; `seconds` of its traffic have settled."""
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info.pop("crc32", None)
    path.write_text(json.dumps({**info, "complete": False, "load_processes": processes}))
    for worker in range(processes):
        settled_ns = None if seconds is None else info["start_ns"] + int(seconds * 1e9)
        account = {"worker": worker, "settled_ns": settled_ns, "complete": False}
        (directory / "trial-01" / f"generator-{worker}.json").write_text(json.dumps(account))
    return directory


def run_until(directory: Path, seconds: float) -> Run:
    records = settled(read_run(until(directory, seconds)))
    assert records is not None
    return Run.of(records)


def test_equal_arms_pass_before_the_run_has_ended(tmp_path: Path) -> None:
    look = look_at(run_until(write_run(tmp_path / "run", LONG), 1500), left_s=300)
    assert [(arm.arm, arm.decision) for arm in look.arms] == [("compiled", PASS)]
    assert look.decided
    assert 300 <= (look.arms[0].decided_s or 0) <= 1500
    assert {check.check for check in look.checks if not check.ok} == set()


def test_what_a_look_decides_the_whole_run_decides_at_the_same_instant(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", LONG)
    whole = judge(Run.of(read_run(directory)))
    decided = {gate.gate: gate.path.decided_s for gate in whole.gates if gate.path is not None}
    assert set(decided) == {"noninferiority p99_ttft", "noninferiority p99_e2e", "slo p99_e2e_ms", "errors"}
    for seconds in (600, 1020, 1500):
        look = look_at(run_until(directory, seconds), left_s=0)
        for gate in look.gates:
            if gate.path is None:
                continue
            at_s = decided[gate.gate]
            seen = gate.path.decided_s
            assert seen == (at_s if at_s is not None and at_s <= seconds else None), (gate.gate, seconds)


def test_a_slow_arm_fails_soon(tmp_path: Path) -> None:
    slow = replace(LONG, arms=(EAGER, FakeArm(name="compiled", ratio=2.0)))
    look = look_at(run_until(write_run(tmp_path / "run", slow), 600), left_s=1200)
    assert look.arms[0].decision == FAIL
    assert (look.arms[0].decided_s or 0) <= 480
    assert look.arms[0].reason.startswith("p99")


def test_a_recompile_fails_at_the_first_look(tmp_path: Path) -> None:
    naive = replace(LONG, arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=5, seconds=3)])))
    look = look_at(run_until(write_run(tmp_path / "run", naive), 30), left_s=1770)
    assert (look.seconds, look.arms[0].decision) == (30.0, FAIL)
    assert "1 recompile" in look.arms[0].reason


def test_before_enough_is_known_nothing_is_decided_and_nothing_is_hopeless(tmp_path: Path) -> None:
    look = look_at(run_until(write_run(tmp_path / "run", LONG), 120), left_s=1680)
    assert (look.arms[0].decision, look.arms[0].hopeless, look.decided) == (None, False, False)


def test_gates_with_one_look_alone_keep_a_pass_from_coming_early(tmp_path: Path) -> None:
    run = replace(LONG, gates={**GATES, "max_memory_ratio": 2.0})
    look = look_at(run_until(write_run(tmp_path / "run", run), 1500), left_s=300)
    assert (look.arms[0].decision, look.arms[0].reason) == (None, "Some gates are decided at the end of the run.")


def ramping(path: Path, **limits: float) -> Path:
    """A ramp at half of the traffic whose experiment has these limits too."""
    run = replace(LONG, design="split", gates={**GATES, "margin": 0.5, **limits})
    directory = write_run(path / "run", run)
    start = WeightChange(at_ns=start_of(1), weights={"eager": 1, "compiled": 1}, why="so", step=3, done_ns=start_of(1))
    append_weights(directory, start)
    return directory


def test_a_ramp_waits_for_no_gate_that_only_its_end_decides(tmp_path: Path) -> None:
    directory = ramping(tmp_path, max_memory_growth_pct_per_hour=5.0)
    (arm,) = look_at(run_until(directory, 1500), left_s=300).arms
    assert (arm.decision, arm.reason) == (PASS, "Every gate that may be looked at has passed.")


@pytest.mark.parametrize(("size", "decision"), [(1.2, PASS), (1.8, FAIL)])
def test_a_ramp_looks_at_the_memory_of_its_candidate(tmp_path: Path, size: float, decision: str) -> None:
    directory = ramping(tmp_path, max_memory_ratio=1.5)
    for name, held in (("eager", 1.0), ("compiled", size)):
        sample(directory, "process", f"{name}-0", {"memory_bytes": partial(_flat, held * GIB)}, arm=name)
    (arm,) = look_at(run_until(directory, 1500), left_s=300).arms
    assert arm.decision == decision


def _flat(size: float, _: int, at_s: Floats) -> Floats:
    return np.full(at_s.size, size)


def test_an_arm_at_the_margin_becomes_hopeless_when_little_is_left(tmp_path: Path) -> None:
    near = replace(LONG, arms=(EAGER, FakeArm(name="compiled", ratio=1.1)))
    run = run_until(write_run(tmp_path / "run", near), 1500)
    assert not look_at(run, left_s=36_000).arms[0].hopeless
    look = look_at(run, left_s=30)
    assert look.arms[0].decision is None
    assert look.arms[0].hopeless
    assert look.decided


def gate(verdict: str, kind: str = "recompile", **more: object) -> Gate:
    shown = {"arm": "a", "gate": kind, "value": 1.0, "limit": 1.0, "unit": "count", "reason": "So."}
    return Gate(**{**shown, "kind": kind, "verdict": verdict, **more})  # type: ignore[arg-type]


def path_of(*, harm: float, safety: float) -> EvidencePath:
    """Twenty groups whose evidence grew evenly, to these decimal logarithms."""
    at_s = np.linspace(60.0, 1200.0, 20)
    nothing = np.ones(20)
    return EvidencePath(
        at_s=at_s,
        value=nothing,
        low=nothing,
        high=nothing,
        harm=harm * at_s / at_s[-1],
        safety=safety * at_s / at_s[-1],
        limit=1.1,
        needed=1.3,
        needed_safety=1.3,
        outcome=None,
        decided_s=None,
    )


def test_an_arm_that_may_still_fail_is_not_hopeless() -> None:
    lost = gate(INCONCLUSIVE, "noninferiority", path=path_of(harm=-1.0, safety=-1.0))
    failing = gate(INCONCLUSIVE, "slo", path=path_of(harm=1.2, safety=-5.0))
    passing = gate(INCONCLUSIVE, "slo", path=path_of(harm=-5.0, safety=1.2))
    for others, hopeless in (([], True), ([failing], False), ([passing], True)):
        assert outlook_of("a", [lost, *others], seconds=1200.0, left_s=600.0).hopeless is hopeless


def test_an_arm_with_a_stall_that_nobody_explains_is_hopeless_unless_it_may_fail() -> None:
    open_ = gate(INCONCLUSIVE, blocked_by=("stalls of unknown cause",), reason="Nobody says why.")
    failing = gate(INCONCLUSIVE, "slo", path=path_of(harm=1.2, safety=-5.0))
    passing = gate(INCONCLUSIVE, "slo", path=path_of(harm=-5.0, safety=1.2))
    for others, hopeless in (([], True), ([failing], False), ([passing], True)):
        outlook = outlook_of("a", [*others, open_], seconds=1200.0, left_s=600.0)
        assert (outlook.hopeless, outlook.reason) == (hopeless, "Nobody says why.")


@pytest.mark.parametrize(
    ("gates", "decision"),
    [
        ([gate(PASS)], PASS),
        ([gate(PASS), gate(FAIL)], FAIL),
        ([gate(PASS), gate(INCONCLUSIVE)], None),
        ([gate(PASS), gate(INCONCLUSIVE, "parity")], PASS),
        ([gate(PASS), gate(INCONCLUSIVE, unseen=True)], PASS),
        ([], None),
    ],
)
def test_an_arm_is_decided_by_the_gates_that_may_be_looked_at(gates: list[Gate], decision: str | None) -> None:
    assert outlook_of("a", gates, seconds=60.0, left_s=60.0).decision == decision


def test_a_look_is_made_whenever_a_block_more_has_settled(tmp_path: Path) -> None:
    directory = until(write_run(tmp_path / "run", replace(LONG, duration_s=300)), None)
    watch = Watch(directory)
    assert watch.look(1) is None, "the load has not begun"
    until(directory, 29)
    assert watch.look(2) is None, "no block is whole"
    until(directory, 61)
    row = watch.look(3)
    assert row is not None
    assert (row["look"], row["seconds"], row["at_ns"]) == (1, 60.0, 3)
    assert watch.look(4) is None, "nothing new"
    until(directory, 95)
    assert (watch.look(5) or {})["seconds"] == 90.0
    assert [line["seconds"] for line in read_looks(directory)] == [60.0, 90.0]
    assert Watch(directory).look(6) is not None
    assert read_looks(directory)[-1]["look"] == 3, "one that starts again counts on"


def test_a_block_is_settled_once_every_load_process_says_so(tmp_path: Path) -> None:
    directory = until(write_run(tmp_path / "run", LONG), 120, processes=2)
    path = directory / "trial-01" / "generator-1.json"
    path.write_text(json.dumps({"worker": 1, "settled_ns": None}))
    assert settled(read_run(directory)) is None
    path.unlink()
    assert settled(read_run(directory)) is None


def test_requests_of_blocks_that_are_not_settled_are_left_out(tmp_path: Path) -> None:
    run = run_until(write_run(tmp_path / "run", LONG), 100)
    assert run.seconds == 90.0
    assert run.requests.start_ns.max() < run.trials[0].start_ns + 90 * 10**9


def test_value_limit_and_interval_of_a_gate_are_in_one_unit(tmp_path: Path) -> None:
    run = run_until(write_run(tmp_path / "run", LONG), 600)
    row = row_of(look_at(run, left_s=0), run, number=1, at_ns=0)
    gates = {gate["gate"]: gate for gate in row["gates"]}
    for name, limit in (("slo p99_e2e_ms", 1.0), ("errors", run.limits.max_error_pct)):
        gate = gates[name]
        assert (gate["unit"], gate["limit"], gate["value"]) == ("pct", pytest.approx(limit), 0.0), name
        assert gate["low"] == 0.0
        assert 0.0 < gate["high"] < 5.0
    ratio = gates["noninferiority p99_e2e"]
    assert ratio["unit"] == "ratio"
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert ratio["needed"] > 1.3
    assert (gates["recompiles"]["needed"], gates["recompiles"]["unit"]) == (None, "count")


def test_before_the_cold_start_is_over_a_gate_says_why_it_has_no_value(tmp_path: Path) -> None:
    run = run_until(write_run(tmp_path / "run", LONG), 31)
    gate = next(gate for gate in look_at(run, left_s=0).gates if gate.kind == "noninferiority")
    assert gate.value is None
    assert "has no request to compare, none past the cold start of 30 s that no compile held up." in gate.reason


def test_a_torn_last_line_of_the_journal_is_no_look(tmp_path: Path) -> None:
    append(tmp_path, {"look": 1})
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"look": 2, "sec')
    assert read_looks(tmp_path) == [{"look": 1}]
    assert read_looks(tmp_path / "none") == []
