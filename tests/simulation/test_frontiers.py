"""The quick part of `benchmarks/judging.py frontiers`: few searches, goals with room for chance (one in 1,000)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from scipy import stats

from benchmarks.simulation.calibration import means
from benchmarks.simulation.frontiers import BUDGET, EQUAL, FIFTHS, KINDS, inside, promise, search

RUNS = 6
SHORT = replace(BUDGET, total_s=60 * 60.0)


def most(share: float, runs: int = RUNS) -> float:
    """The largest share that chance gives of `runs` when the truth is `share`, but for one time in 1,000."""
    return float(stats.binom.ppf(0.999, runs, share)) / runs


def least(share: float, runs: int = RUNS) -> float:
    return float(stats.binom.ppf(0.001, runs, share)) / runs


@pytest.mark.parametrize("name", ["lucky starts", "long tails"])
def test_intervals_hold_the_true_knee(name: str) -> None:
    assert means(partial(inside, KINDS[name], 3), 20)[0] >= least(0.92, 20)


@pytest.mark.parametrize("name", ["steady", "dragging"])
def test_no_statement_on_equal_arms_is_false(name: str) -> None:
    false, named, spent, _ = means(partial(promise, EQUAL, KINDS[name], budget=SHORT), RUNS)
    assert false <= most(0.08)
    assert named <= most(0.05)
    assert spent <= 1.0


@pytest.mark.parametrize("name", ["steady", "dragging"])
def test_the_arm_that_holds_a_fifth_more_is_named(name: str) -> None:
    false, named, spent, _ = means(partial(promise, FIFTHS, KINDS[name]), RUNS)
    assert false <= most(0.08)
    assert named >= least(0.8)
    assert spent <= 1.0


def test_time_goes_to_the_arms_that_the_answer_lies_between() -> None:
    knees = {"eager": 4.0, "padded": 5.0, "dynamic": 20.0, "bucketed": 22.0}
    outcome = search(knees, KINDS["steady"], 1, budget=replace(BUDGET, total_s=100 * 60.0))
    assert outcome.starts["padded"] < min(outcome.starts["dynamic"], outcome.starts["bucketed"])
    assert "padded" in {item.arm for item in outcome.left}
