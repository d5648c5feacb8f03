"""Arms that ran separately: the difference of two runs that shared neither schedule nor machine nor day.

The unit is the trial, a fresh start. Figures are logarithms. Equal runs differ by the variance of each trial (its
traffic, which its blocks predict, and its start) and by that of the day, which no number of trials shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison, Sample, with_limits
from tailgate.analysis.statistics.dependence import PRIOR_DEGREES, cosine_variance
from tailgate.analysis.statistics.machines import Part, summed
from tailgate.analysis.statistics.quantiles import ordered_interval, quantile
from tailgate.analysis.statistics.windows import Limits, student_limits

_FEWEST_ALONE = 3  # trials that say how much they differ where nothing else does
_CONFIDENCE = 0.95
_REACH = float(ndtri(0.5 + _CONFIDENCE / 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The mean of a run's trials, and the variance of one but for that of the day; None where the data set none."""

    mean: float
    trials: int
    each: Part | None


def level_of(values: Floats, traffic: Sequence[Part | None], *, restart_spread: float) -> Level:
    """Estimate the level of one run from the figure of each trial, one at least, in logarithms.

    `traffic` is the variance that the blocks of each trial predict, None if they cannot. From six trials on the
    variance is the trials' own [14]. Below, it is at least what the traffic predicts with the allowance for starts,
    `restart_spread`. Without that prediction three trials or more use their own variance, and fewer have none.
    """
    count = len(values)
    each = Part(variance=float(values.var(ddof=1)), degrees=count - 1.0) if count > 1 else None
    if each is None or count < TRIALS_FOR_T_TEST:
        parts = [Part(variance=restart_spread**2, degrees=PRIOR_DEGREES)]
        known = [part.times(1.0 / count) for part in traffic if part is not None]
        if len(known) == count:
            parts.append(summed(known))
        predicted = summed(parts) if len(known) == count or count >= _FEWEST_ALONE else None
        if predicted is None or each is None or predicted.variance >= each.variance:
            each = predicted
    return Level(mean=float(values.mean()), trials=count, each=each)


def difference(baseline: Level, candidate: Level, day: Part, *, bound: float, alpha: float) -> Limits | None:
    """Return limits of the candidate's level minus the baseline's; None if a level has no variance.

    Welch's t [14] with one more variance, that of the days of both.
    """
    if baseline.each is None or candidate.each is None:
        return None
    means = [level.each.times(1.0 / level.trials) for level in (baseline, candidate) if level.each is not None]
    effect, part = candidate.mean - baseline.mean, summed([*means, day.times(2.0)])
    return student_limits(effect, part, bound=bound, alpha=alpha)


def quantile_error(values: Floats, block: Ints, q: float, value: float) -> Part | None:
    """Return the variance of the log quantile `value` of one trial, by an interval of order statistics that allows for
    bunching; None if its blocks cannot show it, as of the p99 of fifty requests."""
    bunching = _bunching(values > value, block)
    if bunching is None:
        return None
    effect, degrees = bunching
    low, high = ordered_interval(np.sort(values), q, confidence=_CONFIDENCE, design_effect=effect)
    if math.isnan(low) or math.isnan(high) or low <= 0:
        return None
    return Part(variance=(math.log(high / low) / (2.0 * _REACH)) ** 2, degrees=degrees)


def _bunching(missed: Bools, block: Ints) -> tuple[float, float] | None:
    """Return the design effect of the count of misses, at least 1, and its degrees of freedom; None for one block.

    It uses the slowest cosines of the series of blocks [4]: no pairing removes what neighbours share, and queues
    outlast blocks.
    """
    place = np.unique(block, return_inverse=True)[1]
    blocks = int(place.max(initial=-1)) + 1
    if blocks < 2:
        return None
    cosines = min(max(2, round(0.4 * blocks ** (2.0 / 3.0))), blocks - 1)
    share = float(missed.mean())
    independent = missed.size * share * (1.0 - share)
    if independent <= 0.0:
        return 1.0, float(cosines)
    beyond = np.bincount(place[missed], minlength=blocks) - share * np.bincount(place)
    return max(1.0, blocks * cosine_variance(beyond, cosines) / independent), float(cosines)


def compare_separate(
    treatment: Sample,
    control: Sample,
    *,
    qs: Sequence[float],
    margin: float,
    alpha: float,
    restart_spread: float,
    day_spread: float,
) -> list[Comparison]:
    """Compare two samples at each quantile in `qs`, undecided (see `compare.decide`).

    A sample without a request, or with a quantile of 0 in some trial, cannot be compared. With one trial each there are
    limits, unless so little lies beyond the quantile that its blocks set none.
    """
    samples = (treatment, control)
    base = Comparison(
        quantile=0.5,
        margin=margin,
        alpha=alpha,
        blocks=min(len(np.unique(sample.block)) for sample in samples),
        trials=min(len(np.unique(sample.trial)) for sample in samples),
        requests=min(map(len, samples)),
        restart_spread=restart_spread,
    )
    for name, sample in (("the arm", treatment), ("the control", control)):
        if not len(sample):
            return [replace(base, quantile=q, obstacle=f"{name} has no request to compare") for q in qs]
    day = Part(variance=day_spread**2, degrees=PRIOR_DEGREES)  # of one build: an allowance worth four days
    return [_compared(replace(base, quantile=q), samples, day) for q in qs]


def _compared(item: Comparison, samples: tuple[Sample, Sample], day: Part) -> Comparison:
    own, base = (_level(sample, item) for sample in samples)
    if own is None or base is None:
        return item
    limits = difference(base, own, day, bound=math.log1p(item.margin), alpha=item.alpha)
    if limits is None:
        return replace(item, ratio=math.exp(own.mean - base.mean))
    return with_limits(item, limits)


def _level(sample: Sample, item: Comparison) -> Level | None:
    """Return the level of the sample's log quantiles; None if a trial has none."""
    logs, traffic = [], []
    for trial in np.unique(sample.trial):
        own = sample.only(sample.trial == trial)
        value = quantile(own.values, item.quantile)
        if not value > 0:
            return None
        logs.append(math.log(value))
        traffic.append(quantile_error(own.values, own.block, item.quantile, value))
    return level_of(np.array(logs), traffic, restart_spread=item.restart_spread)
