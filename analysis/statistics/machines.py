"""How much less trials know that ran on few machines: a ratio that differs by machine does not average out over trials.

What makes a machine fast or slow cancels within a trial. What favours one arm there (the host's processor drives one
arm, the card the other) does not, so the machine is a random effect on the log ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc, fdtri

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.statistics.distributions import t_quantile

_LASTING_GROUPS = 3  # fewer say too little of how they scatter, and more are too short for what lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A variance and how well it is known."""

    variance: float
    degrees: float

    def times(self, factor: float) -> Part:
        """Return the variance of √factor times this."""
        return Part(variance=factor * self.variance, degrees=self.degrees)


def summed(parts: Sequence[Part]) -> Part:
    """Sum independent variances, with the degrees of freedom of Satterthwaite [5]: (Σv)² / Σ(v²/ν)."""
    total = sum(part.variance for part in parts)
    uncertain = sum(part.variance**2 / part.degrees for part in parts)
    return Part(variance=total, degrees=total**2 / uncertain if uncertain > 0 else math.inf)


def error_over_trials(ratios: Floats, machine: Ints) -> tuple[Part, float]:
    """Return the variance of the mean of the trials' log ratios, and the part that machines add.

    `machine` numbers the machine of each trial. Trials of one machine show the rest; if no machine has two, nothing
    does.
    """
    numbers, place, counts = np.unique(machine, return_inverse=True, return_counts=True)
    trials, machines = len(ratios), len(numbers)
    means = np.bincount(place, ratios) / counts
    degrees = trials - machines
    within = float(((ratios - means[place]) ** 2).sum()) / degrees / trials if degrees else 0.0
    between = between_machines(means, counts / trials, within=within, degrees=degrees)
    parts = [
        Part(variance=within, degrees=max(1.0, degrees)),
        Part(variance=between, degrees=max(1.0, machines - 1.0)),
    ]
    return summed(parts), between


def lasting_reach(ratios: Floats, alpha: float) -> float:
    """Return how far Student's t reaches from the mean over three groups of neighbouring trials, one-sided at `alpha`:
    trials may share a state of their machine for a while (a busy neighbour, a clock)."""
    means = np.array([part.mean() for part in np.array_split(ratios, _LASTING_GROUPS)])
    error = float(means.std(ddof=1)) / math.sqrt(_LASTING_GROUPS)
    return float(t_quantile(1.0 - alpha, _LASTING_GROUPS - 1)) * error


def between_machines(means: Floats, weight: Floats, *, within: float, degrees: float) -> float:
    """Return the variance that machines add to the weighted mean of their `means`, beyond `within`; 0 for one machine.

    `within` is the variance that machines would show if they were alike; `weight` sums to 1. A moment estimate with
    constant weights [8, 9] that is set to the median of what chance would show (F, `degrees` below) [9]: set to the
    mean, it is too small more often than not, since the variance that few machines show is skewed.
    """
    machines = len(means)
    if machines < 2:
        return 0.0
    seen = float((weight**2 * (means - weight @ means) ** 2).sum()) * machines / (machines - 1)
    typical = fdtri(machines - 1, degrees, 0.5) if degrees > 0 else 1.0
    return max(0.0, seen / float(typical) - within)


def disagreement(ratios: Floats, spreads: Floats) -> float | None:
    """Return the p-value of Cochran's Q: machines whose log ratios have these standard errors share one ratio.

    Chi-square with one degree of freedom less than machines [10]. None of fewer than two, or without errors.
    """
    if len(ratios) < 2 or not (spreads > 0).all():
        return None
    weight = spreads**-2.0
    centre = float(weight @ ratios) / float(weight.sum())
    return float(chdtrc(len(ratios) - 1, float(weight @ (ratios - centre) ** 2)))
