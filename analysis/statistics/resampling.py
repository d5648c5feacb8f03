"""Tests on time blocks: label swaps over groups of blocks, a block bootstrap, and a score test that allows for drift.

Pure statistics of a `BlockHistogram`; `analysis.statistics.compare` says when to use which. Effects are log ratios of
the quantiles of two samples, treatment over control. `[n]` are the references of `analysis.statistics.compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.arrays import Floats, Ints
from analysis.statistics.quantiles import BlockHistogram, rows_upto, swapped_log_ratios, weighted_log_ratios

Singles = npt.NDArray[np.float32]

FEWEST_GROUPS = 8
MOST_GROUPS = 10
_BLOCKS_PER_GROUP = 4
_EWC_DEGREES = 8
FARTHEST = math.log(1000.0)  # a limit beyond this ratio is no limit
_TOLERANCE = 1e-9


# From the standard error by groups to the factor by which limits must reach farther.
Widening = Callable[[float], float]


def _none(spread: float) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The result of a test on the log ratio.

    `low` and `high` are one-sided limits, None where the data set none. The p-values are of H0: log ratio <= 0, and of
    H0: log ratio >= bound and <= bound. `spread` is the standard error.
    """

    low: float | None
    high: float | None
    p_worse: float
    p_noninferior: float
    p_inferior: float
    spread: float


def group_count(blocks: int) -> int:
    """Into how many groups so many blocks of one trial are put; see `groups_of`."""
    return min(blocks, max(FEWEST_GROUPS, min(MOST_GROUPS, blocks // _BLOCKS_PER_GROUP)))


def groups_of(trials: Ints) -> Ints:
    """For each block, in order of time, the group it is resampled with: neighbours of one trial. Shape (blocks,).

    `trials` is the trial of each block, rising. What lasts longer than a block makes neighbours alike, and a test that
    takes them for independent calls noise significant. A few long groups are nearly independent whatever the noise
    does on a shorter scale [2, 4]: four blocks to a group, but at least eight groups, else no test has power, and at
    most ten, since more gain little and longer groups gain trust. Below eight blocks each is its own group.
    """
    blocks = len(trials)
    groups = group_count(blocks)
    group = np.empty(blocks, dtype=np.int64)
    used = 0
    for trial in np.unique(trials):
        own = np.flatnonzero(trials == trial)
        share = max(1, min(len(own), round(groups * len(own) / blocks)))
        group[own] = used + np.arange(len(own)) * share // len(own)
        used += share
    return group


def grouped(histogram: BlockHistogram, group: Ints) -> BlockHistogram:
    """The histogram with the blocks of one group added up; `group` rises from 0 without a gap."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return BlockHistogram(
        width=histogram.width,
        lowest=histogram.lowest,
        treatment=np.add.reduceat(histogram.treatment, starts, axis=1),
        control=np.add.reduceat(histogram.control, starts, axis=1),
        size=histogram.size,
    )


def label_swaps(groups: int, draws: int, rng: np.random.Generator) -> Singles:
    """Which groups swap labels, one row a draw; row 0 swaps none.

    To swap all groups but those of a row turns its log ratio round, so a row stands for two ways. All 2^(groups − 1)
    rows when they are at most `draws`.
    """
    if groups < 30 and 2 ** (groups - 1) <= draws:
        return ((np.arange(2 ** (groups - 1))[:, None] >> np.arange(groups)) & 1).astype(np.float32)
    swaps = rng.integers(0, 2, size=(draws, groups)).astype(np.float32)
    swaps[0] = 0.0
    return swaps


def swap_limits(
    histogram: BlockHistogram,
    q: float,
    *,
    bound: float,
    alpha: float,
    draws: int,
    rng: np.random.Generator,
    widening: Widening = _none,
    scores: tuple[float | None, float | None] = (None, None),
) -> Limits:
    """The label-swap test and its inversion over shifts in log scale [1, 2].

    It assumes that, were the arms equal, the difference of a group may have had either sign, and that groups are
    independent. Where they are not, `widening` says by how much limits reach farther than the standard error of such
    groups: a ratio is tested as if it lay that much nearer to the one seen. `bound` is a whole number of bins.
    Where slow requests are a kind of their own (timeouts, say), swaps far from the ratio seen put half of them into
    each group, which may then lie on either side of the quantile: the test loses all power there, though near the
    ratio it has it. Then the p-value at the bound is that of the block scores, (non-inferior, inferior) in `scores`.
    """
    swaps = label_swaps(histogram.blocks, draws, rng)

    def ratios_at(shift: int) -> Floats:
        ratios = swapped_log_ratios(histogram, q, swaps, shift=shift)
        return np.concatenate((ratios, -ratios))

    def tail(direction: int, shift: int) -> float:
        """P(as high as seen, or as low for direction 1) if the true log ratio is shift × width; row 0 was seen [1]."""
        ratios = direction * ratios_at(shift)
        return float(np.mean(ratios <= ratios[0] + _TOLERANCE))

    seen = float(swapped_log_ratios(histogram, q, swaps[:1])[0])
    centre = round(seen / histogram.width)
    spread = float(ratios_at(centre).std())
    widen = widening(spread)

    def nearer(ratio: float) -> int:
        return centre + round((ratio / histogram.width - centre) / widen)

    def limit(direction: int) -> float | None:
        """The first shift from `centre` outwards that the test rejects; None without one."""
        if alpha < 0.5 / len(swaps):
            return None
        step = first_rejected(
            lambda step: tail(direction, centre + direction * step) > alpha,
            guess=round(2.0 * spread / histogram.width),
            farthest=round(FARTHEST / histogram.width),
        )
        rejected = math.inf if step is None else (centre + direction * step * widen) * histogram.width
        return rejected if abs(rejected) < FARTHEST else None

    low, high = limit(-1), limit(1)
    p_noninferior, p_inferior = tail(1, nearer(bound)), tail(-1, nearer(bound))
    beyond = 2.0 * widen * histogram.width
    if high is not None and high < bound - beyond and p_noninferior > alpha:
        p_noninferior = scores[0] if scores[0] is not None else p_noninferior
    if low is not None and low > bound + beyond and p_inferior > alpha:
        p_inferior = scores[1] if scores[1] is not None else p_inferior
    # Shifts are whole bins: where a limit lies within one of the bound, the p-value says on which side.
    if high is not None:
        high = min(high, bound) if p_noninferior <= alpha else max(high, bound)
    if low is not None:
        low = max(low, bound) if p_inferior <= alpha else min(low, bound)
    return Limits(
        low=low,
        high=high,
        p_worse=tail(-1, nearer(0.0)),
        p_noninferior=p_noninferior,
        p_inferior=p_inferior,
        spread=spread,
    )


def first_rejected(kept: Callable[[int], bool], *, guess: int, farthest: int) -> int | None:
    """The fewest steps outwards that a test does not keep, by doubling from `guess` and halving; None up to `farthest`
    without one."""
    inner, step = 0, max(1, guess)
    while kept(step):
        if step >= farthest:
            return None
        inner, step = step, min(2 * step, farthest)
    while step - inner > 1:
        middle = (inner + step) // 2
        inner, step = (middle, step) if kept(middle) else (inner, middle)
    return step


def bootstrap_limits(
    histogram: BlockHistogram,
    q: float,
    group: Ints,
    *,
    bound: float,
    alpha: float,
    draws: int,
    rng: np.random.Generator,
    widening: Widening = _none,
) -> Limits | None:
    """Student's t around the ratio seen, with the standard error of a circular block bootstrap [7].

    Runs as long as a group are drawn with replacement, each block with both arms, so that pairs stay together. The
    degrees of freedom are groups − 1: as many independent pieces as the data hold, and no more. `widening` as in
    `swap_limits`. None when the draws do not differ.
    """
    blocks, groups = histogram.blocks, int(group[-1]) + 1
    length = math.ceil(blocks / groups)
    starts = rng.integers(0, blocks, size=(draws, math.ceil(blocks / length)))
    drawn = ((starts[:, :, None] + np.arange(length)) % blocks).reshape(draws, -1)[:, :blocks]
    offsets = np.arange(draws)[:, None] * blocks
    weights = np.bincount((drawn + offsets).ravel(), minlength=draws * blocks).reshape(draws, blocks)
    spread = float(weighted_log_ratios(histogram, q, weights.astype(np.float32)).std(ddof=1))
    if not spread > 0:
        return None
    widened = widening(spread) * spread
    seen = float(weighted_log_ratios(histogram, q, np.ones((1, blocks), dtype=np.float32))[0])
    reach = float(stats.t.ppf(1.0 - alpha, groups - 1)) * widened

    def above(value: float) -> float:
        return float(stats.t.sf((seen - value) / widened, groups - 1))

    return Limits(
        low=seen - reach if reach < FARTHEST else None,
        high=seen + reach if reach < FARTHEST else None,
        p_worse=above(0.0),
        p_noninferior=1.0 - above(bound),
        p_inferior=above(bound),
        spread=spread,
    )


def block_scores(histogram: BlockHistogram, q: float, *, shift: int) -> Floats:
    """By how much the treatment exceeds the pooled `q` quantile more often than the control, block by block.

    The treatment's latencies are first divided by exp(shift × width). Blocks weigh by their requests; mean weight 1.
    """
    bins = histogram.treatment.shape[0]
    own = histogram.treatment.sum(axis=1, dtype=np.float64)
    other = histogram.control.sum(axis=1, dtype=np.float64)
    # The treatment moved down by `shift` bins: what lies at or below bin b lay at or below b + shift.
    first, last = min(0, -shift), max(bins, bins - shift)
    places = np.arange(first, last)
    pooled = rows_upto(own[:, None], places + shift)[:, 0] + rows_upto(other[:, None], places)[:, 0]
    threshold = places[min(int(np.searchsorted(pooled, q * 2.0 * histogram.size)), len(places) - 1)]
    weight = histogram.control[-1].astype(np.float64)
    below = rows_upto(histogram.treatment, np.array([threshold + shift]))[0]
    below_control = rows_upto(histogram.control, np.array([threshold]))[0]
    return np.asarray((below_control - below) / weight.mean(), dtype=np.float64)


def ewc_p_values(series: Floats) -> tuple[float | None, float | None]:
    """p of H0: mean <= 0 and of H0: mean >= 0, by the t-test with an equal-weighted cosine variance estimate [3].

    Eight cosines, fewer when there are fewer than 16 blocks; None below 8 blocks or when nothing varies.
    """
    size = len(series)
    if size < 8:
        return None, None
    degrees = min(_EWC_DEGREES, size // 2)
    variance = cosine_variance(series, degrees)
    if variance <= 0:
        return None, None
    statistic = math.sqrt(size) * float(series.mean()) / math.sqrt(variance)
    return float(stats.t.sf(statistic, degrees)), float(stats.t.cdf(statistic, degrees))


def cosine_variance(series: Floats, cosines: int) -> float:
    """The long-run variance of a series by its `cosines` slowest cosines, which weigh the same [3]."""
    size = len(series)
    steps = (np.arange(size) + 0.5) / size
    basis = math.sqrt(2.0 / size) * np.cos(math.pi * np.outer(np.arange(1, cosines + 1), steps))
    return float(np.mean((basis @ series) ** 2))


def first_autocorrelation(series: Floats) -> float | None:
    """The correlation of neighbouring blocks; None below 8 blocks or when nothing varies."""
    if len(series) < 8:
        return None
    centred = series - series.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else None


def group_correlation(series: Floats, group: Ints) -> float | None:
    """How much neighbouring groups of blocks correlate, from how blocks do; None below 8 blocks or without variance.

    The blocks are taken for an autoregression of order one. The correlation seen in n blocks is too low by about
    (1 + 4φ) / n, which is put back, since a series too short to show its drift is the dangerous one.
    """
    first = first_autocorrelation(series)
    if first is None:
        return None
    size = len(series)
    phi = min(max((first * size + 1.0) / (size - 4.0), 0.0), 0.999)
    length = size / (int(group[-1]) + 1)
    if phi == 0.0 or length < 1.0:
        return 0.0
    faded = phi**length
    # Sums over two neighbouring runs of `length`: their covariance over the variance of one.
    covariance = phi * (1.0 - faded) ** 2
    variance = length * (1.0 - phi * phi) - 2.0 * phi * (1.0 - faded)
    return min(1.0, covariance / variance) if variance > 0 else 1.0
