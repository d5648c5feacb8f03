"""Groups of neighbouring blocks, and how much less they tell than independent groups would.

Drift within a start and start-to-start variance outlast groups [1]. Both are estimated from means of log latencies by
block, arm less control.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.statistics.distributions import t_quantile
from tailgate.analysis.statistics.machines import Part, between_machines, summed

FEWEST_GROUPS = 8
MOST_GROUPS = 10
_BLOCKS_PER_GROUP = 4
DRIFT_COSINES = 4  # slower than groups: what one of them lasts for is seen by at most eight or ten
PRIOR_DEGREES = 4.0  # how many starts, or days, an allowance counts as
_FEWEST_BLOCKS = 8
_FINEST = 1e-3  # the width of a bin in log latency: no standard error is known better


def group_count(blocks: int) -> int:
    """Return into how many groups so many blocks of one trial are put; see `groups_of`."""
    return min(blocks, max(FEWEST_GROUPS, min(MOST_GROUPS, blocks // _BLOCKS_PER_GROUP)))


def groups_of(trials: Ints) -> Ints:
    """Return the group of each block, in order of time: neighbours of one trial. Shape (blocks,).

    `trials` is the trial of each block, rising. Four blocks make a group, but there are at least eight groups and at
    most ten. Below eight blocks each is its own group.
    """
    blocks = len(trials)
    groups = group_count(blocks)
    group = np.empty(blocks, dtype=np.int64)
    used = 0
    for trial in np.unique(trials):
        own = np.flatnonzero(trials == trial)
        share = max(1, round(groups * (own[-1] + 1) / blocks) - used)  # in all, `groups`
        group[own] = used + np.arange(len(own)) * share // len(own)
        used += share
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """What groups do not show of the variance of a log ratio.

    `drift`: the variance of the run's mean that wandering adds to what independent groups have. `restart`: the
    standard deviation of one start's log ratio, from the `trials` of the run and the allowance. `machine`: the variance
    of the run's mean that its `machines` add. `correlation`: of neighbouring groups, as blocks predict it; None where
    they are too few.
    """

    drift: float = 0.0
    restart: float = 0.0
    trials: int = 1
    machine: float = 0.0
    machines: int = 1
    correlation: float | None = None

    def widening(self, spread: float, *, groups: int, alpha: float) -> float:
        """Return how much farther limits reach than those of `groups` independent groups with standard error `spread`.

        The variances add up; Student's t takes the degrees of freedom of their sum [5].
        """
        own = max(spread, _FINEST) ** 2
        degrees = float(max(1, groups - 1))
        total = summed(
            [
                Part(variance=own, degrees=degrees),
                Part(variance=self.drift, degrees=DRIFT_COSINES),
                Part(variance=self.restart**2 / self.trials, degrees=PRIOR_DEGREES + self.trials - self.machines),
                Part(variance=self.machine, degrees=max(1, self.machines - 1)),
            ]
        )
        quantiles = t_quantile(1.0 - alpha, (min(degrees, total.degrees), degrees))
        return math.sqrt(total.variance / own) * float(quantiles[0] / quantiles[1])


def dependence_of(differences: Floats, group: Ints, trial: Ints, *, restart_spread: float, machine: Ints) -> Dependence:
    """Return the dependence that a series of blocks shows.

    `group`, `trial` and `machine` number those of each block, the first two rising. `restart_spread` is the assumed
    standard deviation of one arm's log latency over starts; both arms start, so a ratio has it √2 times. Below eight
    blocks nothing is known but that allowance.
    """
    first, which, sizes = np.unique(trial, return_index=True, return_inverse=True, return_counts=True)[1:]
    known = len(differences) >= _FEWEST_BLOCKS
    ran_on = machine[first]
    means = np.bincount(which, differences) / sizes
    inner = differences - means[which]
    drift = _drift(inner, group) if known else 0.0
    # What blocks predict of a trial's mean is no start-to-start variance.
    within = (float(inner.var()) / max(1, len(inner)) + drift) * len(means)
    restart = restart_variance(means, ran_on, within, restart_spread)
    machines, counts = np.unique(ran_on, return_inverse=True, return_counts=True)[1:]
    trials = max(1, len(means))
    between = between_machines(
        np.bincount(machines, means) / counts,
        counts / trials,
        within=(within + restart) / trials,
        degrees=PRIOR_DEGREES + trials - len(counts),
    )
    return Dependence(
        drift=drift,
        restart=math.sqrt(restart),
        trials=trials,
        machine=between,
        machines=max(1, len(counts)),
        correlation=group_correlation(inner, group) if known else None,
    )


def _drift(inner: Floats, group: Ints) -> float:
    """Return the variance of the mean by its slowest cosines [4], minus what groups show of it; at least 0."""
    blocks, groups = len(inner), int(group[-1]) + 1
    sums = np.bincount(group, weights=inner, minlength=groups)
    seen = float(sums @ sums) / blocks**2 * groups / (groups - 1)
    return max(0.0, cosine_variance(inner, DRIFT_COSINES) / blocks - seen)


def restart_variance(means: Floats, machine: Ints, within: float, restart_spread: float) -> float:
    """Return the variance of a start's log ratio: the assumed one combined with that of the run's starts.

    `means` are those of the trials, `within` the variance of each without that of its start, `machine` where each ran:
    differences between machines are no variance of starts.
    """
    allowed = 2.0 * restart_spread**2
    machines = np.unique(machine, return_inverse=True)[1]
    degrees = len(means) - len(np.unique(machines))
    if degrees < 1:
        return allowed
    deviations = means - (np.bincount(machines, means) / np.bincount(machines))[machines]
    between = max(0.0, float((deviations**2).sum()) / degrees - within)
    return (PRIOR_DEGREES * allowed + degrees * between) / (PRIOR_DEGREES + degrees)


def cosine_variance(series: Floats, cosines: int) -> float:
    """Return the long-run variance of a series by its `cosines` slowest cosines, which weigh the same [4]."""
    size = len(series)
    steps = (np.arange(size) + 0.5) / size
    basis = math.sqrt(2.0 / size) * np.cos(math.pi * np.outer(np.arange(1, cosines + 1), steps))
    return float(np.mean((basis @ series) ** 2))


def group_correlation(series: Floats, group: Ints) -> float | None:
    """Return how much neighbouring groups correlate, from how blocks do; None below 8 blocks or without variance.

    The blocks are taken for an autoregression of order one. The correlation seen in n blocks is too low by about
    (1 + 4φ) / n, which is put back, since a series too short to show its drift is the dangerous one.
    """
    size, centred = len(series), series - series.mean()
    total = float(centred @ centred)
    if size < _FEWEST_BLOCKS or total == 0.0:
        return None
    first = float(centred[1:] @ centred[:-1]) / total
    phi = min(max((first * size + 1.0) / (size - 4.0), 0.0), 0.999)
    length = size / (int(group[-1]) + 1)
    if phi == 0.0 or length < 1.0:
        return 0.0
    faded = phi**length
    # Sums over two neighbouring runs of `length`: their covariance over the variance of one.
    covariance = phi * (1.0 - faded) ** 2
    variance = length * (1.0 - phi * phi) - 2.0 * phi * (1.0 - faded)
    return min(1.0, covariance / variance) if variance > 0 else 1.0
