import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.quantiles import (
    block_histogram,
    grouped_quantiles,
    quantile,
    quantile_interval,
    quantiles,
    swapped_log_ratios,
)

positive = st.floats(min_value=0.01, max_value=1e6)


@given(st.lists(positive, min_size=1, max_size=60), st.floats(min_value=0.0, max_value=1.0))
def test_quantile_interpolates_between_order_statistics(values, q):
    ordered = sorted(values)
    place = (len(values) - 1) * q
    below = ordered[math.floor(place)]
    above = ordered[min(math.floor(place) + 1, len(values) - 1)]
    expected = below + (place - math.floor(place)) * (above - below)
    assert quantile(values, q) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(positive, st.just(math.nan))), max_size=80))
def test_quantiles_of_groups_are_those_of_each_group_alone(pairs):
    qs = (0.0, 0.5, 0.9, 0.99, 1.0)
    group = np.array([number for number, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.float64)
    found = grouped_quantiles(values, group, 5, qs)
    np.testing.assert_array_equal(found, [quantiles(values[group == number], qs) for number in range(5)])


def test_quantile_of_nothing_is_unknown_and_of_one_is_itself():
    assert math.isnan(quantile([], 0.99))
    assert math.isnan(quantile([math.nan], 0.99))
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([7.0, math.nan, 7.0], 0.01) == 7.0


def histogram_of(treatment, control, blocks):
    index = np.arange(len(treatment)) % blocks
    return block_histogram(np.asarray(treatment), index, np.asarray(control), index, anchor=math.log(1.1)), index


@given(
    st.integers(min_value=0, max_value=2**32 - 1),
    st.integers(min_value=1, max_value=5),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.integers(min_value=-200, max_value=200),
)
def test_swapped_ratio_is_within_a_bin_of_the_exact_one(seed, blocks, q, shift):
    rng = np.random.default_rng(seed)
    treatment, control = rng.lognormal(5, 1, 60), rng.lognormal(5, 1, 60)
    histogram, index = histogram_of(treatment, control, blocks)
    swaps = rng.integers(0, 2, size=(4, blocks)).astype(np.float32)
    found = swapped_log_ratios(histogram, q, swaps, shift=shift)
    moved = treatment * math.exp(-shift * histogram.width)
    for swap, ratio in zip(swaps, found, strict=True):
        swapped = swap[index] > 0
        first = np.log(np.where(swapped, control, moved))
        second = np.log(np.where(swapped, moved, control))
        # Quantiles of the logs: the histogram interpolates in log scale.
        exact = np.quantile(first, q) - np.quantile(second, q)
        assert ratio == pytest.approx(exact, abs=2.01 * histogram.width)


def test_bins_are_fine_enough_for_half_a_percent():
    histogram, _ = histogram_of(np.array([0.01, 1e6] * 40), np.array([0.01, 1e6] * 40), 2)
    assert histogram.width <= 0.005


def test_a_margin_is_a_whole_number_of_bins():
    histogram, _ = histogram_of(np.array([1.0, 2.0]), np.array([1.0, 3.0]), 1)
    bins = math.log(1.1) / histogram.width
    assert bins == pytest.approx(round(bins))


def test_blocks_that_one_arm_lacks_are_left_out():
    one = np.array([1.0, 2.0, 3.0])
    histogram = block_histogram(one, np.array([0, 1, 1]), one, np.array([1, 1, 2]))
    assert histogram.blocks == 1
    assert histogram.size == 2.0


def test_unequal_arms_weigh_the_same_in_a_block():
    rng = np.random.default_rng(3)
    small, large = rng.lognormal(0, 1, 50), rng.lognormal(0, 1, 450)
    histogram = block_histogram(small, np.zeros(50, dtype=int), large, np.zeros(450, dtype=int))
    assert histogram.treatment[-1, 0] == pytest.approx(histogram.control[-1, 0])


def test_interval_is_open_where_the_sample_cannot_close_it():
    _, high = quantile_interval(np.arange(50.0), 0.99, confidence=0.95)
    assert math.isnan(high)
    assert all(math.isnan(limit) for limit in quantile_interval([], 0.5, confidence=0.95))


def test_bunching_widens_the_interval():
    values = np.random.default_rng(1).lognormal(0, 1, 5000)
    narrow = quantile_interval(values, 0.9, confidence=0.95)
    wide = quantile_interval(values, 0.9, confidence=0.95, design_effect=10)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize(("design_effect", "expected"), [(1.0, (467, 532)), (4.0, (435, 567))])
def test_an_interval_is_a_pair_of_order_statistics_by_the_binomial(design_effect, expected):
    low, high = quantile_interval(np.arange(1000.0), 0.5, confidence=0.96, design_effect=design_effect)
    assert (low, high) == pytest.approx(expected, abs=1)
