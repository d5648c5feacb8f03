"""Gates: what passes, fails or stays open, of compiles, latency, errors, goodput and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailgate.analysis.checks import telemetry
from tailgate.analysis.judging.gates import Gate, status
from tailgate.analysis.judging.gates.compiles import CompileFacts, reported_gates
from tailgate.analysis.judging.gates.memory import ratio_limits
from tailgate.analysis.judging.judgement import Judgement, judge
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.startup import CompiledSteps, most_eager
from tailgate.analysis.settings.gate_limits import GateLimits
from tests.fakes.machines import GIB, sample, tell
from tests.fakes.runs import EAGER, FakeArm, FakeRun, run_in, write_run

LIMITS = GateLimits()


def facts(**change):
    base = dict.fromkeys(("recompiles", "most_in_a_trial", "requests_hit"), 0)
    base |= dict.fromkeys(("longest_event_s", "longest_stall_s", "stall_s_per_min"), 0.0)
    return CompileFacts(**base | {"known": True, "kernels": "", "requests": 180} | change)


STALLING = {"recompiles": 6, "most_in_a_trial": 6, "longest_event_s": 7.9, "longest_stall_s": 7.85, "requests_hit": 31}


@pytest.mark.parametrize(
    ("seen", "verdicts"),
    [
        ({}, ["PASS"] * 4),
        ({"longest_stall_s": 1.0, "stall_s_per_min": 0.5}, ["PASS"] * 4),
        (STALLING, ["FAIL", "FAIL", "PASS", "FAIL"]),
        ({"known": False, "recompiles": 3, "most_in_a_trial": 3}, ["INCONCLUSIVE"] * 4),
        ({"requests": 0}, ["INCONCLUSIVE"] * 4),
    ],
    ids=["no compile", "on the limit", "recompiles", "no telemetry", "no request"],
)
def test_recompiles_and_their_stalls_have_limits(seen, verdicts):
    gates = reported_gates("naive", facts(**seen), LIMITS)
    assert [item.verdict for item in gates] == verdicts
    if seen == STALLING:
        assert all(words in gates[0].reason for words in ("6 recompiles", "7.9 s", "31 of 180"))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.9, 1.0, "PASS"),
        (1.0, 1.1, "INCONCLUSIVE"),
        (1.01, 1.1, "FAIL"),
        (None, 0.9, "PASS"),
        (1.1, None, "FAIL"),
        (None, None, "INCONCLUSIVE"),
    ],
)
def test_the_whole_interval_keeps_a_limit_or_breaks_it(low, high, verdict):
    assert status(low, high, 1.0) == verdict


@pytest.mark.parametrize(
    ("name", "slo", "arm", "unit", "words"),
    [
        ("slo p99_ttft_ms", {"p99_ttft_ms": 900}, {}, "ms", ("requests had TTFT above 900 ms", "limit 1 %")),
        ("slo p50_itl_ms", {"p50_itl_ms": 40}, {}, "ms", ("token gaps had ITL above 40 ms",)),
        (
            "slo error_pct",
            {"error_pct": 5},
            {"error_share": 0.3},
            "pct",
            ("requests failed", "limit 5 %; error rate of eager is 0 %."),
        ),
        (
            "slo p50_ttft_ms",
            {"p50_ttft_ms": 5},
            {},
            "ms",
            (" ms and misses it too.", "limit 50 %; p50 TTFT of eager is "),
        ),
        ("errors", {}, {"error_share": 0.3}, "pct", ("requests failed", "error bars", "limit 0.5 %")),
    ],
)
def test_a_gate_on_a_share_has_what_was_seen_and_what_is_allowed(tmp_path, name, slo, arm, unit, words):
    run = FakeRun(duration_s=600, rate=2, arms=(EAGER, FakeArm(name="compiled", **arm)), slo=slo)
    judgement = judge(run_in(write_run(tmp_path / "run", run)))
    (gate,) = (gate for gate in judgement.gates if gate.gate == name)
    assert (gate.unit, gate.needed_s is None) == (unit, gate.verdict != "INCONCLUSIVE")
    assert [word for word in words if word not in gate.reason] == []
    if arm:
        assert (gate.verdict, gate.interval[0] < 30.0 < gate.interval[1]) == ("FAIL", True)


def judged(path: Path, *arms: FakeArm, **gates: Any) -> Judgement:
    run = FakeRun(duration_s=120, rate=2, arms=(EAGER, *arms), gates={**gates})
    return judge(run_in(write_run(path / "run", run)))


def arm(**more: Any) -> FakeArm:
    policy = {"enabled": True, **{key: more.pop(key) for key in ("strict",) if key in more}}
    return FakeArm(name="compiled", config={"compile": policy}, **more)


REFUSING = arm(error_share=0.1, error_status="FAILED_PRECONDITION")


@pytest.mark.parametrize(
    ("treatment", "limits", "verdicts"),
    [
        (arm(), {}, {}),
        (arm(eager_steps=1), {"max_eager_steps_pct": 10}, {"eager steps": "PASS"}),
        (arm(eager_steps=3), {"max_eager_steps_pct": 10}, {"eager steps": "FAIL"}),
        (arm(eager_steps=1), {"max_eager_steps_pct": 0}, {"eager steps": "FAIL"}),
        (arm(strict=True), {}, {"refused": "PASS"}),
        (REFUSING, {}, {"refused": "FAIL"}),
        (REFUSING, {"max_refused_pct": 50}, {"refused": "PASS"}),
        (arm(error_share=0.1), {}, {}),
    ],
)
def test_eager_steps_and_refused_requests_have_limits(
    tmp_path: Path, treatment: FakeArm, limits: dict[str, float], verdicts: dict[str, str]
) -> None:
    judgement = judged(tmp_path, treatment, **limits)
    found = {gate.gate: gate.verdict for gate in judgement.gates if gate.gate in ("eager steps", "refused")}
    assert found == verdicts
    assert all(check.ok for check in judgement.checks if check.check == "compiled code")


def test_an_arm_that_ran_no_compiled_code_passes_nothing_as_a_compiled_one(tmp_path: Path) -> None:
    judgement = judged(tmp_path, arm(eager_steps=20))
    failed = next(check for check in judgement.checks if check.check == "compiled code")
    assert (failed.ok, failed.arm) == (False, "compiled")
    assert "compiled-0 in trial 1" in failed.reason
    kinds = {gate.kind: gate for gate in judgement.gates if gate.verdict == "PASS"}
    assert "recompile" not in kinds, "nothing recompiles where nothing compiles"
    assert "noninferiority" not in kinds


def steps(replica: str, kind: str, compiled: int, of: int) -> CompiledSteps:
    return CompiledSteps(trial=1, replica=replica, kind=kind, compiled=compiled, steps=of)


@pytest.mark.parametrize(
    ("counts", "words", "most"),
    [
        ([steps("a-0", "decode", 128, 128), steps("a-0", "prefill", 0, 100)], "prefill steps", ("prefill", 100.0)),
        ([steps("a-0", "decode", 30, 30), steps("a-1", "decode", 0, 30)], "a-1 in trial 1", ("decode", 50.0)),
    ],
)
def test_one_replica_or_kind_of_step_without_compiled_code_is_enough(
    counts: list[CompiledSteps], words: str, most: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "compiled_steps", lambda run, arm: counts)
    run = SimpleNamespace(arms=("a",), control="a", trial_name="trial {}".format)
    (check,) = telemetry.compiled.find(SimpleNamespace(run=run))  # type: ignore[arg-type]
    assert (check.ok, check.arm) == (False, None)
    assert words in check.reason
    eager = most_eager(counts)
    assert eager is not None
    assert (eager.kind, eager.eager_pct) == most


REPLICAS = ("eager-0", "compiled-0")


def with_steps_lost(folder: Path, lost: Callable[[dict[str, Any]], bool], arm: FakeArm) -> Judgement:
    """Judge a run whose replicas counted 20 steps each, of which those that `lost` names are not recorded."""
    run = FakeRun(duration_s=120, rate=2, arms=(EAGER, arm), gates={"max_eager_steps_pct": 20})
    written = write_run(folder / "run", run)
    counted = {arm: {"counters": {"compile_events": int(arm == "compiled-0"), "steps": 20}} for arm in REPLICAS}
    records = read_run(tell(written, final=counted))
    kept = [not lost(row) for row in records.steps.to_pylist()]
    return judge(Run.of(replace(records, steps=records.steps.filter(pa.array(kept)))))


def test_lost_steps_leave_open_how_many_ran_eagerly(tmp_path: Path) -> None:
    half = arm(eager_steps=10)
    judgement = with_steps_lost(tmp_path, lambda row: row["arm"] == "compiled" and row["step_id"] % 20 < 9, half)
    gates = {gate.gate: gate for gate in judgement.gates}
    assert (gates["eager steps"].verdict, gates["eager steps"].blocked_by) == ("INCONCLUSIVE", ("telemetry",))
    assert gates["recompiles"].verdict == "PASS", "compile events were counted separately"


def test_an_arm_of_which_no_step_is_left_is_not_known_to_run_compiled_code(tmp_path: Path) -> None:
    judgement = with_steps_lost(tmp_path, lambda row: row["arm"] == "compiled", arm())
    verdicts = {gate.gate: gate.verdict for gate in judgement.gates}
    assert verdicts["recompiles"] == "INCONCLUSIVE"
    assert "PASS" not in {gate.verdict for gate in judgement.gates if gate.kind in ("noninferiority", "recompile")}


MEMORY = {"max_memory_ratio": 1.5, "metrics": ["e2e"]}

Level = Callable[[int, Any], Any]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", FakeRun(duration_s=400, rate=1, gates=MEMORY))


def memory_gates(
    directory: Path, kind: str = "process", column: str = "memory_bytes", **levels: Any
) -> dict[str, Gate]:
    """Return the gates on memory by name, after each arm has held these levels."""
    for arm, level in levels.items():
        sample(directory, kind, f"{arm}-0", {column: level}, arm=arm)
    return {gate.gate: gate for gate in judge(run_in(directory)).gates if gate.kind == "memory"}


def flat(size: float) -> Level:
    return lambda trial, at_s: np.full(at_s.size, size * (1.0 + 0.002 * trial))


def test_memory_gates_nothing_unless_asked(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(duration_s=60, rate=1))
    assert memory_gates(directory, eager=flat(GIB), compiled=flat(9 * GIB)) == {}


@pytest.mark.parametrize(
    ("size", "verdict"),
    [(None, "INCONCLUSIVE"), (1.2, "PASS"), (1.48, "INCONCLUSIVE"), (1.52, "INCONCLUSIVE"), (1.8, "FAIL")],
)
def test_a_ratio_is_judged_with_its_limits(directory: Path, size: float | None, verdict: str) -> None:
    sampled = {} if size is None else {"compiled": flat(size * GIB)}
    (gate,) = memory_gates(directory, eager=flat(GIB), **sampled).values()
    assert (gate.gate, gate.verdict) == ("memory ratio", verdict)
    assert gate.value == (size and pytest.approx(size))


def test_more_trials_narrow_a_ratio_and_trials_that_differ_widen_it() -> None:
    def width(*logs: float) -> float:
        low, high = ratio_limits(np.array(logs), 0.05)
        return high - low

    assert width(0.0, 0.0, 0.0) < width(0.0) < 0.05
    assert width(-0.2, 0.0, 0.2) > 0.2


def test_host_memory_gates_no_arm_on_a_card(directory: Path) -> None:
    """The sum over processes counts the pages that compile workers share once for each."""
    tell(directory, devices={"eager": "cuda:0", "compiled": "cuda:1"})
    found = memory_gates(directory, eager=flat(GIB), compiled=flat(18 * GIB))
    assert {gate.verdict for gate in found.values()} == {"INCONCLUSIVE"}
    found = memory_gates(directory, column="device_memory_bytes", eager=GIB, compiled=GIB)
    assert "device memory" in found["memory ratio"].reason
    assert found["memory ratio"].verdict == "PASS"
