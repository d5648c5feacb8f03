"""Interim analyses of a run that goes on, what a ramp decides by them, and the account of a ramp."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailgate.analysis.interim.journal import Watch, read_interim, row_of, settled
from tailgate.analysis.interim.outlook import analyse, outlook_of
from tailgate.analysis.judging import paths
from tailgate.analysis.judging.alarms import Alarm, ServedCompile, burst_alarms, compile_alarms, death_alarms
from tailgate.analysis.judging.comparisons import compared, samples_of, steady_rows
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.judging.ramp import Standing, decide
from tailgate.analysis.judging.verdict import advise
from tailgate.analysis.records import run_records
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.weight_journal import WeightChange
from tailgate.analysis.records.weight_journal import append as append_weights
from tailgate.analysis.run.run import Run
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.analysis.statistics.sequential import SEGMENTS
from tests.fakes.machines import GIB, FakeMachines, Trouble, sample
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, run_in, start_of, write_run
from tests.fakes.runs import gate as made_gate

GATES = {"sequential": True}
SLO = {"p99_e2e_ms": 60_000}
LONG = FakeRun(duration_s=1800, rate=4, gates=GATES, slo=SLO)


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", LONG)


def until(directory: Path, seconds: float | None, *, processes: int = 1, trial: int = 1) -> Path:
    """Make the run one that goes on and of whose traffic `seconds` have settled, in this trial."""
    folder = directory / f"trial-{trial:02d}"
    path = folder / "trial.json"
    info = json.loads(path.read_text())
    info.pop("crc32", None)
    path.write_text(json.dumps({**info, "complete": False, "load_processes": processes}))
    for worker in range(processes):
        settled_ns = None if seconds is None else info["start_ns"] + int(seconds * 1e9)
        account = {"worker": worker, "settled_ns": settled_ns, "complete": False}
        (folder / f"generator-{worker}.json").write_text(json.dumps(account))
    return directory


def run_until(directory: Path, seconds: float) -> Run:
    records = settled(read_run(until(directory, seconds)))
    assert records is not None
    return Run.of(records)


def test_equal_arms_pass_before_the_run_has_ended(long_run: Path) -> None:
    interim = analyse(run_until(long_run, 1500))
    assert [(arm.arm, arm.decision) for arm in interim.arms] == [("compiled", PASS)]
    assert 300 <= (interim.arms[0].decided_s or 0) <= 1500
    assert {check.check for check in interim.checks if not check.ok} == set()


def test_an_interim_decision_is_that_of_the_whole_run_at_the_same_instant(long_run: Path) -> None:
    whole = judge(run_in(long_run))
    decided = {gate.gate: gate.path.decided_s for gate in whole.gates if gate.path is not None}
    assert set(decided) == {"noninferiority p99_ttft", "noninferiority p99_e2e", "slo p99_e2e_ms", "errors"}
    for seconds in (600, 1020, 1500):
        interim = analyse(run_until(long_run, seconds))
        for gate, path in ((gate, gate.path) for gate in interim.gates if gate.path is not None):
            assert (" (after " in gate.reason) is (path.decided_s is not None)
            at_s = decided[gate.gate]
            assert path.decided_s == (at_s if at_s is not None and at_s <= seconds else None), (gate.gate, seconds)


def test_a_pass_needs_one_by_a_single_analysis_of_all_data_too(long_run: Path) -> None:
    run = run_in(long_run)
    rows = steady_rows(run, "compiled")
    (item,) = compared(run, "compiled", "e2e", samples_of(run, "e2e", rows), (0.99,))
    samples = samples_of(run, "e2e", rows, segments=SEGMENTS)
    decided, path = paths.with_evidence(run, item, samples, gates=1)
    assert (decided.verdict, path.outcome) == (PASS, PASS)
    doubtful, path = paths.with_evidence(run, replace(item, p_noninferior=0.11, high=1.12), samples, gates=1)
    assert (doubtful.verdict, path.outcome, path.decided_s) == (INCONCLUSIVE, None, None)
    assert (doubtful.high or 0.0) >= 1.12
    assert doubtful.reason.endswith("leaves the limit of 1.10 open.")


def test_an_objective_that_lacks_blocks_alone_names_them_and_the_time_that_they_take(tmp_path: Path) -> None:
    near = replace(LONG, duration_s=600, slo={"p99_e2e_ms": 4500})
    interim = analyse(run_until(write_run(tmp_path / "run", near), 600))
    (found,) = (gate for gate in interim.gates if gate.kind == "slo")
    assert found.reason.endswith("; a PASS needs 24 blocks, and this run has 20.")
    assert (found.verdict, found.needed_s) == (INCONCLUSIVE, 720.0)
    assert advise([found], []).text.startswith("A run of up to 12 minutes would decide"), "it may end sooner"


@pytest.mark.parametrize(
    ("rate", "seconds", "ratio", "minutes"),
    [(1.0, 60, 1.0, 12), (6.0, 60, 1.0, 6), (1.5, 330, 0.4, 8)],
    ids=["of many requests", "of groups of blocks", "of a large effect that would PASS on fewer requests"],
)
def test_a_latency_that_its_tail_keeps_open_needs_what_every_gate_needs(
    rate: float, seconds: int, ratio: float, minutes: int, tmp_path: Path
) -> None:
    arms = (EAGER, FakeArm(name="compiled", ratio=ratio))
    run = replace(LONG, duration_s=seconds, rate=rate, arms=arms, slo={})
    interim = analyse(run_until(write_run(tmp_path / "run", run), seconds))
    (latency,) = [gate for gate in interim.gates if gate.gate == "noninferiority p99_ttft"]
    assert latency.path is not None
    assert (latency.verdict, latency.path.decided_s) == (INCONCLUSIVE, None)
    assert seconds + (latency.path.outlook_s or 0.0) == latency.needed_s == 60.0 * minutes
    assert "tail" in latency.blocked_by


@pytest.mark.parametrize(("ratio", "decision"), [(0.5, PASS), (2.0, FAIL)])
def test_a_large_effect_is_decided_in_three_minutes_of_steady_traffic(
    ratio: float, decision: str, tmp_path: Path
) -> None:
    run = replace(LONG, duration_s=240, rate=5, arms=(EAGER, FakeArm(name="compiled", ratio=ratio)))
    interim = analyse(run_until(write_run(tmp_path / "run", run), 210))
    (latency,) = [gate for gate in interim.gates if gate.gate == "noninferiority p99_e2e"]
    assert (latency.verdict, interim.arms[0].decision) == (decision, decision), interim.arms[0].reason
    assert latency.path is not None
    assert (latency.path.decided_s or 999) <= 210
    assert ratio / 2 < (latency.low or 0.0) < ratio < (latency.high or math.inf) < ratio * 2


@pytest.mark.parametrize(("spread", "decision"), [(0.075, FAIL), (0.08, None)])
def test_a_large_effect_decides_sooner_unless_starts_differ_by_as_much(
    spread: float, decision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "start_spread", lambda run, arm: spread)
    run = replace(LONG, duration_s=240, rate=5, arms=(EAGER, FakeArm(name="compiled", ratio=2.0)))
    interim = analyse(run_until(write_run(tmp_path / "run", run), 210))
    assert interim.arms[0].decision == decision


@pytest.mark.parametrize(("gates", "verdict"), [({}, PASS), ({"min_blocks": 30}, "INCONCLUSIVE")])
def test_errors_pass_on_few_blocks_unless_more_are_asked_for(
    gates: dict[str, int], verdict: str, tmp_path: Path
) -> None:
    run = replace(LONG, duration_s=600, rate=5, gates={**GATES, **gates})
    interim = analyse(run_until(write_run(tmp_path / "run", run), 300))
    assert [gate.verdict for gate in interim.gates if gate.kind == "error"] == [verdict, PASS]  # of failures, of deaths


@pytest.mark.parametrize(("steal", "ratio", "decision"), [(0.02, 1.3, FAIL), (0.05, 1.5, FAIL), (0.2, 1.5, None)])
def test_steal_is_weighed_alike_by_an_interim_analysis_and_the_final_one(
    tmp_path: Path, steal: float, ratio: float, decision: str | None
) -> None:
    machines = FakeMachines(cards=0, troubles=(Trouble(what="steal", place="host", size=steal),))
    slow = replace(LONG, arms=(EAGER, FakeArm(name="compiled", ratio=ratio)), machines=machines)
    directory = write_run(tmp_path / "run", slow)
    whole = judge(run_in(directory))
    interim = analyse(run_until(directory, 1500))
    assert interim.arms[0].decision == decision
    assert whole.verdicts["compiled"] == (decision or "INCONCLUSIVE")


def test_a_recompile_fails_at_the_first_interim_analysis(tmp_path: Path) -> None:
    naive = replace(LONG, arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=5, seconds=3)])))
    interim = analyse(run_until(write_run(tmp_path / "run", naive), 30))
    assert (interim.arms[0].decided_s, interim.arms[0].decision) == (30.0, FAIL)
    assert "1 recompile" in interim.arms[0].reason


def ramping(path: Path, **limits: float) -> Path:
    """Write a ramp at half of the traffic whose experiment has these limits too."""
    run = replace(LONG, design="split", gates={**GATES, "margin": 0.5, **limits})
    directory = write_run(path / "run", run)
    start = WeightChange(at_ns=start_of(1), weights={"eager": 1, "compiled": 1}, why="so", step=3, done_ns=start_of(1))
    append_weights(directory, start)
    return directory


@pytest.mark.parametrize(("size", "decision"), [(1.2, PASS), (1.8, FAIL)])
def test_a_ramp_judges_the_memory_ratio(tmp_path: Path, size: float, decision: str) -> None:
    directory = ramping(tmp_path, max_memory_ratio=1.5)
    for name, held in (("eager", 1.0), ("compiled", size)):
        sample(directory, "process", f"{name}-0", {"memory_bytes": held * GIB}, arm=name)
    (arm,) = analyse(run_until(directory, 1500)).arms
    assert arm.decision == decision


@pytest.mark.parametrize(
    ("gates", "decision"),
    [
        ([made_gate()], PASS),
        ([made_gate(), made_gate("slo", FAIL)], FAIL),
        ([made_gate(), made_gate("recompile", INCONCLUSIVE)], None),
        ([made_gate(), made_gate("parity", INCONCLUSIVE)], PASS),
        ([made_gate(), made_gate("recompile", INCONCLUSIVE, unseen="see")], PASS),
        ([], None),
    ],
)
def test_an_arm_is_decided_by_the_gates_that_allow_interim_analyses(gates: list[Gate], decision: str | None) -> None:
    assert outlook_of("compiled", gates, seconds=60.0).decision == decision


def test_each_block_that_settles_is_followed_by_an_interim_analysis(tmp_path: Path) -> None:
    directory = until(write_run(tmp_path / "run", replace(LONG, duration_s=300)), None)
    watch = Watch(directory)
    assert watch.analyse(1) is None, "the load has not begun"
    until(directory, 29)
    assert watch.analyse(2) is None, "no block is whole"
    until(directory, 61)
    row = watch.analyse(3) or {}
    assert (row["number"], row["seconds"], row["at_ns"]) == (1, 60.0, 3)
    assert watch.analyse(4) is None, "nothing new"
    until(directory, 95)
    assert (watch.analyse(5) or {})["seconds"] == 90.0
    assert [line["seconds"] for line in read_interim(directory)] == [60.0, 90.0]
    assert Watch(directory).analyse(6) is not None
    assert read_interim(directory)[-1]["number"] == 3, "one that starts again counts on"


def test_a_block_is_settled_once_it_is_for_every_load_process(long_run: Path) -> None:
    directory = until(long_run, 120, processes=2)
    path = directory / "trial-01" / "generator-1.json"
    path.write_text(json.dumps({"worker": 1, "settled_ns": None}))
    assert settled(read_run(directory)) is None
    path.unlink()
    assert settled(read_run(directory)) is None


def test_accounts_are_read_before_the_requests_of_any_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run", replace(LONG, trials=2, duration_s=120))
    until(directory, 60, trial=2)
    tables_in = run_records.tables_in

    def reading(path: Path, *rest: Any, **more: Any) -> Any:
        if path.name.startswith("requests"):  # meanwhile the load process goes on
            until(directory, 120, trial=2)
        return tables_in(path, *rest, **more)

    monkeypatch.setattr(run_records, "tables_in", reading)
    records = settled(read_run(directory))
    assert records is not None
    assert records.trials[1]["duration_s"] == 60


def test_requests_of_blocks_that_are_not_settled_are_left_out(long_run: Path) -> None:
    run = run_until(long_run, 100)
    assert run.seconds == 90.0
    assert run.requests.start_ns.max() < run.trials[0].start_ns + 90 * 10**9


def test_value_limit_and_interval_of_a_gate_are_in_one_unit(long_run: Path) -> None:
    run = run_until(long_run, 600)
    rows = {gate["gate"]: gate for gate in row_of(analyse(run), run, count=1, at_ns=0)["gates"]}
    for name, limit in (("slo p99_e2e_ms", 1.0), ("errors", run.limits.max_error_pct)):
        assert (rows[name]["unit"], rows[name]["limit"]) == ("pct", pytest.approx(limit))
        assert rows[name]["value"] == rows[name]["low"] == 0.0 < rows[name]["high"] < 5.0
    ratio = rows["noninferiority p99_e2e"]
    assert ratio["unit"] == "ratio"
    assert ratio["low"] < ratio["value"] < ratio["high"]


NOW = 100 * SECOND


def compile_of(
    end_ns: int, seconds: float = 0.1, *, kind: str = "recompile", arm: str = "new", replica: int = 0
) -> ServedCompile:
    start_ns = end_ns - round(seconds * SECOND)
    where = f"{arm}-{replica}"
    return ServedCompile(arm=arm, replica=where, kind=kind, start_ns=start_ns, end_ns=end_ns, shape="prefill 1×81")


def under_way(seconds: float) -> ServedCompile:
    return replace(compile_of(NOW, seconds), end_ns=None)


@pytest.mark.parametrize(
    ("events", "most", "times"),
    [
        ([compile_of(7, 1.0), compile_of(9, 0.99)], 9, [7]),
        ([compile_of(1)], 1, []),
        ([compile_of(1), compile_of(2), compile_of(3)], 1, [2, 3]),
        ([compile_of(1, 9.0, arm="old"), compile_of(2, 9.0, kind="graph_capture")], 0, []),
        ([under_way(0.1)], 0, []),
        ([under_way(3.0)], 0, [NOW - 2 * SECOND]),
        ([under_way(4.0), compile_of(NOW + 2_000, 6.0)], 9, [NOW + 2_000]),
        ([under_way(1.0), compile_of(NOW + 2_000, 6.0, replica=1)], 9, [NOW, NOW + 2_000]),
        ([under_way(4.003), compile_of(NOW - 3_000_000, 4.0)], 9, [NOW - 3_000_000]),
        ([under_way(4.0), compile_of(NOW - 3_000_000, 0.5)], 9, [NOW - 3 * SECOND]),
    ],
    ids=[
        "stall limit",
        "allowed",
        "too many recompiles",
        "other arms and kinds",
        "under way",
        "under way for too long",
        "over since it was under way",
        "under way at another replica",
        "its event came just after its status",
        "a short one ended within it",
    ],
)
def test_long_compiles_and_recompiles_beyond_the_limit_are_alarms(
    events: list[ServedCompile], most: int, times: list[int]
) -> None:
    found = compile_alarms("new", events, now_ns=NOW, stall_limit_s=1.0, max_recompiles=most)
    assert [alarm.at_ns for alarm in found] == times


LIMITS = RampLimits()
READY = Standing(safe=True, requests=100)


def decided(limits: RampLimits, *, step: int = 1, step_s: float = 400.0, **seen: Any) -> tuple[str, str]:
    return decide(replace(READY, **seen), limits, step=step, step_s=step_s)


@pytest.mark.parametrize(
    ("change", "action", "why"),
    [
        ({}, "advance", ""),
        ({"step_s": 299.0}, "stay", "300 s"),
        ({"requests": 29}, "stay", "29 of 30 requests"),
        ({"safe": False}, "stay", "25 % slower"),
        ({"uneven": "it got more than its share"}, "stay", "more than its share"),
        ({"step": 3}, "stay", "not every gate has passed"),
        ({"step": 3, "passed": True, "safe": False}, "advance", ""),
        ({"step": 4, "step_s": 299.0}, "stay", ""),
        ({"step": 4, "step_s": 300.0}, "promoted", ""),
        ({"step_s": 1800.0, "safe": False}, "hold", "still open after 1800 s"),
        *(({"step": step, "step_s": 0.1, "passed": True, "failed": "slow"}, "rollback", "slow") for step in range(5)),
    ],
)
def test_a_step_ends_once_the_candidate_is_safe_and_has_had_time_and_requests(
    change: dict[str, Any], action: str, why: str
) -> None:
    found, reason = decided(LIMITS, **change)
    assert found == action
    assert why in reason
    rollback = LIMITS.model_copy(update={"on_inconclusive": "rollback"})
    assert decided(rollback, **change)[0] == ("rollback" if action == "hold" else action)


HALF = FakeRun(design="split", duration_s=600, rate=4, gates=GATES)


def change(at_s: float, share: int, action: str, step: int, why: str = "so", **more: int) -> WeightChange:
    weights = {"eager": 100 - share, "compiled": share}
    return WeightChange(
        at_ns=start_of(1) + int(at_s * SECOND), weights=weights, why=why, action=action, step=step, **more
    )


def ramped(path: Path, run: FakeRun, *changes: WeightChange) -> Run:
    directory = write_run(path / "run", run)
    for item in changes:
        append_weights(directory, item)
    return run_in(directory)


def ramp_of(run: Run) -> tuple[str, str]:
    found = next(item for item in judge(run).gates if item.gate == "ramp")
    return found.verdict, found.reason


def test_a_rollback_fails_and_counts_the_requests_that_were_exposed(tmp_path: Path) -> None:
    slow = replace(HALF, arms=(EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=300, seconds=5)])))
    back = change(306, 0, "rollback", 0, why="It compiled.", cause_ns=start_of(1) + 305 * SECOND)
    run = ramped(tmp_path, slow, change(0, 50, "start", 0), back, replace(back, done_ns=back.at_ns + SECOND // 2))
    assert [item.done_ns for item in run.records.weights] == [None, back.at_ns + SECOND // 2], "the last of an instant"
    verdict, reason = ramp_of(run)
    assert verdict == "FAIL"
    exposed = int((run.of_arm("compiled") & ~run.requests.broken).sum())
    assert f"It compiled; it served {exposed} requests" in reason
    assert "of which 0 were hurt" not in reason


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ((), "INCONCLUSIVE", "5 %"),
        ((change(300, 50, "advance", 2),), "INCONCLUSIVE", "the run ended"),
        ((change(300, 50, "advance", 2), change(500, 50, "hold", 2, why="still open")), "INCONCLUSIVE", "25 %: still"),
        ((change(590, 50, "promoted", 4),), "PASS", ""),
    ],
    ids=["first step", "cut off", "held", "promoted"],
)
def test_a_ramp_passes_once_promoted(
    tmp_path: Path, changes: tuple[WeightChange, ...], expected: str, words: str
) -> None:
    verdict, reason = ramp_of(ramped(tmp_path, HALF, change(0, 50, "start", 1), *changes))
    assert (verdict, words in reason) == (expected, True), reason


def test_weights_that_changed_outside_a_ramp_are_no_ramp(tmp_path: Path) -> None:
    outside = replace(change(0, 50, "set", 1), step=None)
    assert "ramp" not in {item.gate for item in judge(ramped(tmp_path, HALF, outside)).gates}


def test_other_alarms_are_deaths_and_bursts_of_errors() -> None:
    deaths = [{"arm": "new", "replica": "new-0", "at_ns": 5}, {"arm": "new"}, {"arm": "old", "replica": "old-0"}]
    assert death_alarms("new", deaths, now_ns=9) == [Alarm(at_ns=5, why="new-0 died"), Alarm(at_ns=9, why="new died")]
    for failed, finished, alarms in ((4, 4, 0), (5, 25, 0), (5, 24, 1)):
        assert len(burst_alarms("new", failed=failed, finished=finished, now_ns=3, meanwhile="so far")) == alarms


@pytest.mark.parametrize(
    ("design", "weights", "expected"),
    [("split", (9, 1), "requests"), ("split", (1, 1), "arms"), ("mirrored", (9, 1), "arms")],
)
def test_what_is_exchanged_follows_the_shares(design: str, weights: tuple[int, int], expected: str) -> None:
    shares = dict(zip(("eager", "compiled"), weights, strict=True))
    run = SimpleNamespace(design=design, weights=shares, control="eager", records=SimpleNamespace(weights=()))
    assert paths.exchange_of(run, "compiled") == expected  # type: ignore[arg-type]
    run.records.weights = (change(0, 50, "start", 3),)
    assert paths.exchange_of(run, "compiled") == "requests"  # type: ignore[arg-type]
