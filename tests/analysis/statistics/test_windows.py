"""The tail of a typical window: its ratio, its limits, and what a jam that both arms share does to them."""

import math

import numpy as np
import pytest

from analysis.statistics.dependence import Dependence
from analysis.statistics.quantiles import block_histogram
from analysis.statistics.resampling import groups_of
from analysis.statistics.windows import Windows, typical_ratio, window_limits

BOUND = math.log(1.1)
PLAIN = Dependence()


def arms(seed, *, ratio=1.0, blocks=40, per_block=120, jam=None, own=0.05):
    """Latencies of two arms by block; `jam` (block, treatment's factor, control's factor) slows one block of both."""
    rng = np.random.default_rng(seed)
    block = np.repeat(np.arange(blocks), per_block)
    work = 0.86 * rng.standard_normal(block.size)
    treatment, control = (100.0 * np.exp(work + own * rng.standard_normal(block.size)) for _ in range(2))
    if jam is not None:
        treatment[block == jam[0]] *= jam[1]
        control[block == jam[0]] *= jam[2]
    return treatment * ratio, control, block


def windows(treatment, control, block, q=0.99):
    histogram = block_histogram(treatment, block, control, block, anchor=BOUND)
    return Windows.of(histogram, groups_of(np.ones(int(block.max()) + 1, dtype=int)), q)


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
    assert held.excess(0) == pytest.approx(expected, abs=1.01)  # a bin may hold two neighbours


def test_swapping_the_arms_turns_excess_and_ratio_round():
    treatment, control, block = arms(2, ratio=1.3)
    one, other = windows(treatment, control, block), windows(control, treatment, block)
    assert one.excess(0) == pytest.approx(-other.excess(0))
    assert typical_ratio(one) == pytest.approx(-typical_ratio(other), abs=0.002)


def test_a_factor_on_all_latencies_moves_ratio_and_limits_by_itself():
    one, other = (windows(*arms(3, ratio=ratio)) for ratio in (1.0, 1.25))
    shift = math.log(1.25)
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


def test_an_arm_that_is_slower_in_most_blocks_is_called_so():
    found = limits(windows(*arms(5, ratio=1.4)))
    assert found.low > BOUND
    assert found.p_inferior < 0.01 < 0.99 < found.p_noninferior


def test_identical_arms_have_a_ratio_of_one_with_limits_around_it():
    treatment, _, block = arms(6)
    found = limits(windows(treatment, treatment, block))
    assert found.low < 0.0 < found.high < BOUND


def test_blocks_with_too_little_of_the_tail_are_joined_within_their_group():
    held = windows(*arms(7, blocks=40, per_block=50))
    assert held.histogram.blocks == 20
    assert held.groups == 10
    assert windows(*arms(7, blocks=40, per_block=15)).histogram.blocks == 10, "a group that holds one is one window"
    assert windows(*arms(7, blocks=40, per_block=10)) is None, "even a whole group holds less than one beyond p99"


def test_an_arm_that_is_twenty_times_faster_passes_on_few_requests():
    """Swapped labels would put the slow arm's requests on either side, and decide nothing."""
    held = windows(*arms(2, blocks=16, per_block=60, ratio=0.05))
    assert limits(held).p_noninferior < 0.02


def test_fewer_than_eight_groups_have_no_typical_block():
    assert windows(*arms(8, blocks=7)) is None


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
