"""Quantiles of latencies, their intervals, and counts by time block and log bin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.arrays import Floats, Ints
from analysis.statistics.distributions import binomial_quantile

Singles = npt.NDArray[np.float32]

# Latencies below a microsecond are measurement noise, and log(0) has no place on the grid.
_SMALLEST_MS = 1e-3
_FINEST_WIDTH = 0.001
_COARSEST_WIDTH = 0.004
_MOST_CELLS = 4_000_000


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
    lower = binomial_quantile(tail, effective, q)
    upper = binomial_quantile(1.0 - tail, effective, q) + 1
    # Below order statistic 1 and above order statistic n there is nothing that bounds the quantile.
    low = math.ceil(lower * size / effective) - 1 if lower >= 1 else None
    high = min(size, math.ceil(upper * size / effective)) - 1 if upper <= effective else None
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHistogram:
    """Cumulative counts of two samples by time block on one grid of log bins.

    Both samples weigh the same in each block (the mean of their sizes), also when one has nine tenths of the traffic.
    Bins are `width` wide in log scale, at most 0.4 %.
    """

    width: float
    treatment: Singles  # (bins, blocks): requests at or below the bin
    control: Singles  # (bins, blocks)
    size: float  # requests of one sample

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
    return BlockHistogram(width=width, treatment=cumulated[0], control=cumulated[1], size=float(weight.sum()))


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


def grouped(histogram: BlockHistogram, group: Ints) -> BlockHistogram:
    """The histogram with the blocks of one group added up; `group` rises from 0 without a gap."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return BlockHistogram(
        width=histogram.width,
        treatment=np.add.reduceat(histogram.treatment, starts, axis=1),
        control=np.add.reduceat(histogram.control, starts, axis=1),
        size=histogram.size,
    )
