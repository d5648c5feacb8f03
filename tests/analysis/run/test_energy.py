"""What arms took of energy while they served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.records.run_records import read_run
from analysis.run.energy import ArmEnergy, energy_of
from analysis.run.run import Run
from tests.fakes.resources import GIB, sample, tell
from tests.fakes.runs import FakeRun, write_run

CARDS = {"eager": "cuda:0", "compiled": "cuda:1"}
SHORT = FakeRun(duration_s=120, rate=2, trials=2)


def run_in(path: Path, devices: dict[str, str] = CARDS, **facts: Any) -> Path:
    return tell(write_run(path / "run", SHORT), devices=devices, **facts)


def energy(directory: Path, arm: str = "eager") -> ArmEnergy | None:
    return energy_of(Run.of(read_run(directory)), arm)


def rising(watts: float) -> Any:
    return lambda trial, at_s: 1e6 + watts * trial * (at_s + 10.0)


def test_energy_is_what_the_counter_rose_by_from_the_first_request_to_the_last_answer(tmp_path: Path) -> None:
    columns = {"energy_j": rising(100.0), "power_w": lambda trial, at_s: np.full(at_s.size, 90.0 * trial)}
    found = energy(sample(run_in(tmp_path), "device", "cuda:0", columns))
    assert found is not None
    assert found.obstacles == ()
    for item in found.trials:
        assert 120.0 <= item.seconds < 123.0
        assert item.joules == pytest.approx(100.0 * item.trial * item.seconds, rel=1e-3)
        assert item.requests == 240
        assert item.tokens > 240
        assert not item.integrated


def seldom(level: Any, *seconds: float) -> Any:
    """Readings at these seconds alone."""
    return lambda trial, at_s: np.where(np.isin(at_s, seconds), level(trial, at_s), np.nan)


def test_a_counter_that_is_read_seldom_counts_between_its_readings_and_power_before_and_after(tmp_path: Path) -> None:
    def watts(trial: int, at_s: np.ndarray) -> np.ndarray:
        return np.where(at_s < 0, 50.0, 600.0)

    def counter(trial: int, at_s: np.ndarray) -> np.ndarray:
        return 1e6 + np.cumsum(watts(trial, at_s))

    readings = {"energy_j": seldom(counter, -9, 11, 60, 114, 124), "power_w": watts}
    found = energy(sample(run_in(tmp_path), "device", "cuda:0", readings))
    assert found is not None
    for item in found.trials:
        assert not item.integrated
        assert item.joules == pytest.approx(600.0 * item.seconds, rel=1e-3)


def test_without_power_the_mean_rise_of_a_counter_stands_for_seconds_alone(tmp_path: Path) -> None:
    near = energy(sample(run_in(tmp_path / "near"), "device", "cuda:0", {"energy_j": seldom(rising(50.0), 4, 60, 118)}))
    assert near is not None
    assert [item.joules / item.seconds for item in near.trials] == pytest.approx([50.0, 100.0])
    far = energy(sample(run_in(tmp_path / "far"), "device", "cuda:0", {"energy_j": seldom(rising(50.0), 10, 60, 118)}))
    assert far is not None
    assert far.trials == ()


def test_where_a_card_counts_no_energy_its_power_is_integrated_and_that_is_said(tmp_path: Path) -> None:
    ramp = {"power_w": lambda trial, at_s: 100.0 + at_s}
    found = energy(sample(run_in(tmp_path), "device", "cuda:0", ramp))
    assert found is not None
    (first, _) = found.trials
    assert first.integrated
    assert first.joules == pytest.approx(100.0 * first.seconds + first.seconds**2 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("devices", "columns", "said"),
    [
        ({"eager": "cuda:0", "compiled": "cuda:0"}, {}, "shared: not attributable"),
        (CARDS, {"foreign_processes": 1}, "processes of others: not attributable"),
        ({"eager": "cpu", "compiled": "cpu"}, {}, "no card"),
        ({"eager": "cuda:7", "compiled": "cuda:1"}, {}, "not watched"),
        (CARDS, {"energy_j": np.nan}, "neither energy nor power"),
    ],
)
def test_what_cannot_be_put_down_to_an_arm_is_said(
    tmp_path: Path, devices: dict[str, str], columns: dict[str, float], said: str
) -> None:
    run = sample(run_in(tmp_path, devices), "device", "cuda:0", {"energy_j": rising(100.0), **columns})
    found = energy(run)
    assert found is not None
    assert found.trials == ()
    assert said in found.obstacles[0]


def test_a_neighbour_that_weighs_on_the_card_shares_it(tmp_path: Path) -> None:
    pressure = [{"kind": "compute", "device": "cuda:0", "start_ns": 1, "end_ns": 2}]
    run = run_in(tmp_path, pressure=pressure)
    for card in CARDS.values():
        sample(run, "device", card, {"energy_j": rising(100.0)})
    eager, compiled = energy(run), energy(run, "compiled")
    assert eager is not None
    assert compiled is not None
    assert eager.obstacles == ("its card was shared: not attributable",)
    assert compiled.obstacles == ()


def test_whether_the_card_shows_whose_processes_are_on_it_is_said(tmp_path: Path) -> None:
    run = sample(run_in(tmp_path), "device", "cuda:0", {"energy_j": rising(100.0)}, trials=(1,))
    sample(run, "device", "cuda:0", {"energy_j": rising(100.0), "foreign_processes": 0}, trials=(2,))
    found = energy(run)
    assert found is not None
    assert [item.others_seen for item in found.trials] == [False, True]


def test_a_counter_that_began_anew_or_ends_early_tells_nothing(tmp_path: Path) -> None:
    anew = {"energy_j": lambda trial, at_s: np.where(at_s < 60, 1e6, 0) + at_s}
    found = energy(sample(run_in(tmp_path), "device", "cuda:0", anew))
    assert found is not None
    assert found.trials == ()
    early = energy(sample(run_in(tmp_path / "early"), "device", "cuda:0", {"energy_j": rising(1.0)}, last_s=100))
    assert early is not None
    assert early.trials == ()
    assert "from the beginning to the end" in early.obstacles[0]


def test_what_a_waiting_card_takes_is_known_from_before_the_arms_started(tmp_path: Path) -> None:
    looks = [{"host": "run", "device": "cuda:0", "at_ns": 0, "processes": [], "memory_bytes": GIB}]
    columns = {
        "energy_j": rising(300.0),
        "power_w": lambda trial, at_s: np.where(at_s < -5, 75.0, 300.0),
        "memory_bytes": lambda trial, at_s: np.where(at_s < -5, 1, 60) * GIB,
    }
    run = sample(run_in(tmp_path, bed={"before": looks}), "device", "cuda:0", columns)
    found = energy(run)
    assert found is not None
    first = found.trials[0]
    assert first.idle_w == 75.0
    assert first.above_idle_j == pytest.approx(first.joules - 75.0 * first.seconds)
    busy = energy(tell(run, bed={"before": [looks[0] | {"processes": [{"pid": 1}]}]}))
    assert busy is not None
    assert busy.trials[0].idle_w is None
    assert busy.trials[0].above_idle_j is None


def test_a_run_whose_cards_nobody_watched_has_no_energy(tmp_path: Path) -> None:
    assert energy(run_in(tmp_path)) is None
