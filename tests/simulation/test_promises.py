"""The quick part of `benchmarks/judging.py promises`: few runs, goals with room for chance (one in 1,000)."""

from __future__ import annotations

from functools import partial

import pytest
from scipy import stats

from benchmarks.simulation.calibration import means
from benchmarks.simulation.kinds import KINDS
from benchmarks.simulation.planning import replanned
from benchmarks.simulation.promises import AT_MARGIN, MARGIN, METRICS, POWER, coverage, outcome

RUNS = 20


def most(share: float, runs: int = RUNS) -> float:
    """The largest share that chance gives of `runs` when the truth is `share`, but for one time in 1,000."""
    return float(stats.binom.ppf(0.999, runs, share)) / runs


def least(share: float, runs: int = RUNS) -> float:
    return float(stats.binom.ppf(0.001, runs, share)) / runs


@pytest.mark.parametrize("name", ["drift", "restarts", "jams"])
def test_intervals_hold_the_truth_on_every_kind_of_servers(name: str) -> None:
    assert means(partial(coverage, KINDS[name]), RUNS).min() >= least(0.92)


@pytest.mark.parametrize("name", ["drift", "jams"])
def test_arms_at_the_margin_seldom_pass(name: str) -> None:
    assert means(partial(outcome, KINDS[name], ratio=1.0 + MARGIN), RUNS)[:2].max() <= most(0.08)


@pytest.mark.parametrize(("name", "metric"), [("jams", "ttft"), ("static", "e2e"), ("heavy", "e2e")])
def test_slower_steps_that_put_the_tail_at_the_margin_seldom_pass(name: str, metric: str) -> None:
    shares = means(partial(outcome, KINDS[name], slower=AT_MARGIN[name, metric]), RUNS)
    assert shares[METRICS.index(metric)] <= most(0.08)


@pytest.mark.parametrize("name", ["calm", "drift"])
def test_equal_arms_pass_the_default_gates_in_twenty_minutes(name: str) -> None:
    shares = means(partial(outcome, KINDS[name]), RUNS)
    assert shares[4] >= least(POWER[name] - 0.08)
    assert shares[5] <= most(0.05)


def test_an_arm_that_is_half_as_slow_again_fails_under_jams() -> None:
    shares = means(partial(outcome, KINDS["jams"], ratio=1.5), 10)
    assert shares[5] >= 0.7
    assert shares[4] == 0.0


def test_a_run_that_left_a_gate_open_is_planned_longer_than_it_was() -> None:
    kind = KINDS["jams"]
    found = [replanned(kind, seed) for seed in (5, 6)]  # the first has seen a ratio too near the margin
    planned = [row for row in found if row[1]]
    assert planned
    assert all(row[3] > kind.duration_s for row in planned)
