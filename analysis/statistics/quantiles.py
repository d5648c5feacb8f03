"""Quantiles of latencies and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.statistics.distributions import binomial_quantile


def quantile(values: npt.ArrayLike, q: float) -> float:
    """Return the `q` quantile of the values that are numbers, by definition 7 of Hyndman and Fan [16]; NaN of none."""
    return quantiles(values, (q,))[0]


def quantiles(values: npt.ArrayLike, qs: Sequence[float], *, in_place: bool = False) -> list[float]:
    """Return several quantiles, as `quantile` gives them; `in_place` sorts the values themselves, none of them NaN."""
    known = np.asarray(values)
    known = known if in_place else known[~np.isnan(known)]
    if not known.size:
        return [math.nan] * len(qs)
    return [float(value) for value in np.quantile(known, np.asarray(qs), overwrite_input=True, method="linear")]


def quantiles_of_groups(values: Floats, group: Ints, qs: Sequence[float]) -> Floats:
    """Return `quantiles` of each group, which numbers that of each value from 0. Shape (groups, quantiles)."""
    sizes, known = np.bincount(group), np.bincount(group[~np.isnan(values)], minlength=int(group.max(initial=-1)) + 1)
    ends = np.cumsum(sizes)
    ordered = values[np.argsort(group.astype(np.int16) if len(sizes) < 1 << 15 else group, kind="stable")]  # by radix
    for first, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
        ordered[first:end].sort()  # what is no number comes last
    if not ordered.size:
        return np.full((len(sizes), len(qs)), math.nan)
    begin, most = (ends - sizes)[:, None], np.maximum(known - 1, 0)[:, None]
    place = most * np.asarray(qs)
    below = np.floor(place).astype(np.int64)
    low, high = ordered[begin + below], ordered[begin + np.minimum(below + 1, most)]
    share, width = place - below, high - low
    between = np.where(share < 0.5, low + width * share, high - width * (1.0 - share))  # as NumPy does, to the last bit
    return np.asarray(np.where(known[:, None] > 0, between, math.nan))


def ordered_interval(
    ordered: Floats, q: float, *, confidence: float, design_effect: float = 1.0
) -> tuple[float, float]:
    """Return a two-sided interval for the `q` quantile of ordered values, from order statistics (binomial counts).

    `ordered` are numbers in order. `design_effect` is how many times more the count of exceedances varies than it would
    with independent requests; the sample counts as n / design_effect. A limit that the sample cannot give is NaN: p99
    of 50 has no upper one.
    """
    size = ordered.size
    if not size:
        return math.nan, math.nan
    effective = max(1, int(size / max(design_effect, 1.0)))
    tail = (1.0 - confidence) / 2.0
    lower = binomial_quantile(tail, effective, q)
    upper = binomial_quantile(1.0 - tail, effective, q) + 1
    # Below order statistic 1 and above order statistic n there is nothing that bounds the quantile.
    low = float(ordered[math.ceil(lower * size / effective) - 1]) if lower >= 1 else math.nan
    high = float(ordered[min(size, math.ceil(upper * size / effective)) - 1]) if upper <= effective else math.nan
    return low, high
