"""Where a server's knee lies, and which of two servers has the higher one, from steps of load that were held or missed.

A step at a rate is held with probability Phi((log knee + start - drag - log rate) / spread), as a dose is survived in a
probit assay [6]. `spread` is of the knee from step to step; `start` is normal and shared by all steps of one start;
`drag` is what the queue of a missed step takes off the next. All three are nuisances: the likelihood of a knee is the
highest over a grid of them. The likelihood ratio [7] is held against F with as many degrees of freedom as there are
starts but one, fourteen at the least. `benchmarks/simulation/frontiers.py` shows the coverage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tailgate.analysis.arrays import Floats
from tailgate.analysis.statistics.distributions import t_sf

# In log rate. No server is taken to be steadier than 3 % from step to step.
_SPREADS = np.geomspace(0.03, 0.4, 7)
# Of starts: no two are taken to be more alike than 1 %, the allowance that the gates make for restarts.
_START_SPREADS = (0.01, 0.04, 0.12)
# By how much a step that was missed lowers what the next one of its start holds.
_DRAGS = (0.0, 0.07, 0.15)
# Of 120 simulated searches for four equal arms whose starts differ by 6 %, the worst kind, 2 said something false. With
# 20 degrees it was 4 of 40; with 10, none of 40.
_FEWEST_DEGREES = 14
_BEYOND = 2.5  # log rate past the lowest and the highest step
_KNEES = 801


def knee_grid(rates: Sequence[float]) -> Floats:
    """Return the log rates at which knees are weighed, for steps at these rates, one at least."""
    logs = np.log(np.asarray(rates, dtype=np.float64))
    return np.linspace(logs.min() - _BEYOND, logs.max() + _BEYOND, _KNEES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KneeProfile:
    """The log likelihood of each knee of a grid, the highest over the nuisances, and what it was made of."""

    grid: Floats
    likelihood: Floats
    held: int
    missed: int
    starts: int

    @property
    def degrees(self) -> float:
        """Of the F that likelihood ratios are held against: a start is what can be repeated."""
        return float(max(_FEWEST_DEGREES, self.starts - 1))

    @property
    def likeliest(self) -> float | None:
        """The likeliest knee, as a rate; the middle where several are. None where no step was held, or none missed."""
        if not self.held or not self.missed:
            return None
        return math.exp(float(np.mean(self.grid[self.likelihood >= self.likelihood.max() - 1e-9])))

    def interval(self, error: float) -> tuple[float | None, float | None]:
        """Return the knees, as rates, that the steps do not contradict at two-sided level `error`. None is an open
        end: both without any step, one with steps of one kind alone."""
        least = float(self.likelihood.max()) - 0.5 * float(special.fdtri(1, self.degrees, 1.0 - error))
        inside = np.flatnonzero(self.likelihood >= least)
        first, last = int(inside[0]), int(inside[-1])
        low = None if first == 0 or not self.held else self._crossing(first, first - 1, least)
        high = None if last == len(self.grid) - 1 or not self.missed else self._crossing(last, last + 1, least)
        return low, high

    def _crossing(self, inside: int, outside: int, least: float) -> float:
        """Return the rate between two neighbours of the grid at which the likelihood falls to `least`."""
        fall = float(self.likelihood[inside] - self.likelihood[outside])
        share = (float(self.likelihood[inside]) - least) / fall if math.isfinite(fall) else 1.0
        return math.exp(float(self.grid[inside] + share * (self.grid[outside] - self.grid[inside])))


def knee_profile(rates: Sequence[float], held: Sequence[bool], starts: Sequence[int], *, grid: Floats) -> KneeProfile:
    """Profile a server's knee from steps at `rates`, each of one of the `starts`; flat without steps.

    The rates of a start rise. Steps at one rate may contradict each other.
    """
    order = np.lexsort((rates, starts))
    steps = np.log(np.asarray(rates, dtype=np.float64))[order]
    kept = np.asarray(held, dtype=np.bool_)[order]
    start = np.asarray(starts, dtype=np.int64)[order]
    behind = np.zeros(len(steps))  # 1 for a step whose start missed the one before it
    behind[1:] = ~kept[:-1] & (start[1:] == start[:-1])
    profile = np.full(len(grid), -np.inf)
    for drag, spread in itertools.product(_DRAGS, _SPREADS):
        each = special.log_ndtr(np.where(kept, 1.0, -1.0) * (grid[:, None] - steps - drag * behind) / spread)
        by_start = [each[:, start == number].sum(axis=1) for number in np.unique(start)]
        for start_spread in _START_SPREADS:
            likelihoods = [_smoothed(row, start_spread, grid) for row in by_start]
            profile = np.maximum(profile, sum(likelihoods, np.zeros(len(grid))))
    return KneeProfile(
        grid=grid,
        likelihood=profile,
        held=int(kept.sum()),
        missed=int((~kept).sum()),
        starts=len(np.unique(start)),
    )


def _smoothed(likelihood: Floats, start_spread: float, grid: Floats) -> Floats:
    """Integrate the shift out of one start's log likelihood; the grid is even, and flat beyond its ends."""
    cell = float(grid[1] - grid[0])
    reach = math.ceil(4.0 * start_spread / cell)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) * cell / start_spread) ** 2)
    top = float(likelihood.max())
    padded = np.pad(np.exp(likelihood - top), reach, mode="edge")
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(np.convolve(padded, weights / weights.sum(), mode="valid")))


def p_not_higher(one: KneeProfile, other: KneeProfile) -> float:
    """Return the p-value of H0: knee of `one` ≤ knee of `other`, by the signed root of the likelihood ratio.

    Both are profiles over the same grid. 0.5 or more where `one` is not seen to be higher.
    """
    best = float(one.likelihood.max() + other.likelihood.max())
    # The best pair of knees that obeys H0: for each knee of `other`, the likeliest of `one` up to it.
    obeying = float((np.maximum.accumulate(one.likelihood) + other.likelihood).max())
    root = math.sqrt(max(0.0, 2.0 * (best - obeying)))
    return float(t_sf(root, min(one.degrees, other.degrees)))
