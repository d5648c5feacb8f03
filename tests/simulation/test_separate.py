"""The quick part of `benchmarks/judging.py separate`: few runs, goals with room for chance (one in 1,000)."""

from __future__ import annotations

from functools import partial

import pytest
from scipy import stats

from benchmarks.simulation.calibration import means
from benchmarks.simulation.promises import MARGIN
from benchmarks.simulation.separate import SEPARATE, coverage, verdicts

RUNS = 20


@pytest.mark.parametrize("name", ["drift"])
def test_intervals_of_separate_runs_hold_the_truth(name: str) -> None:
    assert means(partial(coverage, SEPARATE[name]), RUNS).min() >= stats.binom.ppf(0.001, RUNS, 0.92) / RUNS


def test_separate_runs_at_the_margin_are_seldom_decided() -> None:
    shares = means(partial(verdicts, SEPARATE["calm"], ratio=1.0 + MARGIN), RUNS)
    assert shares.max() <= stats.binom.ppf(0.999, RUNS, 0.08) / RUNS
