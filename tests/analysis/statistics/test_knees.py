"""Knees behind steps that were held and missed: intervals, the luck of starts, and which of two is higher."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.statistics.knees import KneeProfile, knee_grid, knee_profile, p_not_higher

GRID = knee_grid([1.0, 100.0])


def profile(held: list[float], missed: list[float], starts: list[int] | None = None) -> KneeProfile:
    outcome = [True] * len(held) + [False] * len(missed)
    return knee_profile([*held, *missed], outcome, starts or [1] * len(outcome), grid=GRID)


def test_an_interval_is_open_where_no_step_bounds_it() -> None:
    assert profile([], []).interval(0.05) == (None, None)
    low, high = profile([1, 2, 4], []).interval(0.05)
    assert low is not None
    assert 1 < low < 4
    assert high is None
    low, high = profile([], [4, 8, 16]).interval(0.05)
    assert low is None
    assert high is not None
    assert 4 < high < 16


def test_more_steps_narrow_the_interval() -> None:
    few = profile([8.0], [10.0]).interval(0.05)
    many = profile([8.0, 8.5, 8.8] * 3, [9.2, 9.5, 10.0] * 3, [1, 2, 3] * 6).interval(0.05)
    assert all(end is not None for end in (*few, *many))
    assert few[0] < many[0] < 9 < many[1] < few[1]  # type: ignore[operator]


def test_a_smaller_error_widens_the_interval() -> None:
    knee = profile([8.0, 8.5] * 3, [9.5, 10.0] * 3, [1, 2, 3] * 4)
    (low, high), (lower, higher) = knee.interval(0.05), knee.interval(0.005)
    assert lower < low < high < higher  # type: ignore[operator]


def test_what_a_start_brings_to_all_its_steps_counts_once() -> None:
    """The same outcomes, of four starts that each agree with themselves, or of as many starts as there are steps."""
    rates = [9.4, 9.8, 10.2, 10.6]
    outcome = [True, False, False, False] * 2 + [True, True, True, False] * 2
    few, many = (
        knee_profile(rates * 4, outcome, starts, grid=GRID).interval(0.05)
        for starts in ([number // 4 for number in range(16)], list(range(16)))
    )
    assert few[0] < many[0] < many[1] < few[1]  # type: ignore[operator]


def test_a_missed_step_excuses_the_next_of_its_start() -> None:
    """The same outcomes; the three misses follow one another, or each comes first in a start of its own."""
    rates = [9.3, 9.6, 9.9, 9.0, 9.6, 9.9, 10.6, 9.0, 9.6, 9.9, 10.6]
    outcome = [False] * 3 + [True, True, True, False] * 2
    behind, first = (
        knee_profile(rates, outcome, [*starts, *[8] * 4, *[9] * 4], grid=GRID) for starts in ([1, 1, 1], [1, 2, 3])
    )
    assert behind.likeliest > first.likeliest  # type: ignore[operator]


def test_the_order_of_steps_in_the_records_does_not_matter() -> None:
    rates, outcome, starts = [8.0, 9.0, 10.0, 8.5, 9.5], [True, True, False, True, False], [1, 1, 1, 2, 2]
    one = knee_profile(rates, outcome, starts, grid=GRID)
    other = knee_profile(rates[::-1], outcome[::-1], starts[::-1], grid=GRID)
    assert np.allclose(one.likelihood, other.likelihood)


def test_the_likeliest_knee_lies_between_what_was_held_and_missed() -> None:
    assert 8.8 < (profile([8.0, 8.8], [9.2, 10.0]).likeliest or 0) < 9.2
    assert profile([8.0], []).likeliest is None
    assert profile([], [8.0]).likeliest is None


def test_degrees_of_freedom_come_from_starts() -> None:
    assert profile([8.0], [9.0], [1, 2]).degrees == 14
    assert profile([8.0] * 25, [9.0], list(range(26))).degrees == 25


def test_an_arm_far_above_another_is_surely_higher_and_never_the_other_way_round() -> None:
    starts = [1, 2, 3] * 4
    low, high = profile([4.0, 4.5] * 3, [5.5, 6.0] * 3, starts), profile([8.0, 8.5] * 3, [9.5, 10.0] * 3, starts)
    assert p_not_higher(high, low) < 0.01
    assert p_not_higher(low, high) == 0.5


@given(st.lists(st.tuples(st.floats(2.0, 50.0), st.booleans(), st.integers(1, 3)), min_size=1, max_size=12))
@settings(max_examples=30)
def test_equal_steps_are_no_order(drawn: list[tuple[float, bool, int]]) -> None:
    rates, held, starts = zip(*drawn, strict=True)
    one = knee_profile(rates, held, starts, grid=GRID)
    assert p_not_higher(one, one) == 0.5
    assert np.isfinite(one.likelihood.max())
    low, high = one.interval(0.05)
    assert low is None or high is None or low < high


def test_steps_scale_with_the_unit_of_the_rate() -> None:
    """Requests a second or a minute: the interval of the knee moves with them, up to a step of the grid."""
    base = [8.0, 8.5, 9.5, 10.0]
    outcome, starts = [True, True, False, False], [1, 2, 1, 2]
    ends = []
    for factor in (1.0, 60.0):
        rates = [rate * factor for rate in base]
        low, high = knee_profile(rates, outcome, starts, grid=knee_grid(rates)).interval(0.05)
        assert low is not None
        assert high is not None
        ends.append((math.log(low / factor), math.log(high / factor)))
    assert ends[0] == pytest.approx(ends[1], abs=1e-9)
