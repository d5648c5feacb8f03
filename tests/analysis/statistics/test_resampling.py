import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.quantiles import block_histogram, swapped_log_ratios
from analysis.statistics.resampling import (
    FEWEST_GROUPS,
    MOST_GROUPS,
    block_scores,
    bootstrap_limits,
    ewc_p_values,
    first_autocorrelation,
    group_correlation,
    group_count,
    grouped,
    groups_of,
    label_swaps,
    swap_limits,
)


def drifting(rng, size, *, rho):
    level, levels = rng.standard_normal(), []
    for _ in range(size):
        level = rho * level + math.sqrt(1 - rho**2) * rng.standard_normal()
        levels.append(level)
    return np.array(levels)


def histogram(seed, *, blocks=20, per_block=60, ratio=1.0):
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(blocks), per_block)
    level = 0.05 * rng.standard_normal((2, blocks))
    treatment, control = (
        100 * np.exp(level[arm][block] + 0.3 * rng.standard_normal(block.size)) * (ratio if arm == 0 else 1)
        for arm in (0, 1)
    )
    return block_histogram(treatment, block, control, block, anchor=math.log(1.1))


@given(per_trial=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_groups_are_neighbours_of_one_trial_and_of_like_size(per_trial):
    trials = np.repeat(np.arange(len(per_trial)), per_trial)
    group = groups_of(trials)
    assert group[0] == 0
    assert set(np.diff(group)) <= {0, 1}
    for number in range(group[-1] + 1):
        assert len(np.unique(trials[group == number])) == 1
    for trial in range(len(per_trial)):
        sizes = np.unique(group[trials == trial], return_counts=True)[1]
        assert sizes.max() - sizes.min() <= 1
    assert group[-1] + 1 <= MOST_GROUPS + len(per_trial)


@pytest.mark.parametrize(("blocks", "groups"), [(1, 1), (5, 5), (8, 8), (20, 8), (36, 9), (40, 10), (400, 10)])
def test_a_longer_run_has_longer_groups_rather_than_many(blocks, groups):
    assert groups_of(np.ones(blocks, dtype=int))[-1] + 1 == groups


def test_eight_groups_are_the_fewest_where_there_are_blocks_for_them():
    assert groups_of(np.repeat([1, 2], 6))[-1] + 1 >= FEWEST_GROUPS


def test_a_grouped_histogram_holds_the_same_requests():
    whole = histogram(1)
    parts = grouped(whole, groups_of(np.ones(20, dtype=int)))
    assert parts.blocks == 8
    assert parts.treatment.sum(axis=1) == pytest.approx(whole.treatment.sum(axis=1))
    none = np.zeros((1, 8), dtype=np.float32)
    assert swapped_log_ratios(parts, 0.9, none) == pytest.approx(
        swapped_log_ratios(whole, 0.9, np.zeros((1, 20), dtype=np.float32))
    )


def test_few_groups_are_swapped_in_every_way_once_up_to_sign():
    swaps = label_swaps(4, 999, np.random.default_rng(0))
    assert len(swaps) == 8
    assert len(np.unique(np.concatenate((swaps, 1 - swaps)), axis=0)) == 16
    assert not swaps[0].any()


def test_all_ways_need_no_chance():
    one, other = (
        swap_limits(histogram(1, blocks=8), 0.9, bound=0.0, alpha=0.05, draws=128, rng=np.random.default_rng(seed))
        for seed in (1, 2)
    )
    assert one == other


def test_no_p_value_is_zero():
    limits = swap_limits(
        histogram(2, ratio=5.0), 0.9, bound=math.log(1.1), alpha=0.05, draws=199, rng=np.random.default_rng(0)
    )
    assert limits.p_inferior == pytest.approx(1 / 398)


def test_too_few_groups_set_no_limits():
    limits = swap_limits(
        histogram(1, blocks=4), 0.9, bound=math.log(1.1), alpha=0.05, draws=999, rng=np.random.default_rng(0)
    )
    assert limits.low is None
    assert limits.high is None


def test_widening_moves_both_limits_away_from_the_ratio():
    found = [
        swap_limits(
            histogram(1, blocks=10),
            0.9,
            bound=1.0,
            alpha=0.05,
            draws=999,
            rng=np.random.default_rng(0),
            widening=widening,
        )
        for widening in (lambda spread: 1.0, lambda spread: 1.5)
    ]
    seen = float(swapped_log_ratios(histogram(1, blocks=10), 0.9, np.zeros((1, 10), dtype=np.float32))[0])
    for plain, wide in ((found[0].low, found[1].low), (found[0].high, found[1].high)):
        assert wide - seen == pytest.approx(1.5 * (plain - seen), abs=0.002)
    assert found[1].spread == found[0].spread


def test_the_bootstrap_agrees_with_the_swaps_about_the_spread():
    whole, group = histogram(4, blocks=40), groups_of(np.ones(40, dtype=int))
    rng = np.random.default_rng(0)
    swap = swap_limits(grouped(whole, group), 0.5, bound=1.0, alpha=0.05, draws=999, rng=rng)
    boot = bootstrap_limits(whole, 0.5, group, bound=1.0, alpha=0.05, draws=999, rng=rng)
    assert boot.spread == pytest.approx(swap.spread, rel=0.4)
    assert boot.low < boot.high
    assert boot.p_worse + bootstrap_limits(
        whole, 0.5, group, bound=0.0, alpha=0.05, draws=999, rng=rng
    ).p_noninferior == (pytest.approx(1.0, abs=0.05))


def test_a_bootstrap_of_blocks_that_are_all_alike_is_none():
    values, block = np.tile(np.geomspace(1, 2, 50), 10), np.repeat(np.arange(10), 50)
    alike = block_histogram(values, block, values, block)
    rng = np.random.default_rng(0)
    assert bootstrap_limits(alike, 0.5, np.arange(10), bound=0.1, alpha=0.05, draws=99, rng=rng) is None


def test_scores_are_the_shares_above_the_pooled_quantile():
    rng = np.random.default_rng(1)
    block = np.repeat(np.arange(6), 50)
    treatment, control = np.exp(rng.standard_normal((2, 300)))
    found = block_scores(block_histogram(treatment, block, control, block), 0.9, shift=0)
    threshold = np.quantile(np.concatenate((treatment, control)), 0.9)
    expected = [(treatment[block == b] > threshold).mean() - (control[block == b] > threshold).mean() for b in range(6)]
    assert found == pytest.approx(expected, abs=0.021)


def test_scores_of_an_arm_shifted_by_its_own_ratio_are_those_of_equal_arms():
    table = histogram(3, ratio=1.5)
    shifted = block_scores(table, 0.9, shift=round(math.log(1.5) / table.width))
    assert abs(shifted.mean()) < 0.03
    assert block_scores(table, 0.9, shift=0).mean() > 0.1


def test_neighbouring_blocks_that_resemble_each_other_are_seen():
    trend = np.linspace(-1, 1, 30)
    assert first_autocorrelation(trend) > 0.8
    assert first_autocorrelation(np.tile([1.0, -1.0], 15)) < -0.8
    assert first_autocorrelation(np.zeros(30)) is None
    assert first_autocorrelation(trend[:5]) is None


def test_blocks_foretell_how_groups_correlate():
    """Over many series the estimate from 40 blocks is near the truth, which few groups could not show themselves."""
    group = groups_of(np.ones(40, dtype=int))
    found = [group_correlation(drifting(np.random.default_rng(seed), 40, rho=0.6), group) for seed in range(300)]
    phi, length = 0.6, 4
    faded = phi**length
    truth = phi * (1 - faded) ** 2 / (length * (1 - phi**2) - 2 * phi * (1 - faded))
    assert np.mean(found) == pytest.approx(truth, abs=0.05)
    independent = [group_correlation(np.random.default_rng(seed).standard_normal(40), group) for seed in range(300)]
    assert np.mean(independent) < 0.05
    assert group_correlation(np.zeros(40), group) is None


def test_the_number_of_groups_is_known_without_grouping() -> None:
    for blocks in (1, 7, 8, 31, 32, 40, 41, 5000):
        assert group_count(blocks) == groups_of(np.ones(blocks, dtype=np.int64))[-1] + 1


def test_scores_on_either_side_have_p_values_that_add_up_to_one():
    scores = drifting(np.random.default_rng(1), 60, rho=0.3) + 0.2
    greater, less = ewc_p_values(scores)
    assert greater + less == pytest.approx(1.0)
    assert (greater, less) == pytest.approx(ewc_p_values(-scores)[::-1])
    assert ewc_p_values(scores + 5.0)[0] < 1e-3
    assert ewc_p_values(scores[:7]) == ewc_p_values(np.zeros(20)) == (None, None)
