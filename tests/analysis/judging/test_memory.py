"""The gates on memory: its peak beside the control's, and its growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.judging.gates import Gate
from analysis.judging.judgement import Judgement, judge
from analysis.judging.memory import growth_gate, ratio_limits
from analysis.records.run_records import read_run
from analysis.run.memory import HeldMemory, RunMemory
from analysis.run.run import Run
from analysis.statistics.trend import Trend
from tests.fakes.resources import GIB, sample, tell
from tests.fakes.runs import FakeRun, write_run

MIB = 1 << 20
GATES = {"max_memory_ratio": 1.5, "max_memory_growth_pct_per_hour": 5.0, "draws": 99}
SHORT = FakeRun(duration_s=400, rate=1, gates=GATES)

Level = Callable[[int, Any], Any]


def judged(path: Path, levels: dict[str, Level], run: FakeRun = SHORT) -> Judgement:
    directory = write_run(path / "run", run)
    for arm, level in levels.items():
        sample(directory, "process", f"{arm}-0", {"memory_bytes": level}, arm=arm)
    return judge(Run.of(read_run(directory)))


def gate_of(judgement: Judgement, name: str) -> Gate:
    return next(gate for gate in judgement.gates if gate.gate == name)


def flat(size: float) -> Level:
    return lambda trial, at_s: np.full(at_s.size, size * (1.0 + 0.002 * trial))


def test_memory_gates_nothing_unless_it_is_asked_for(tmp_path: Path) -> None:
    judgement = judged(tmp_path, {"eager": flat(GIB), "compiled": flat(9 * GIB)}, replace(SHORT, gates={"draws": 99}))
    assert [gate for gate in judgement.gates if gate.kind == "memory"] == []
    assert judgement.memory.arms["compiled"]["process"].peak == pytest.approx(9 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("size", "verdict"), [(1.2, "PASS"), (1.48, "INCONCLUSIVE"), (1.52, "INCONCLUSIVE"), (1.8, "FAIL")]
)
def test_a_ratio_is_judged_with_its_limits(tmp_path: Path, size: float, verdict: str) -> None:
    gate = gate_of(judged(tmp_path, {"eager": flat(GIB), "compiled": flat(size * GIB)}), "memory ratio")
    assert gate.verdict == verdict
    assert gate.value == pytest.approx(size)
    assert "one trial, in which starts are taken to vary by 1 %" in gate.reason


def test_more_trials_narrow_a_ratio_and_trials_that_differ_widen_it() -> None:
    def width(*logs: float) -> float:
        low, high = ratio_limits(np.array(logs), 0.05)
        return high - low

    assert width(0.0, 0.0, 0.0) < width(0.0) < 0.05
    assert width(-0.2, 0.0, 0.2) > 0.2


def test_what_was_not_seen_leaves_a_gate_open_that_is_asked_for(tmp_path: Path) -> None:
    judgement = judged(tmp_path, {"eager": flat(GIB)})
    ratio, growth = gate_of(judgement, "memory ratio"), gate_of(judgement, "memory growth")
    assert (ratio.verdict, growth.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "not both seen" in ratio.reason
    assert "not seen" in growth.reason
    assert '"memory growth" of compiled' in judgement.advice.text
    assert "machines watched" in judgement.advice.text


def test_a_leak_fails_and_a_warm_up_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)

    def noise(at_s: Any) -> Any:
        return MIB * rng.standard_normal(at_s.size)

    shapes: dict[str, tuple[Level, str]] = {
        "flat": (lambda trial, at_s: GIB + noise(at_s) / 100, "PASS"),
        "leak": (lambda trial, at_s: GIB + 0.5 * GIB * at_s / 3600.0 + noise(at_s), "FAIL"),
        "jump": (lambda trial, at_s: GIB + 0.2 * GIB * (at_s > 250) + noise(at_s) / 100, "INCONCLUSIVE"),
        "warm-up": (lambda trial, at_s: GIB * (1.5 - 0.5 * np.exp(-np.maximum(at_s, 0) / 150.0)), "INCONCLUSIVE"),
        "warm-up that is over": (lambda trial, at_s: GIB * (1.5 - 0.5 * np.exp(-np.maximum(at_s, 0) / 10.0)), "PASS"),
        "falling": (lambda trial, at_s: 2 * GIB - 0.5 * GIB * at_s / 3600.0, "PASS"),
    }
    for name, (level, verdict) in shapes.items():
        gate = gate_of(judged(tmp_path / name, {"eager": flat(GIB), "compiled": level}), "memory growth")
        assert (name, gate.verdict) == (name, verdict), gate.reason
        assert ("warm-up may not be over" in gate.reason) == (name == "warm-up")


def test_what_a_replica_retains_beside_its_engine_is_not_judged(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", SHORT)
    for arm in ("eager", "compiled"):
        growing = {"memory_bytes": lambda trial, at_s: GIB + GIB * at_s / 3600.0}
        sample(directory, "process", f"{arm}-0", growing, arm=arm)
        sample(directory, "allocator", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert gate_of(judge(Run.of(read_run(directory))), "memory growth").verdict == "PASS"


def test_host_memory_of_a_family_gates_no_arm_on_a_card(tmp_path: Path) -> None:
    """Its compile workers share most of their pages, which the sum counts once for each."""
    directory = tell(write_run(tmp_path / "run", SHORT), devices={"eager": "cuda:0", "compiled": "cuda:1"})
    for arm, size in (("eager", GIB), ("compiled", 18 * GIB)):
        growing = {"memory_bytes": partial(leaking, size)}
        sample(directory, "process", f"{arm}-0", growing, arm=arm)
    judgement = judge(Run.of(read_run(directory)))
    ratio, growth = gate_of(judgement, "memory ratio"), gate_of(judgement, "memory growth")
    assert (ratio.verdict, growth.verdict) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "not seen" in growth.reason
    for arm in ("eager", "compiled"):
        sample(directory, "process", f"{arm}-0", {"device_memory_bytes": GIB}, arm=arm)
    judgement = judge(Run.of(read_run(directory)))
    assert "device memory of the process" in gate_of(judgement, "memory ratio").reason
    assert gate_of(judgement, "memory growth").verdict == "PASS"


def leaking(size: float, trial: int, at_s: Any) -> Any:
    return size + size * at_s / 3600.0


def test_the_fastest_figure_decides(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", SHORT)
    for arm in ("eager", "compiled"):
        sample(directory, "process", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
        growing = {"memory_bytes": lambda trial, at_s: GIB + GIB * at_s / 3600.0}
        sample(directory, "allocator", f"{arm}-0", growing, arm=arm)
    gate = gate_of(judge(Run.of(read_run(directory))), "memory growth")
    assert gate.verdict == "FAIL"
    assert "Resident memory of the engine grows by" in gate.reason
    assert gate.value == pytest.approx(100 / (1 + 400 / 3600), rel=0.02)


def test_on_a_card_growth_that_was_seen_on_the_host_alone_passes_no_gate() -> None:
    steady = HeldMemory(figure="engine", peaks={1: float(GIB)}, growth=Trend(slope=0.0, low=0.0, high=0.0))
    grows = replace(steady, figure="reserved", growth=Trend(slope=GIB, low=GIB, high=GIB))

    def verdict(figures: dict[str, HeldMemory], *on_card: str) -> str:
        memory = RunMemory(arms={"compiled": figures}, on_card=frozenset(on_card), events=())
        return growth_gate(memory, "compiled", 5.0).verdict

    assert verdict({"engine": steady}) == "PASS"
    assert verdict({"engine": steady}, "compiled") == "INCONCLUSIVE"
    assert verdict({"engine": replace(grows, figure="engine")}, "compiled") == "FAIL"
    assert verdict({"engine": steady, "reserved": replace(steady, figure="reserved")}, "compiled") == "PASS"
