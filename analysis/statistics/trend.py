"""How fast a sampled quantity grows: the Theil–Sen slope of several series at once, with limits by rank.

Samples that follow each other closely are not independent, so that each series is first cut into a few equal stretches
of time, of which each counts once, by its median. A single jump between two levels is no trend: with eight stretches
12 of 28 pairs lie on one side of it and have no slope, and the limits begin at the sixth of 28.

References: Theil 1950; Sen 1968, "Estimates of the regression coefficient based on Kendall's tau", sections 4 and 6;
Hirsch, Slack & Smith 1982 for pairs within several series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from analysis.arrays import Floats

Series = tuple[Floats, Floats]
"""Times and values, both rising in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The slope, in units of the values by the unit of the times, with one-sided limits at level alpha each."""

    slope: float
    low: float
    high: float


def medians_of(
    times: Floats, values: Floats, start: float, end: float, stretches: int, *, fewest: int
) -> Series | None:
    """(middle, median) of each of the equal stretches from `start` to `end`; None where one has under `fewest`."""
    if not end > start:
        return None
    place = np.floor((times - start) / (end - start) * stretches).astype(np.int64)
    medians = []
    for stretch in range(stretches):
        own = values[place == stretch]
        if own.size < fewest:
            return None
        medians.append(float(np.median(own)))
    middles = start + (np.arange(stretches) + 0.5) * (end - start) / stretches
    return middles, np.array(medians)


def trend_of(series: Sequence[Series], alpha: float) -> Trend | None:
    """The median slope over all pairs within each series; None where no series has two values.

    From two series on, the limits are also at least those of Student's t over the slopes of the series, which are
    replicates: whatever differs between them widens the limits. Assumes that the values of one series, less their
    trend, are exchangeable. Ties make the limits wider than they need be.
    """
    slopes = [_slopes(times, values) for times, values in series if len(values) > 1]
    if not slopes:
        return None
    pairs = np.sort(np.concatenate(slopes))
    slope = float(np.median(pairs))
    counts = [len(values) for _, values in series if len(values) > 1]
    variance = sum(count * (count - 1) * (2 * count + 5) / 18 for count in counts)
    reach = float(stats.norm.ppf(1.0 - alpha)) * math.sqrt(variance)
    place = math.floor((len(pairs) - reach) / 2.0)
    low, high = (float(pairs[place - 1]), float(pairs[-place])) if place >= 1 else (-math.inf, math.inf)
    if len(slopes) > 1:
        each = np.array([float(np.median(own)) for own in slopes])
        error = float(each.std(ddof=1)) / math.sqrt(len(each)) * float(stats.t.ppf(1.0 - alpha, len(each) - 1))
        low, high = min(low, float(each.mean()) - error), max(high, float(each.mean()) + error)
    return Trend(slope=slope, low=low, high=high)


def slope_of(times: Floats, values: Floats) -> float:
    """The Theil–Sen slope of one series of two values or more."""
    return float(np.median(_slopes(times, values)))


def _slopes(times: Floats, values: Floats) -> Floats:
    """The slope of every pair."""
    first, second = np.triu_indices(len(values), k=1)
    return np.asarray((values[second] - values[first]) / (times[second] - times[first]), dtype=np.float64)
