"""Arms that each had runs by themselves, one after the other: compared by the statistics of `tailgate compare`.

They share no time. Nothing is paired, and there is nothing to swap: the unit is the trial, a run of one arm. The blocks
of a trial predict how far its traffic moves its quantile. Allowances cover what starts and days differ by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.run.variance import quantile_error
from analysis.statistics.compare import Comparison, Sample
from analysis.statistics.machines import Part
from analysis.statistics.quantiles import quantile
from analysis.statistics.unpaired import Level, day_part, difference, level_of, trials_needed


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
    """One comparison of two samples for each quantile in `qs`, undecided (see `compare.decide`).

    A sample without a request, or with a quantile of 0 in some trial, cannot be compared. Of one trial each there are
    limits, unless so little lies beyond the quantile that its blocks set none.
    """
    samples = (treatment, control)
    sizes = [len(sample) for sample in samples]
    base = Comparison(
        quantile=0.5,
        margin=margin,
        alpha=alpha,
        method="unpaired t over trials",
        blocks=min(len(np.unique(sample.block)) for sample in samples),
        trials=min(len(np.unique(sample.trial)) for sample in samples),
        requests=min(sizes),
        restart_spread=restart_spread,
    )
    for name, size in zip(("the arm", "the control"), sizes, strict=True):
        if not size:
            base = replace(base, obstacle=f"{name} has no request to compare")
    return [_compared(replace(base, quantile=q), samples, day_part(day_spread)) for q in qs]


def _compared(item: Comparison, samples: tuple[Sample, Sample], day: Part) -> Comparison:
    if item.obstacle is not None:
        return item
    own, base = (_level(sample, item) for sample in samples)
    if own is None or base is None:
        return item
    apart, anchor = difference(base, own, day), math.log1p(item.margin)
    low, high = apart.limits(item.alpha)
    return replace(
        item,
        ratio=math.exp(apart.effect),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        p_noninferior=apart.p_below(anchor),
        p_inferior=apart.p_above(anchor),
        spread=apart.spread,
        # To show that it is below the margin, or above it, whichever side of it was seen.
        needed_trials=trials_needed(base, own, day, bound=anchor, alpha=item.alpha)
        if apart.effect <= anchor
        else trials_needed(own, base, day, bound=-anchor, alpha=item.alpha),
    )


def _level(sample: Sample, item: Comparison) -> Level | None:
    """The log quantile of the sample's trials; None where one of them has none."""
    logs, lucks = [], []
    for trial in np.unique(sample.trial):
        own = sample.only(sample.trial == trial)
        value = quantile(own.values, item.quantile)
        if not value > 0:
            return None
        logs.append(math.log(value))
        lucks.append(quantile_error(own.values, own.block, item.quantile, value))
    return level_of(np.array(logs), lucks, restart_spread=item.restart_spread)
