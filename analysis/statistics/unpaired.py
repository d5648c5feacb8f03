"""The difference of two runs that shared neither schedule nor machine nor day.

The unit is the trial, a fresh start: requests of one trial share its fate. Figures are logarithms. Equal runs differ by
the variance of each trial (its traffic, its start) and by that of the day, which all trials of a run share, so that no
number of them shows it.

References
----------
[1] Welch, B. L. (1947). The generalization of "Student's" problem when several different population variances are
    involved. Biometrika 34(1-2), 28-35.
[2] Satterthwaite, F. E. (1946). An approximate distribution of estimates of variance components. Biometrics Bulletin
    2(6), 110-114.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.arrays import Floats
from analysis.statistics.distributions import t_quantile, t_sf
from analysis.statistics.machines import Part, summed

TRIALS_FOR_WELCH = 6  # from here on trials alone say how much they differ
_FEWEST_ALONE = 3  # the fewest that say so where nothing else does
PRIOR_DEGREES = 4.0  # how many starts, or days, an allowance counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """How much the traffic of one trial moved its figure: the standard error of its logarithm, as its blocks show it.

    None where its blocks cannot say, such as of the p99 of fifty requests.
    """

    spread: float | None = 0.0
    degrees: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The mean of a run's trials, and its variance but for that of the day; None where the data set none."""

    mean: float
    trials: int
    each: Part | None  # the variance of one trial

    @property
    def part(self) -> Part | None:
        """The variance of the mean."""
        return None if self.each is None else self.each.times(1.0 / self.trials)


def level_of(values: Floats, luck: Sequence[Luck], *, restart_spread: float) -> Level:
    """The level of one run from the figure of each trial, one at least, in logarithms.

    From six trials on their variance is what they show [1]. Below, it is at least what the traffic within trials
    predicts together with the allowance for starts, `restart_spread`, which counts as four of them: two trials may be
    alike by chance. Without that prediction three trials or more speak for themselves, and fewer say nothing.
    """
    count = len(values)
    mean = float(values.mean())
    seen = Part(variance=float(values.var(ddof=1)), degrees=count - 1.0) if count > 1 else None
    if seen is not None and count >= TRIALS_FOR_WELCH:
        return Level(mean=mean, trials=count, each=seen)
    allowed = Part(variance=restart_spread**2, degrees=PRIOR_DEGREES)
    predicted = allowed
    known = [item for item in luck if item.spread is not None]
    if len(known) < count and count < _FEWEST_ALONE:
        return Level(mean=mean, trials=count, each=None)
    if len(known) == count:
        within = summed([Part(variance=(item.spread or 0.0) ** 2 / count, degrees=item.degrees) for item in known])
        predicted = summed([within, allowed])
    each = predicted if seen is None or predicted.variance >= seen.variance else seen
    return Level(mean=mean, trials=count, each=each)


def day_part(spread: float) -> Part:
    """The variance between days of one build: an allowance with this standard deviation, which counts as four days."""
    return Part(variance=spread**2, degrees=PRIOR_DEGREES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One run's level less another's, with its variance; None where the data set no limits."""

    effect: float
    part: Part | None

    @property
    def spread(self) -> float | None:
        """The standard error."""
        return None if self.part is None else math.sqrt(self.part.variance)

    def limits(self, alpha: float) -> tuple[float | None, float | None]:
        """One-sided limits at level `alpha` each."""
        if self.part is None:
            return None, None
        reach = float(t_quantile(1.0 - alpha, self.part.degrees)) * math.sqrt(self.part.variance)
        return self.effect - reach, self.effect + reach

    def p_above(self, bound: float) -> float | None:
        """The p-value of H0: the true difference is at most `bound`."""
        return self._p(self.effect - bound)

    def p_below(self, bound: float) -> float | None:
        """The p-value of H0: the true difference is at least `bound`."""
        return self._p(bound - self.effect)

    def _p(self, distance: float) -> float | None:
        if self.part is None:
            return None
        if self.part.variance <= 0:
            return 0.0 if distance > 0 else 1.0
        return float(t_sf(distance / math.sqrt(self.part.variance), self.part.degrees))


def difference(baseline: Level, candidate: Level, day: Part) -> Difference:
    """The candidate's level less the baseline's: Welch's t [1] with a variance more, that of the days of both [2]."""
    effect = candidate.mean - baseline.mean
    if baseline.part is None or candidate.part is None:
        return Difference(effect=effect, part=None)
    return Difference(effect=effect, part=summed([baseline.part, candidate.part, day.times(2.0)]))


def trials_needed(
    baseline: Level, candidate: Level, day: Part, *, bound: float, alpha: float, most: int = 64
) -> int | None:
    """How many trials each run would need so that a difference as seen lies surely below `bound`; None where no number
    up to `most` would do."""
    if baseline.each is None or candidate.each is None:
        return None
    for count in range(candidate.trials, most + 1):
        degrees = float(max(1, count - 1))
        one, two = (
            replace(level, trials=count, each=replace(level.each, degrees=max(degrees, level.each.degrees)))
            for level in (baseline, candidate)
            if level.each is not None
        )
        p_value = difference(one, two, day).p_below(bound)
        if p_value is not None and p_value <= alpha:
            return count
    return None
