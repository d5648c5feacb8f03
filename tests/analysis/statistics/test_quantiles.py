"""The tail of a typical window: its ratio, its limits, and what a jam that both arms share does to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.analysis.statistics.dependence import Dependence, groups_of
from tailgate.analysis.statistics.knees import KneeProfile, knee_grid, knee_profile, p_not_higher
from tailgate.analysis.statistics.quantiles import ordered_interval, quantile, quantiles, quantiles_of_groups
from tailgate.analysis.statistics.slow_counts import SortedGroups
from tailgate.analysis.statistics.windows import Windows, balanced_ratios, window_limits


def test_quantile_of_nothing_is_unknown_and_of_one_is_itself():
    assert math.isnan(quantile([], 0.99))
    assert math.isnan(quantile([math.nan], 0.99))
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([7.0, math.nan, 7.0], 0.01) == 7.0


def test_interval_is_open_where_the_sample_cannot_close_it():
    _, high = ordered_interval(np.arange(50.0), 0.99, confidence=0.95)
    assert math.isnan(high)
    assert all(math.isnan(limit) for limit in ordered_interval(np.zeros(0), 0.5, confidence=0.95))


@pytest.mark.parametrize(("design_effect", "expected"), [(1.0, (467, 532)), (4.0, (435, 567))])
def test_an_interval_is_a_pair_of_order_statistics_by_the_binomial(design_effect, expected):
    low, high = ordered_interval(np.arange(1000.0), 0.5, confidence=0.96, design_effect=design_effect)
    assert (low, high) == pytest.approx(expected, abs=1)


BOUND = math.log(1.1)
PLAIN = Dependence()


def arms(seed, *, ratio=1.0, blocks=40, per_block=120, jam=None, own=0.05):
    """Floats of two arms by block; `jam` (block, treatment's factor, control's factor) slows one block of both."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(blocks), per_block)
    work = 0.86 * rng.standard_normal(block.size)
    treatment, control = (100.0 * np.exp(work + own * rng.standard_normal(block.size)) for _ in range(2))
    if jam is not None:
        treatment[block == jam[0]] *= jam[1]
        control[block == jam[0]] *= jam[2]
    return treatment * ratio, control, block


def windows(treatment, control, block, q=0.99):
    sides = (SortedGroups.of(values, block, int(block.max()) + 1) for values in (treatment, control))
    return Windows.of(*sides, groups_of(np.ones(int(block.max()) + 1, dtype=int)), q=q, bound=BOUND)


def typical_ratio(held):
    return balanced_ratios(held, np.zeros_like(held.group))[0]


def limits(held, alpha=0.05, dependence=PLAIN):
    return window_limits(held, bound=BOUND, alpha=alpha, dependence=dependence)


def test_excess_is_that_beyond_each_windows_own_pooled_quantile():
    treatment, control, block = arms(1, blocks=10)
    held = windows(treatment, control, block, q=0.9)
    expected = []
    for number in range(10):
        own, other = treatment[block == number], control[block == number]
        threshold = np.sort(np.concatenate((own, other)))[math.ceil(0.9 * 240) - 1]
        expected.append((own > threshold).sum() - (other > threshold).sum())
    assert held.excess(0) == pytest.approx(expected)


def test_swapping_the_arms_turns_excess_and_ratio_round():
    treatment, control, block = arms(2, ratio=1.3)
    one, other = windows(treatment, control, block), windows(control, treatment, block)
    assert one.excess(0) == pytest.approx(-other.excess(0))
    assert typical_ratio(one) == pytest.approx(-typical_ratio(other), abs=0.002)


def test_a_factor_on_all_latencies_moves_ratio_and_limits_by_itself():
    one, other = (windows(*arms(3, ratio=ratio)) for ratio in (1.0, 1.21))
    shift = math.log(1.21)  # a whole number of steps
    assert typical_ratio(other) == pytest.approx(typical_ratio(one) + shift, abs=0.003)
    for name in ("low", "high"):
        assert getattr(limits(other), name) == pytest.approx(getattr(limits(one), name) + shift, abs=0.004)


def test_one_jam_that_both_arms_share_decides_nothing():
    """Over the whole run the jammed block makes the tail: a ratio of 3 there is a ratio of 3 in all."""
    treatment, control, block = arms(4, jam=(7, 60.0, 20.0))
    assert np.quantile(treatment, 0.99) > 1.5 * np.quantile(control, 0.99)
    held = windows(treatment, control, block)
    assert abs(typical_ratio(held)) < 0.1
    assert limits(held).p_noninferior < 0.05


def test_blocks_with_too_little_of_the_tail_are_joined_within_their_group():
    held = windows(*arms(7, blocks=40, per_block=50))
    assert len(held.group) == 20
    assert held.groups == 10
    assert len(windows(*arms(7, blocks=40, per_block=15)).group) == 10, "a group that holds one is one window"
    assert windows(*arms(7, blocks=40, per_block=10)) is None, "even a whole group holds less than one beyond p99"


def test_an_arm_that_is_twenty_times_faster_passes_on_few_requests():
    """Swapped labels would put the slow arm's requests on either side, and decide nothing."""
    held = windows(*arms(2, blocks=16, per_block=60, ratio=0.05))
    assert limits(held).p_noninferior < 0.02


def test_dependence_widens_limits_and_keeps_the_ratio():
    held = windows(*arms(9))
    plain, wide = limits(held), limits(held, dependence=Dependence(drift=0.002, restart=0.05))
    assert wide.low < plain.low < typical_ratio(held) < plain.high < wide.high
    assert wide.p_noninferior > plain.p_noninferior
    assert wide.spread == pytest.approx(math.hypot(plain.spread, math.sqrt(0.002)))


def test_drift_moves_limits_by_its_own_size_and_takes_none_away():
    """All of the tail lies on one side well before the margin: no count can say more, and drift of 15 % is not 60 %."""
    held = windows(*arms(8, ratio=0.6, blocks=23, per_block=34))
    drifting = limits(held, dependence=Dependence(drift=0.15**2))
    assert drifting.high is not None
    assert math.exp(drifting.high) < 1.0
    assert drifting.p_noninferior < 0.05


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


@given(st.lists(st.tuples(st.floats(2.0, 50.0), st.booleans(), st.integers(1, 3)), min_size=1, max_size=12))
@settings(max_examples=30)
def test_equal_steps_are_no_order(drawn: list[tuple[float, bool, int]]) -> None:
    rates, held, starts = zip(*drawn, strict=True)
    one = knee_profile(rates, held, starts, grid=GRID)
    assert p_not_higher(one, one) == 0.5
    assert np.isfinite(one.likelihood.max())
    low, high = one.interval(0.05)
    assert low is None or high is None or low < high


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(width=32, allow_infinity=False)), min_size=1, max_size=40))
def test_quantiles_of_groups_are_those_of_each_group_by_itself(rows):
    group, values = (np.array(column) for column in zip(*rows, strict=True))
    values, qs = values.astype(np.float32), (0.1, 0.5, 0.99, 1.0)
    found = quantiles_of_groups(values, group, qs)
    for number in np.unique(group).tolist():
        np.testing.assert_array_equal(found[number], quantiles(values[group == number], qs))
