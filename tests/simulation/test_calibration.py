"""The quick part of `benchmarks/judging.py`: few runs, so goals have room for chance (binomial, one in 1,000)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.simulation.calibration import (
    HEAVY,
    LONG_S,
    MARGIN,
    MIRRORED,
    SPLIT,
    any_of_three,
    equal_arms,
    known_ratio,
    means,
    request_tests,
    restarts,
    verdicts,
)
from benchmarks.simulation.closed import WAYS, tail_passes, write_closed
from benchmarks.simulation.scenario import Scenario
from benchmarks.simulation.table import Row

RUNS = 30


def most(share: float, runs: int = RUNS) -> float:
    """The largest share that chance gives of `runs` when the truth is `share`, but for one time in 1,000."""
    return float(stats.binom.ppf(0.999, runs, share)) / runs


def least(share: float, runs: int = RUNS) -> float:
    return float(stats.binom.ppf(0.001, runs, share)) / runs


@pytest.mark.parametrize("scenario", [MIRRORED, SPLIT, HEAVY], ids=["mirrored", "split", "heavy"])
def test_equal_arms_are_seldom_called_different(scenario: Scenario) -> None:
    wrong = means(partial(equal_arms, scenario), RUNS)
    assert wrong[:3].max() <= most(0.08)


def test_tests_over_requests_call_equal_arms_different_under_load() -> None:
    wrong = means(partial(request_tests, HEAVY), RUNS)
    assert wrong.min() > 0.15


def test_intervals_hold_the_true_ratio() -> None:
    held = means(partial(known_ratio, MIRRORED, 1.2), RUNS)
    assert held.min() >= least(0.92)


def test_verdicts_are_right_on_both_sides_of_the_margin() -> None:
    long = replace(MIRRORED, duration_s=LONG_S)
    shares = {ratio: means(partial(verdicts, long, ratio), 25) for ratio in (1.0, 1.1, 1.2)}
    assert shares[1.0][0] >= least(0.80, 25)
    assert shares[1.0][1] == 0.0
    assert shares[1.0 + MARGIN][0] <= most(0.08, 25)
    assert shares[1.2][1] >= least(0.75, 25)
    assert shares[1.2][0] == 0.0


def test_three_arms_fail_falsely_no_more_often_than_one() -> None:
    wrong = means(partial(any_of_three, MIRRORED), RUNS)
    assert wrong[0] <= most(0.07)
    assert wrong[0] <= wrong[1]


def test_six_trials_see_what_restarts_do_and_one_does_not() -> None:
    wrong = means(partial(restarts, MIRRORED), 15)
    assert wrong[:3].max() <= most(0.10, 15)
    assert wrong[3] > wrong[0], "one trial takes the luck of its start for the arm's"


def test_a_row_says_whether_it_reached_its_goal() -> None:
    assert Row(check="x", measured=0.1, runs=10).ok is None
    assert Row(check="x", measured=0.1, runs=10, most=0.1).ok
    assert Row(check="x", measured=0.1, runs=10, least=0.2).ok is False
    assert "MISSED" in str(Row(check="x", measured=0.1, runs=10, least=0.2))


@pytest.mark.parametrize("way", WAYS)
def test_a_closed_loop_passes_no_gate_on_the_tail(way: str, tmp_path: Path) -> None:
    assert tail_passes(write_closed(tmp_path / "run", 1, way)) == 0


def test_the_same_servers_under_an_open_loop_may_pass(tmp_path: Path) -> None:
    """What the closed loops lack is the schedule: nothing else in their records forbids a PASS."""
    run = write_closed(tmp_path / "run", 1, "schedule as sent")
    told = json.loads((run / "trial-01" / "trial.json").read_text())
    (run / "trial-01" / "trial.json").write_text(json.dumps(told | {"open_loop": True}))
    assert tail_passes(run) > 0
