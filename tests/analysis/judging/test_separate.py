"""Arms that ran separately: intervals that hold the truth, wide for one run each, narrower for more."""

import math

import numpy as np
import pytest

from analysis.judging.separate import compare_separate
from analysis.statistics.compare import Comparison, Sample, decide

PER_BLOCK, BLOCKS = 120, 22


def sample(
    rng: np.random.Generator, *, ratio: float = 1.0, trials: int = 1, first: int = 0, luck: float = 0.0
) -> Sample:
    """Lognormal latencies; each trial is moved by the luck of its start and its day."""
    moved = ratio * np.exp(rng.normal(0.0, luck, trials))
    values = rng.lognormal(4.0, 0.3, (trials, BLOCKS * PER_BLOCK)) * moved[:, None]
    trial = np.repeat(np.arange(trials) + first, BLOCKS * PER_BLOCK)
    block = np.repeat(np.arange(trials * BLOCKS) + first * BLOCKS, PER_BLOCK)
    return Sample(values=values.ravel(), block=block, trial=trial)


def compare(treatment: Sample, control: Sample, q: float = 0.5) -> Comparison:
    (item,) = compare_separate(treatment, control, qs=[q], margin=0.10, alpha=0.05, restart_spread=0.01)
    return item


def of_trials(trials: int, seed: int, *, ratio: float = 1.0, luck: float = 0.0, q: float = 0.5) -> Comparison:
    rng = np.random.default_rng(seed)
    control = sample(rng, trials=trials, luck=luck)
    return compare(sample(rng, ratio=ratio, trials=trials, first=trials, luck=luck), control, q)


def test_equal_arms_pass_and_much_slower_ones_fail() -> None:
    assert decide([of_trials(2, 1)])[0].verdict == "PASS"
    (slow,) = decide([of_trials(2, 1, ratio=1.5)])
    assert (slow.verdict, slow.method, slow.trials, slow.blocks) == ("FAIL", "unpaired t over trials", 2, 44)


@pytest.mark.parametrize("trials", [1, 2, 7])
def test_limits_hold_the_truth_though_starts_and_days_differ(trials: int) -> None:
    # 1 % each of start and of day is what is taken for granted.
    items = [of_trials(trials, seed, luck=math.hypot(0.01, 0.01)) for seed in range(80)]
    outside = sum(not item.low <= 1.0 <= item.high for item in items)
    assert outside <= 16  # of 8 expected: p < 0.005 of as many by chance


def test_more_runs_of_each_arm_narrow_the_limits() -> None:
    one, six = (of_trials(trials, 3, q=0.99) for trials in (1, 6))
    assert six.high / six.low < one.high / one.low


def test_number_of_runs_that_would_decide_is_named() -> None:
    (item,) = decide([of_trials(1, 5, ratio=1.05, q=0.99)])
    assert item.verdict == "INCONCLUSIVE"
    assert item.needed_trials > 1


def test_tail_that_blocks_cannot_see_has_no_limits() -> None:
    rng = np.random.default_rng(1)
    few = [
        Sample(values=rng.lognormal(4.0, 0.3, 60), block=np.arange(60) // 3, trial=np.full(60, own)) for own in (1, 2)
    ]
    item = compare(*few, q=0.99)
    assert item.ratio is not None
    assert (item.low, item.high, item.p_noninferior, item.needed_trials) == (None, None, None, None)
    assert decide([item])[0].verdict == "INCONCLUSIVE"


def test_arm_without_requests_and_quantile_of_zero_cannot_be_compared() -> None:
    full = sample(np.random.default_rng(1))
    nothing = full.only(np.zeros(len(full), dtype=np.bool_))
    assert compare(full, nothing).obstacle == "the control has no request to compare"
    zero = Sample(values=np.zeros(len(full)), block=full.block, trial=full.trial)
    item = compare(zero, full)
    assert (item.ratio, item.obstacle) == (None, None)
    assert "a quantile is unknown" in decide([item])[0].reason
