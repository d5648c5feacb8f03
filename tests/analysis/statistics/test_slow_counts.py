"""Counts of slow requests against counting them one by one, and bets against scipy's hypergeometric distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.arrays import Floats
from analysis.statistics.slow_counts import SlowCounts, SortedGroups, slow_counts

RATIOS = np.array([-0.3, 0.0, 0.25, 1.0])


def sorted_groups(groups: list[Floats]) -> SortedGroups:
    return SortedGroups(np.concatenate([np.sort(group) for group in groups]), np.cumsum([0, *map(len, groups)]))


def one_by_one(treatment: Floats, control: Floats, q: float) -> tuple[int, int]:
    threshold = np.quantile(np.concatenate([treatment, control]), q)
    return int((treatment > threshold).sum()), int((control > threshold).sum())


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    q=st.sampled_from([0.5, 0.9, 0.99, 1.0, 0.001]),
    ties=st.booleans(),
)
def test_counts_are_those_of_counting(seed: int, sizes: list[tuple[int, int]], q: float, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    drawn = [[rng.standard_normal(size) for size in both] for both in sizes]
    # quarters, which floats hold exactly, so that ties stay ties after a shift
    one, other = ([np.round(4 * pair[arm]) / 4 if ties else pair[arm] for pair in drawn] for arm in (0, 1))
    ratios = np.round(4 * RATIOS) / 4 if ties else RATIOS
    counts = slow_counts(sorted_groups(one), sorted_groups(other), ratios, q)
    for place, ratio in enumerate(ratios):
        for group, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            expected = one_by_one(mine - ratio, theirs, q)
            assert (counts.treatment[place, group], counts.control[place, group]) == expected


def counts_of(*tables: tuple[int, int, int, int]) -> SlowCounts:
    """(slow of the treatment, of the control, all of the treatment, of the control) of each group."""
    return SlowCounts(*(np.array(column) for column in zip(*tables, strict=True)))


def test_arms_of_different_share_are_equally_slow_where_their_shares_are() -> None:
    counts = counts_of((1, 9, 10, 90), (10, 10, 100, 100), (0, 0, 5, 5))
    np.testing.assert_allclose(counts.by_arm(), 0.0, atol=1e-12)
    np.testing.assert_allclose(counts.by_request(), 0.0, atol=1e-12)


def test_the_treatment_alone_is_slow() -> None:
    counts = counts_of((4, 0, 100, 100))
    assert counts.by_arm() == pytest.approx(2.0)
    spread = stats.hypergeom.std(200, 4, 100)
    assert counts.by_request() == pytest.approx(2.0 / spread)


@settings(max_examples=100)
@given(own=st.integers(1, 60), other=st.integers(1, 60), data=st.data())
def test_bets_are_fair_by_the_hypergeometric_distribution(own: int, other: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, own + other))
    counts = range(max(0, slow - other), min(slow, own) + 1)
    chances = np.array([stats.hypergeom.pmf(k, own + other, slow, own) for k in counts])
    every = [counts_of((k, slow - k, own, other)).bets() for k in counts]
    for side in (0, 1):
        payoffs = np.exp(np.array([bets[side][:, 0] for bets in every]))
        np.testing.assert_allclose(chances @ payoffs, 1.0, rtol=1e-9)


def test_more_that_are_slow_are_evidence_of_harm_and_fewer_of_safety() -> None:
    harm, safety = counts_of((5, 5, 10, 90), (0, 10, 10, 90)).bets()
    assert (harm[:, 0] > 0).all()
    assert (safety[:, 0] < 0).all()
    assert (harm[:, 1] < 0).all()
    assert (safety[:, 1] > 0).all()


def test_means_and_sizes_are_those_of_each_group() -> None:
    groups = sorted_groups([np.array([1.0, 3.0]), np.array([2.0])])
    assert groups.sizes.tolist() == [2, 1]
    assert groups.means().tolist() == [2.0, 2.0]
    assert len(groups) == 2
