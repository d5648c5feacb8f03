"""What arms held of memory while they served."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from analysis.records.run_records import read_run
from analysis.run.memory import RunMemory, memory_of
from analysis.run.run import Run
from tests.fakes.resources import GIB, sample, tell
from tests.fakes.runs import FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}


def seen(directory: Path) -> RunMemory:
    return memory_of(Run.of(read_run(directory)))


def run_in(path: Path, *, duration_s: float = 300.0, trials: int = 1) -> Path:
    return write_run(path / "run", FakeRun(duration_s=duration_s, rate=1, trials=trials))


def test_the_peak_is_that_of_the_traffic_and_of_the_replica_that_held_most(tmp_path: Path) -> None:
    def around(size: float, trial: int, at_s: np.ndarray) -> np.ndarray:
        return np.where((at_s < 0) | (at_s > 301), 9, size) * GIB  # more before and after the traffic

    run = run_in(tmp_path)
    for replica, size in (("eager-0", 2), ("eager-1", 3)):
        levels = partial(around, size)
        sample(run, "process", replica, {"memory_bytes": levels}, arm="eager")
    held = seen(run).arms["eager"]["process"]
    assert held.peaks == {1: 3 * GIB}


def test_samples_that_end_early_show_no_peak(tmp_path: Path) -> None:
    run = sample(run_in(tmp_path), "process", "eager-0", {"memory_bytes": GIB}, arm="eager", last_s=200)
    assert seen(run).arms["eager"] == {}


def test_of_an_arm_on_a_card_the_memory_of_the_host_is_no_answer(tmp_path: Path) -> None:
    run = tell(run_in(tmp_path), devices=CARDS)
    for arm in CARDS:
        sample(run, "process", f"{arm}-0", {"memory_bytes": GIB}, arm=arm)
    assert seen(run).shared_figure("compiled", "eager") is None
    for arm in CARDS:
        sample(run, "allocator", f"{arm}-0", {"reserved_bytes": 2 * GIB, "peak_bytes": GIB}, arm=arm)
    assert seen(run).shared_figure("compiled", "eager") == "reserved"
    for arm, card in CARDS.items():
        sample(run, "device", card, {"memory_bytes": 3 * GIB, "foreign_processes": 0}, trials=(1,))
        assert seen(run).arms[arm]["card"].peak == 3 * GIB
    assert seen(run).shared_figure("compiled", "eager") == "card"


def test_a_card_that_others_use_too_says_nothing_of_the_arm(tmp_path: Path) -> None:
    run = tell(run_in(tmp_path), devices={"eager": "cuda:0", "compiled": "cuda:0"})
    sample(run, "device", "cuda:0", {"memory_bytes": 3 * GIB})
    assert seen(run).arms["eager"] == {}
    run = tell(run_in(tmp_path / "foreign"), devices=CARDS)
    sample(run, "device", "cuda:0", {"memory_bytes": 3 * GIB, "foreign_processes": 1})
    assert seen(run).arms["eager"] == {}
    parts = {"devices": {"cuda:0": {"mig": True}}}
    run = tell(run_in(tmp_path / "part"), devices=CARDS, bed=parts)
    sample(run, "device", "cuda:0", {"memory_bytes": 3 * GIB})
    assert seen(run).arms["eager"] == {}


def test_growth_is_that_past_the_cold_start(tmp_path: Path) -> None:
    def level(trial: int, at_s: np.ndarray) -> np.ndarray:
        return GIB * (1.0 + np.minimum(at_s, 20.0) / 20.0) + 100.0 * (1 << 20) * at_s / 3600.0

    run = sample(run_in(tmp_path, trials=2), "process", "eager-0", {"memory_bytes": level}, arm="eager")
    held = seen(run).arms["eager"]["process"]
    assert held.growth is not None
    assert held.growth.slope / (1 << 20) == pytest.approx(100.0, abs=0.1)
    assert held.growth.low / (1 << 20) == pytest.approx(100.0, abs=1.0)
    assert not held.slowing


def test_a_warm_up_that_goes_on_slows_down(tmp_path: Path) -> None:
    def level(trial: int, at_s: np.ndarray) -> np.ndarray:
        return GIB * (2.0 - np.exp(-np.maximum(at_s, 0) / 120.0))

    run = sample(run_in(tmp_path), "process", "eager-0", {"memory_bytes": level}, arm="eager")
    held = seen(run).arms["eager"]["process"]
    assert held.growth is not None
    assert held.growth.low > 0
    assert held.slowing


def test_a_trial_that_is_too_short_has_a_peak_and_no_growth(tmp_path: Path) -> None:
    run = sample(run_in(tmp_path, duration_s=50), "process", "eager-0", {"memory_bytes": GIB}, arm="eager")
    held = seen(run).arms["eager"]["process"]
    assert (held.peak, held.growth) == (GIB, None)


def test_allocations_in_need_are_events_of_their_moment_and_those_of_the_warm_up_are_not(tmp_path: Path) -> None:
    def retries(trial: int, at_s: np.ndarray) -> np.ndarray:
        return np.select([at_s >= 60, at_s >= 40, at_s >= -5], [7, 5, 4], 0)

    counts = {"allocator_retries": retries, "out_of_memory": lambda trial, at_s: (at_s >= 40) * 1.0}
    run = sample(run_in(tmp_path), "allocator", "eager-0", counts, arm="eager")
    found = [(event.at_ns - 1_700_100_000 * 10**9, event.kind, event.count) for event in seen(run).events]
    assert found == [
        (40 * 10**9, "allocator retry", 1),
        (40 * 10**9, "out of memory", 1),
        (60 * 10**9, "allocator retry", 2),
    ]
    assert {(event.arm, event.replica) for event in seen(run).events} == {("eager", "eager-0")}
