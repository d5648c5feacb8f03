"""Quantiles of latencies, exact or resampled: the block × log-bin histogram lets a permutation cost a few look-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
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
    """Several quantiles as `quantile` gives them, from one sort."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return [math.nan] * len(qs)
    return [float(value) for value in np.quantile(known, np.asarray(qs), method="linear")]


def quantile_interval(
    values: npt.ArrayLike, q: float, *, confidence: float, design_effect: float = 1.0
) -> tuple[float, float]:
    """Limits of a two-sided interval for the `q` quantile from order statistics (binomial counts, no distribution).

    `design_effect` is how many times more the count of exceedances varies than it would with independent requests;
    the sample counts as n / design_effect. A limit that the sample cannot give is NaN: p99 of 50 has no upper one.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    ordered = ordered[~np.isnan(ordered)]
    size = ordered.size
    if not size:
        return math.nan, math.nan
    effective = max(1, int(size / max(design_effect, 1.0)))
    tail = (1.0 - confidence) / 2.0
    lower = int(stats.binom.ppf(tail, effective, q))
    upper = int(stats.binom.ppf(1.0 - tail, effective, q)) + 1
    # Below order statistic 1 and above order statistic n there is nothing that bounds the quantile.
    low = float(ordered[math.ceil(lower * size / effective) - 1]) if lower >= 1 else math.nan
    high = float(ordered[min(size, math.ceil(upper * size / effective)) - 1]) if upper <= effective else math.nan
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
    """The histogram of two samples in ms over the blocks that hold both of them.

    A log shift of `anchor` is a whole number of bins, so that a margin is tested where it lies.
    """
    shared = np.intersect1d(treatment_block, control_block)
    keep_treatment, keep_control = np.isin(treatment_block, shared), np.isin(control_block, shared)
    logs_treatment = np.log(np.maximum(treatment[keep_treatment], _SMALLEST_MS))
    logs_control = np.log(np.maximum(control[keep_control], _SMALLEST_MS))
    if not shared.size:
        empty = np.zeros((1, 0), dtype=np.float32)
        return BlockHistogram(width=_FINEST_WIDTH, lowest=0.0, treatment=empty, control=empty, size=0.0)
    lowest = min(float(logs_treatment.min()), float(logs_control.min()))
    highest = max(float(logs_treatment.max()), float(logs_control.max()))
    width = min(_COARSEST_WIDTH, max(_FINEST_WIDTH, (highest - lowest) * shared.size / _MOST_CELLS))
    if anchor > 0:
        width = anchor / math.ceil(anchor / width)
    bins = int((highest - lowest) / width) + 1
    counts = [
        _counts(logs, np.searchsorted(shared, block), lowest, width, bins, shared.size)
        for logs, block in (
            (logs_treatment, treatment_block[keep_treatment]),
            (logs_control, control_block[keep_control]),
        )
    ]
    totals = [count.sum(axis=0) for count in counts]
    weight = (totals[0] + totals[1]) / 2.0
    cumulated = [
        np.cumsum(count * (weight / total), axis=0).astype(np.float32)
        for count, total in zip(counts, totals, strict=True)
    ]
    return BlockHistogram(
        width=width, lowest=lowest, treatment=cumulated[0], control=cumulated[1], size=float(weight.sum())
    )


def _counts(logs: Floats, block: Ints, lowest: float, width: float, bins: int, blocks: int) -> Floats:
    index = np.minimum(((logs - lowest) / width).astype(np.int64), bins - 1)
    flat = np.bincount(index * blocks + block, minlength=bins * blocks)
    return flat.reshape(bins, blocks).astype(np.float64)


def swapped_log_ratios(histogram: BlockHistogram, q: float, swaps: Singles, *, shift: int = 0) -> Floats:
    """log(treatment quantile / control quantile) for each row of `swaps` (draws, blocks; 1 swaps a block's labels).

    The treatment's latencies are first divided by exp(`shift` × width). Quantiles are those of definition 7 up to
    the width of a bin.
    """
    treatment, control = _shifted(histogram.treatment, histogram.control, shift)
    excess = control - treatment  # what a swapped block adds to the treatment's group
    position = (histogram.size - 1.0) * q
    rank = math.floor(position + 1e-9)
    fraction = min(max(position - rank, 0.0), 1.0)
    fewer = np.minimum(excess, 0.0).sum(axis=1, dtype=np.float64)
    more = np.maximum(excess, 0.0).sum(axis=1, dtype=np.float64)
    quantile_bins = []
    for group, sign in ((treatment, 1.0), (control, -1.0)):
        base = group.sum(axis=1, dtype=np.float64)
        # The group's counts under the unluckiest and the luckiest swap: every draw lies between.
        bounds = (base + fewer, base + more) if sign > 0 else (base - more, base - fewer)
        found = _order_bin(base, excess, sign, swaps, rank + 0.5, bounds)
        if fraction > 0:
            above = _order_bin(base, excess, sign, swaps, rank + 1.5, bounds)
            # The largest of fewer than two requests has nothing above it.
            found = found + fraction * (np.minimum(above, len(base) - 1) - found)
        quantile_bins.append(found)
    return np.asarray((quantile_bins[0] - quantile_bins[1]) * histogram.width)


def _shifted(treatment: Singles, control: Singles, shift: int) -> tuple[Singles, Singles]:
    """Both counts on the one grid that holds the treatment moved down by `shift` bins (up when negative)."""
    below = ((max(-shift, 0), 0), (0, 0))
    above = ((max(shift, 0), 0), (0, 0))
    # Whichever sample ends first stays at its total above its last bin.
    return (
        np.pad(np.pad(treatment, below), ((0, max(shift, 0)), (0, 0)), mode="edge"),
        np.pad(np.pad(control, above), ((0, max(-shift, 0)), (0, 0)), mode="edge"),
    )


def _order_bin(
    base: Floats, excess: Singles, sign: float, swaps: Singles, threshold: float, bounds: tuple[Floats, Floats]
) -> Floats:
    """The first bin at which the group base + sign × swaps·excess holds `threshold` requests, for each draw."""
    least, most = bounds
    first = int(np.searchsorted(most, threshold - 1e-2))
    last = int(np.searchsorted(least, threshold + 1e-2))
    low = np.full(len(swaps), first - 1, dtype=np.int64)
    high = np.full(len(swaps), min(last, len(base)), dtype=np.int64)
    while True:
        open_draws = high - low > 1
        if not open_draws.any():
            return high.astype(np.float64)
        middle = np.where(open_draws, (low + high) // 2, np.clip(high, 0, len(base) - 1))
        held = base[middle] + sign * np.einsum("db,db->d", swaps, excess[middle])
        reached = held >= threshold
        high = np.where(open_draws & reached, middle, high)
        low = np.where(open_draws & ~reached, middle, low)
