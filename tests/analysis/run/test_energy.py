"""What arms took of energy while they served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.records.run_records import read_run
from analysis.run.energy import ArmEnergy, energy_of
from analysis.run.run import Run
from tests.fakes.resources import sample, tell
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


def test_a_counter_that_began_anew_or_ends_early_tells_nothing(tmp_path: Path) -> None:
    anew = {"energy_j": lambda trial, at_s: np.where(at_s < 60, 1e6, 0) + at_s}
    found = energy(sample(run_in(tmp_path), "device", "cuda:0", anew))
    assert found is not None
    assert found.trials == ()
    early = energy(sample(run_in(tmp_path / "early"), "device", "cuda:0", {"energy_j": rising(1.0)}, last_s=100))
    assert early is not None
    assert early.trials == ()
    assert "from the beginning to the end" in early.obstacles[0]
