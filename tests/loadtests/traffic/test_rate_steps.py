"""The rates of a saturation search: a staircase, then closer steps around each arm's knee."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.traffic.rate_steps import closer, staircase


@given(low=st.floats(0.1, 100), factor=st.floats(1.1, 1000), steps=st.integers(3, 30))
def test_a_staircase_rises_in_equal_ratios_from_end_to_end(low: float, factor: float, steps: int) -> None:
    rates = staircase(low, low * factor, steps)
    assert len(rates) == steps
    assert rates[0] == pytest.approx(low, rel=1e-3)
    assert rates[-1] == pytest.approx(low * factor, rel=1e-3)
    for before, after in pairwise(rates):
        assert after / before == pytest.approx(factor ** (1 / (steps - 1)), rel=5e-3)


def test_the_next_trial_divides_every_arms_bracket() -> None:
    rates = closer([(4.0, 8.0), (16.0, 32.0)], 6, low=1, high=64)
    assert rates == (4.757, 5.657, 6.727, 19.03, 22.63, 26.91)


def test_arms_in_one_bracket_share_its_steps() -> None:
    assert closer([(4.0, 8.0), (4.0, 8.0)], 3, low=1, high=64) == (4.757, 5.657, 6.727)


@pytest.mark.parametrize(
    ("bracket", "low", "high"),
    [((None, 2.0), 0.5, 2.0), ((50.0, None), 50.0, 200.0), ((None, None), 1.0, 64.0)],
)
def test_an_open_bracket_is_searched_further(
    bracket: tuple[float | None, float | None], low: float, high: float
) -> None:
    rates = closer([bracket], 3, low=1, high=64)
    assert low < rates[0] < rates[1] < rates[2] < high


def test_a_narrow_bracket_is_tried_again_at_its_ends() -> None:
    assert closer([(10.0, 10.1)], 4, low=1, high=64) == (10.0, 10.0, 10.1, 10.1)


@given(
    brackets=st.lists(
        st.tuples(st.none() | st.floats(0.5, 20), st.none() | st.floats(21, 100)),
        min_size=1,
        max_size=8,
    ),
    steps=st.integers(3, 12),
)
def test_there_are_always_as_many_rates_as_steps_and_they_rise(
    brackets: list[tuple[float | None, float | None]], steps: int
) -> None:
    rates = closer(brackets, steps, low=1, high=64)
    assert len(rates) == steps
    assert list(rates) == sorted(rates)
    assert rates[0] > 0
