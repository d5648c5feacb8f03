from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.foresight.calibration import (
    Calibration,
    Halves,
)
from loadtests.commands.main import main
from tests.analysis.foresight.test_calibration import calibrated, long_run
from tests.fakes.runs import FakeRun, write_run
from tests.loadtests.commands.test_calibrate import GATES

__all__ = ["calibrated", "long_run"]


def halves_of(found: Calibration, how: str, effect: float) -> Halves:
    (item,) = [item for item in found.halves if item.how == how and item.effect == pytest.approx(effect)]
    return item


def test_equal_halves_are_called_equal_and_slower_ones_are_seen(calibrated: Calibration) -> None:
    for how in ("at random", "in turn"):
        equal = halves_of(calibrated, how, 1.0)
        assert equal.slower.of == equal.faster.of == 30
        assert max(equal.slower.count, equal.faster.count) <= 6
        assert equal.covered.count == 30 - equal.slower.count - equal.faster.count
    seen = [halves_of(calibrated, "at random", effect).slower.count for effect in (1.0, 1.1, 1.2)]
    assert seen[0] < seen[1] < seen[2]
    passed = [halves_of(calibrated, "at random", effect).passed.count for effect in (1.0, 1.1, 1.2)]
    assert passed[0] > passed[1] >= passed[2]


def test_a_long_clean_run_is_trustworthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", FakeRun(duration_s=690, rate=1.7, gates={**GATES, "quantiles": [0.95]}))
    assert main(["calibrate", str(folder), "--splits", "60", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reasons"] == []
