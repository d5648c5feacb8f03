"""Quantiles of latencies, exact or resampled: the block × log-bin histogram lets a permutation cost a few look-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.arrays import Floats, Ints
from analysis.records import scratch
from analysis.records.scratch import parts

Singles = npt.NDArray[np.float32]

# Latencies below a microsecond are measurement noise, and log(0) has no place on the grid.
_SMALLEST_MS = 1e-3
_FINEST_WIDTH = 0.001
_COARSEST_WIDTH = 0.004
_MOST_CELLS = 4_000_000
_MANY = 1 << 20  # values, whose sort takes longer than to look through them for each quantile
_SAMPLED = 1 << 16  # of them


def quantile(values: npt.ArrayLike, q: float) -> float:
    """The `q` quantile of the values that are numbers, by definition 7 of Hyndman and Fan [1]; NaN of none.

    One value is every quantile of itself; among ties the tied value is returned.

    [1] Hyndman, R. J. and Fan, Y. (1996). Sample quantiles in statistical packages. The American Statistician 50(4).
    """
    return quantiles(values, (q,))[0]


def quantiles(values: npt.ArrayLike, qs: Sequence[float]) -> list[float]:
    """Several quantiles as `quantile` gives them, from one sort, or where values are many from a look at each."""
    given = np.asarray(values)
    if given.size > _MANY:
        return _of_many(given.ravel(), qs)
    known = given.astype(np.float64, copy=False)
    known = known[~np.isnan(known)]
    if not known.size:
        return [math.nan] * len(qs)
    return [float(value) for value in np.quantile(known, np.asarray(qs), method="linear")]


def _of_many(values: npt.NDArray[Any], qs: Sequence[float]) -> list[float]:
    size = _numbers(values)
    if not size:
        return [math.nan] * len(qs)
    positions = [(size - 1) * q for q in qs]
    ranks = [rank for at in positions for rank in (math.floor(at), min(math.floor(at) + 1, size - 1))]
    found = iter(_at_ranks(values, size, ranks))
    result = []
    for at in positions:
        one, other, share = next(found), next(found), at - math.floor(at)
        # From whichever end is nearer, as NumPy has it.
        result.append(one + (other - one) * share if share < 0.5 else other - (other - one) * (1.0 - share))
    return result


def _numbers(values: npt.NDArray[Any]) -> int:
    """How many of the values are numbers."""
    return sum(int(np.count_nonzero(~np.isnan(values[part]))) for part in parts(len(values)))


def _at_ranks(values: npt.NDArray[Any], size: int, ranks: Sequence[int]) -> list[float]:
    """Those of the `size` numbers that stand at the ranks, counted from 0, were they in order.

    They are not put in order: a sample tells between which two values each lies, and only what lies there is sorted.
    """
    sample = np.sort(values[:: max(1, len(values) // _SAMPLED)].astype(np.float64))
    sample = sample[~np.isnan(sample)]
    found: dict[int, float] = {}
    for rank in ranks:
        if rank in found:
            continue
        q = rank / max(1, size - 1)
        slack = 5.0 * math.sqrt(sample.size * q * (1.0 - q)) + 5.0
        first, last = (math.floor(sample.size * q + side * slack) for side in (-1, 1))
        low = float(sample[first]) if 0 <= first < sample.size else -math.inf
        high = float(sample[last]) if last < sample.size else math.inf
        below, near = _between(values, low, high)
        if not below <= rank < below + near.size:
            below, near = _between(values, -math.inf, math.inf)  # the sample was not like the rest
        near.sort()
        # A quantile lies between two neighbours, which are asked for one after the other.
        for other in ranks:
            if below <= other < below + near.size:
                found[other] = float(near[other - below])
    return [found[rank] for rank in ranks]


def _between(values: npt.NDArray[Any], low: float, high: float) -> tuple[int, Floats]:
    """How many of the values lie below `low`, and those from there to `high`."""
    below, near = 0, [np.zeros(0)]
    for part in parts(len(values)):
        own = values[part]
        below += int(np.count_nonzero(own < low))
        near.append(own[(own >= low) & (own <= high)])
    return below, np.concatenate(near, dtype=np.float64)


def grouped_quantiles(values: Floats, group: Ints, groups: int, qs: Sequence[float]) -> Floats:
    """The quantiles of each group's values, as `quantiles` gives them, from one sort. Shape (groups, quantiles).

    `group` numbers the group of each value from 0. NaN for a group without a number.
    """
    numbers = np.zeros(groups, dtype=np.int64)
    for part in parts(len(values)):
        numbers += np.bincount(group[part][~np.isnan(values[part])], minlength=groups)
    if not numbers.any():
        return np.full((groups, len(qs)), math.nan)
    ordered = scratch.empty(int(numbers.sum()), np.float64)
    place = np.cumsum(numbers) - numbers  # of the next value of each group
    for part in parts(len(values)):
        known = ~np.isnan(values[part])
        own = group[part][known]
        order = np.argsort(own, kind="stable")
        starts = np.flatnonzero(np.diff(own[order], prepend=-1))
        lengths = np.diff(np.append(starts, len(own)))
        within = np.arange(len(own)) - np.repeat(starts, lengths)
        ordered[place[own[order]] + within] = values[part][known][order]
        place[own[order][starts]] += lengths
    counts = numbers[:, None]
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


def ordered_interval(
    ordered: Floats, q: float, *, confidence: float, design_effect: float = 1.0
) -> tuple[float, float]:
    """Limits of a two-sided interval for the `q` quantile of values in order, from order statistics (binomial counts,
    no distribution).

    `ordered` are numbers in order. `design_effect` is how many times more the count of exceedances varies than it would
    with independent requests; the sample counts as n / design_effect. A limit that the sample cannot give is NaN: p99
    of 50 has no upper one.
    """
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
    samples = ((treatment, treatment_block), (control, control_block))
    ranges = [_range(values, number, block) for values, block in samples]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    width = min(_COARSEST_WIDTH, max(_FINEST_WIDTH, (highest - lowest) * count / _MOST_CELLS))
    if anchor > 0:
        width = anchor / math.ceil(anchor / width)
    bins = int((highest - lowest) / width) + 1
    tables = []
    for values, block in samples:
        table = np.zeros(bins * count, dtype=np.int64)
        for logs, own in _logs_by_block(values, number, block):
            logs -= lowest
            logs /= width
            cell = np.minimum(logs.astype(np.int64), bins - 1)
            cell *= count
            cell += own
            np.add.at(table, cell, 1)
        tables.append(table.reshape(bins, count))
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


def _range(values: Floats, number: Callable[[Ints], Ints], block: Ints) -> tuple[float, float]:
    """The lowest and the highest log latency in a block that both samples have."""
    ends = [(float(logs.min()), float(logs.max())) for logs, _ in _logs_by_block(values, number, block) if logs.size]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _logs_by_block(values: Floats, number: Callable[[Ints], Ints], block: Ints) -> Iterator[tuple[Floats, Ints]]:
    """Log latencies and their blocks as `number` has them, a part at a time, without those of block -1."""
    for part in parts(len(values)):
        own, logs = number(block[part]), np.maximum(values[part], _SMALLEST_MS)
        if own.min() < 0:
            logs, own = logs[own >= 0], own[own >= 0]
        yield np.log(logs, out=logs), own


def shared_blocks(treatment: Ints, control: Ints) -> tuple[Callable[[Ints], Ints], int]:
    """How blocks that both samples have are numbered from 0, rising (-1: the others), and how many there are.

    Neither is empty. Blocks are counters, so a table of all between the lowest and the highest is small.
    """
    lowest = min(int(treatment.min()), int(control.min()))
    span = max(int(treatment.max()), int(control.max())) - lowest + 1
    present = np.ones(span, dtype=np.bool_)
    for block in (treatment, control):
        own = np.zeros(span, dtype=np.bool_)
        for part in parts(len(block)):
            own[block[part] - lowest] = True
        present &= own
    if present.all() and not lowest:
        return lambda block: block, span
    number = np.where(present, np.cumsum(present) - 1, -1).astype(np.int32)
    return lambda block: number[block - lowest], int(present.sum())


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
