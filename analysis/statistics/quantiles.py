"""Quantiles of latencies, exact or resampled: the block × log-bin histogram lets a permutation cost a few look-ups."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.arrays import Floats, Ints

Singles = npt.NDArray[np.float32]

# Latencies below a microsecond are measurement noise, and log(0) has no place on the grid.
_SMALLEST_MS = 1e-3
_FINEST_WIDTH = 0.001
_COARSEST_WIDTH = 0.004
_MOST_CELLS = 4_000_000
_SLACK = 0.01  # counts of weighted requests are sums of floats


def quantile(values: npt.ArrayLike, q: float) -> float:
    """The `q` quantile of the values that are numbers, by definition 7 of Hyndman and Fan [1]; NaN of none.

    One value is every quantile of itself; among ties the tied value is returned.

    [1] Hyndman, R. J. and Fan, Y. (1996). Sample quantiles in statistical packages. The American Statistician 50(4).
    """
    return quantiles(values, (q,))[0]


def quantiles(values: npt.ArrayLike, qs: Sequence[float]) -> list[float]:
    """Several quantiles as `quantile` gives them, all from one partial sort."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return [math.nan] * len(qs)
    return [float(value) for value in np.quantile(known, np.asarray(qs), overwrite_input=True, method="linear")]


def grouped_quantiles(values: Floats, group: Ints, groups: int, qs: Sequence[float]) -> Floats:
    """The quantiles of each group's values, as `quantiles` gives them, from one sort. Shape (groups, quantiles).

    `group` numbers the group of each value from 0. NaN for a group without a number.
    """
    known = ~np.isnan(values)
    values, group = values[known], group[known]
    if not len(values):
        return np.full((groups, len(qs)), math.nan)
    ordered = values[np.argsort(group, kind="stable")]
    counts = np.bincount(group, minlength=groups)[:, None]
    first = np.cumsum(counts, axis=0) - counts
    for begin, count in zip(first[:, 0].tolist(), counts[:, 0].tolist(), strict=True):
        ordered[begin : begin + count].sort()
    place = np.maximum(counts - 1, 0) * np.asarray(qs)
    below = np.floor(place).astype(np.int64)
    share = place - below
    last = np.maximum(counts - 1, 0)
    low = ordered[np.minimum(first + below, ordered.size - 1)]
    high = ordered[np.minimum(first + np.minimum(below + 1, last), ordered.size - 1)]
    # From whichever end is nearer, so that the largest is exactly itself.
    between = np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1.0 - share))
    return np.where(counts > 0, between, math.nan)


def quantile_interval(
    values: npt.ArrayLike, q: float, *, confidence: float, design_effect: float = 1.0
) -> tuple[float, float]:
    """Limits of a two-sided interval for the `q` quantile from order statistics (binomial counts, no distribution).

    `design_effect` is how many times more the count of exceedances varies than it would with independent requests;
    the sample counts as n / design_effect. A limit that the sample cannot give is NaN: p99 of 50 has no upper one.
    """
    known = np.asarray(values, dtype=np.float64).ravel()
    known = known[~np.isnan(known)]
    ranks = _interval_ranks(known.size, q, confidence=confidence, design_effect=design_effect)
    known.partition(np.array([rank for rank in ranks if rank is not None], dtype=np.int64))
    low, high = (math.nan if rank is None else float(known[rank]) for rank in ranks)
    return low, high


def ordered_interval(ordered: Floats, q: float, *, confidence: float, design_effect: float) -> tuple[float, float]:
    """The limits of `quantile_interval` for values in order, which are numbers."""
    ranks = _interval_ranks(ordered.size, q, confidence=confidence, design_effect=design_effect)
    low, high = (math.nan if rank is None else float(ordered[rank]) for rank in ranks)
    return low, high


def _interval_ranks(size: int, q: float, *, confidence: float, design_effect: float) -> tuple[int | None, int | None]:
    """Which of so many values in order are the limits, counted from 0."""
    if not size:
        return None, None
    effective = max(1, int(size / max(design_effect, 1.0)))
    tail = (1.0 - confidence) / 2.0
    lower = int(stats.binom.ppf(tail, effective, q))
    upper = int(stats.binom.ppf(1.0 - tail, effective, q)) + 1
    # Below order statistic 1 and above order statistic n there is nothing that bounds the quantile.
    low = math.ceil(lower * size / effective) - 1 if lower >= 1 else None
    high = min(size, math.ceil(upper * size / effective)) - 1 if upper <= effective else None
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHistogram:
    """Cumulative counts of two samples by time block on one grid of log bins, so that label swaps are look-ups.

    Both samples weigh the same in each block (the mean of their sizes), so that swapping their labels is symmetric
    also when one of them has nine tenths of the traffic. Bins are `width` wide in log scale, at most 0.4 %.
    """

    width: float
    lowest: float  # log of the lower edge of bin 0
    treatment: Singles  # (bins, blocks): requests at or below the bin
    control: Singles  # (bins, blocks)
    size: float  # requests of one group, equal for all swaps

    @property
    def blocks(self) -> int:
        return int(self.treatment.shape[1])


def block_histogram(
    treatment: Floats, treatment_block: Ints, control: Floats, control_block: Ints, *, anchor: float = 0.0
) -> BlockHistogram:
    """The histogram of two samples in ms over the blocks that hold both of them: one at least.

    A log shift of `anchor` is a whole number of bins, so that a margin is tested where it lies.
    """
    number, count = shared_blocks(treatment_block, control_block)
    samples = [_logs_by_block(treatment, number(treatment_block)), _logs_by_block(control, number(control_block))]
    lowest, highest = min(float(logs.min()) for logs, _ in samples), max(float(logs.max()) for logs, _ in samples)
    width = min(_COARSEST_WIDTH, max(_FINEST_WIDTH, (highest - lowest) * count / _MOST_CELLS))
    if anchor > 0:
        width = anchor / math.ceil(anchor / width)
    bins = int((highest - lowest) / width) + 1
    tables = []
    for logs, block in samples:
        bin_of = np.minimum(((logs - lowest) / width).astype(np.int64), bins - 1)
        tables.append(np.bincount(bin_of * count + block, minlength=bins * count).reshape(bins, count))
    totals = [table.sum(axis=0) for table in tables]
    weight = (totals[0] + totals[1]) / 2.0
    cumulated = []
    for total in totals:
        held = tables.pop(0).astype(np.float64)
        held *= weight / total
        cumulated.append(np.cumsum(held, axis=0, out=held).astype(np.float32))
    return BlockHistogram(
        width=width, lowest=lowest, treatment=cumulated[0], control=cumulated[1], size=float(weight.sum())
    )


def _logs_by_block(values: Floats, block: Ints) -> tuple[Floats, Ints]:
    """The log latencies and their blocks, without those of block -1."""
    inside = block >= 0
    return np.log(np.maximum(values[inside], _SMALLEST_MS)), block[inside]


def shared_blocks(treatment: Ints, control: Ints) -> tuple[Callable[[Ints], Ints], int]:
    """How blocks that both samples have are numbered from 0, rising (-1: the others), and how many there are.

    Neither is empty. Blocks are counters, so a table of all between the lowest and the highest is small.
    """
    lowest = min(int(treatment.min()), int(control.min()))
    span = max(int(treatment.max()), int(control.max())) - lowest + 1
    present = np.ones(span, dtype=np.bool_)
    for block in (treatment, control):
        own = np.zeros(span, dtype=np.bool_)
        own[block - lowest] = True
        present &= own
    if present.all() and not lowest:
        return lambda block: block, span
    number = np.where(present, np.cumsum(present) - 1, -1).astype(np.int32)
    return lambda block: number[block - lowest], int(present.sum())


def swapped_log_ratios(histogram: BlockHistogram, q: float, swaps: Singles, *, shift: int = 0) -> Floats:
    """log(treatment quantile / control quantile) for each row of `swaps` (draws, blocks; 1 swaps a block's labels).

    The treatment's latencies are first divided by exp(`shift` × width). Quantiles are those of definition 7 up to
    the width of a bin.
    """
    draws = len(swaps)
    position = (histogram.size - 1.0) * q
    rank = math.floor(position + 1e-9)
    fraction = min(max(position - rank, 0.0), 1.0)
    # The control's group holds in each block what the treatment's group does not.
    at, above = _order_bins(histogram, np.concatenate((swaps, 1.0 - swaps)), shift, (rank + 0.5, rank + 1.5))
    # The largest of fewer than two requests has nothing above it.
    last = max(len(histogram.control), len(histogram.treatment) - shift) - 1
    bins = at + fraction * (np.minimum(above, last) - at)
    return np.asarray((bins[:draws] - bins[draws:]) * histogram.width)


def _order_bins(
    histogram: BlockHistogram, from_control: Singles, shift: int, thresholds: tuple[float, float]
) -> tuple[Floats, Floats]:
    """The first bins at which a group holds two rising numbers of requests, for each row of `from_control`.

    from_control: (rows, blocks); 1 takes the control's requests of a block into the group, 0 the treatment's, which lie
    `shift` bins lower.
    """
    treatment, control = histogram.treatment, histogram.control
    top = len(control) - 1
    places = range(min(0, -shift), max(top, top - shift) + 1)

    def held(place: int, luck: Callable[[Singles, Singles], Singles]) -> float:
        """What the luckiest or the unluckiest group holds up to a bin: every other lies between."""
        of_treatment = treatment[min(place + shift, top)] if place + shift >= 0 else np.zeros_like(treatment[0])
        of_control = control[min(place, top)] if place >= 0 else np.zeros_like(control[0])
        return float(luck(of_treatment, of_control).sum(dtype=np.float64))

    first = bisect_left(places, thresholds[0] - _SLACK, key=lambda place: held(place, np.maximum))
    last = bisect_left(places, thresholds[1] + _SLACK, key=lambda place: held(place, np.minimum))
    near = np.arange(places[0] + first, min(places[0] + last, places[-1]) + 1)
    of_treatment, of_control = rows_upto(treatment, near + shift), rows_upto(control, near)
    # Most bins of a thin tail hold nothing: a group's count changes only where one of the samples' does.
    changes = np.ones(len(near), dtype=np.bool_)
    changes[1:] = ((of_treatment[1:] != of_treatment[:-1]) | (of_control[1:] != of_control[:-1])).any(axis=1)
    of_treatment, of_control = of_treatment[changes], of_control[changes]
    bins = np.append(near[changes], near[-1] + 1 if len(near) else places[0] + first).astype(np.float64)
    excess, base = of_control - of_treatment, of_treatment.sum(axis=1, dtype=np.float64)
    reached = np.empty((2, len(from_control)))
    rows = max(1, _MOST_CELLS // len(bins))
    for start in range(0, len(from_control), rows):
        chunk = slice(start, start + rows)
        counts = base[:, None] + excess @ from_control[chunk].T
        for place, threshold in enumerate(thresholds):
            reached[place, chunk] = bins[(counts < threshold).sum(axis=0)]
    return reached[0], reached[1]


def rows_upto(cumulated: npt.NDArray[np.floating[Any]], places: Ints) -> npt.NDArray[np.floating[Any]]:
    """Rows of a table of cumulated counts: zero before its first row, its last row from there on."""
    rows = cumulated[np.clip(places, 0, len(cumulated) - 1)]
    rows[places < 0] = 0.0
    return rows


def weighted_log_ratios(histogram: BlockHistogram, q: float, weights: Singles) -> Floats:
    """log(treatment quantile / control quantile) with each block counted as often as `weights` (draws, blocks) says.

    Quantiles are those of definition 7 up to the width of a bin. Every row holds some weight.
    """
    sizes = (weights @ histogram.treatment[-1]).astype(np.float64)
    position = (sizes - 1.0) * q
    rank = np.floor(position + 1e-6)
    fraction = np.clip(position - rank, 0.0, 1.0)
    bins = []
    for cumulated in (histogram.treatment, histogram.control):
        at = _weighted_bin(cumulated, weights, rank + 0.5)
        above = np.minimum(_weighted_bin(cumulated, weights, rank + 1.5), len(cumulated) - 1)
        bins.append(at + fraction * (above - at))
    return np.asarray((bins[0] - bins[1]) * histogram.width)


def _weighted_bin(cumulated: Singles, weights: Singles, threshold: Floats) -> Floats:
    """The first bin at which the weighted count reaches the draw's threshold, by bisection of all draws at once."""
    low = np.full(len(weights), -1, dtype=np.int64)
    high = np.full(len(weights), len(cumulated), dtype=np.int64)
    while (high - low > 1).any():
        middle = np.clip((low + high) // 2, 0, len(cumulated) - 1)
        reached = np.einsum("db,db->d", weights, cumulated[middle]) >= threshold
        open_draws = high - low > 1
        high = np.where(open_draws & reached, middle, high)
        low = np.where(open_draws & ~reached, middle, low)
    return high.astype(np.float64)
