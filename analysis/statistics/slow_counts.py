"""How many requests of two arms are slow, group by group, were one arm faster by a factor: counts, scores and bets.

A request is slow that exceeds the quantile of its group, of both arms together. Requests of a group are sorted once;
then each factor costs a few binary searches, in all groups at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.statistics.distributions import log_choose

# Log odds ratios of being slow.
_ODDS = np.array([0.15, 0.3, 0.6, 1.0, 1.6, 2.4])
_CACHED = 1 << 17  # tables of counts that are bet on
_SMALLEST_MS = 1e-3  # less is measurement noise, and 0 has no logarithm


@dataclass(frozen=True, slots=True)
class SortedGroups:
    """The log latencies of one arm, (requests,), sorted within each group; group g has `sizes[g]` from `starts[g]`."""

    values: Floats
    starts: Ints
    sizes: Ints

    @classmethod
    def of(cls, ms: Floats, group: Ints, groups: int) -> SortedGroups:
        """Sort the logarithms of latencies in ms by the group of each, from 0."""
        group = group.astype(np.int16 if groups < 2**15 else np.int64)  # short integers sort by radix
        order = np.argsort(group, kind="stable")
        logs = np.log(np.maximum(ms[order], _SMALLEST_MS), dtype=np.float64)
        return cls._sorted(logs, np.bincount(group, minlength=groups))

    def joined(self, into: Ints, groups: int) -> SortedGroups:
        """Join groups by the ascending number, from 0, of what each becomes part of, (groups,); -1 leaves one out."""
        if len(self) == groups and (into >= 0).all():
            return self
        sizes = np.bincount(into + 1, self.sizes, groups + 1)[1:].astype(np.int64)
        return self._sorted(self.values[np.repeat(into >= 0, self.sizes)], sizes)

    @classmethod
    def _sorted(cls, values: Floats, sizes: Ints) -> SortedGroups:
        made = cls(values, np.cumsum(sizes) - sizes, sizes)
        for part in made.parts():
            part.sort()
        return made

    def __len__(self) -> int:
        return len(self.starts)

    def parts(self) -> list[Floats]:
        """Return the values of each group, as views."""
        return np.split(self.values, self.starts[1:]) if len(self) else []

    def means(self) -> Floats:
        """Return the mean log latency of each group, (groups,)."""
        return np.add.reduceat(self.values, self.starts) / self.sizes


@dataclass(frozen=True, slots=True)
class SlowCounts:
    """The slow requests of the treatment and of the control, (..., groups), and all requests of each, (groups,)."""

    treatment: Ints
    control: Ints
    own: Ints
    other: Ints

    def at(self, place: int) -> SlowCounts:
        """Select the counts of one of the ratios."""
        return SlowCounts(self.treatment[place], self.control[place], self.own, self.other)

    def by_arm(self) -> Floats:
        """Return how much more often the treatment is slow, in standard errors of independent requests.

        If one arm has more requests, each counts as much less. Shape (..., groups).
        """
        half = (self.own + self.other) / 2.0
        excess = self.treatment * half / self.own - self.control * half / self.other
        return np.asarray(excess / np.sqrt(np.maximum(1, self.treatment + self.control)))

    def by_request(self) -> Floats:
        """Return the excess of the treatment's share of the slow requests over its share of all, in standard deviations
        of requests exchanged between the arms at random. Shape (..., groups)."""
        slow, total = self.treatment + self.control, self.own + self.other
        mean = slow * self.own / total
        variance = mean * (1.0 - self.own / total) * (total - slow) / np.maximum(1, total - 1)
        return np.asarray(np.where(variance > 0, (self.treatment - mean) / np.sqrt(np.maximum(variance, 1e-300)), 0.0))

    def bets(self) -> tuple[Floats, Floats]:
        """Return logarithms of e-values that the treatment is slow more often, and less often, than by exchange.

        Shape (odds, groups) each, for counts of shape (groups,).
        """
        columns = (self.treatment, self.treatment + self.control, self.own, self.own + self.other)
        both = np.array([_bets(*map(int, table)) for table in zip(*columns, strict=True)])
        return both[:, 0].T, both[:, 1].T


def slow_counts(treatment: SortedGroups, control: SortedGroups, less: Floats, place: Ints) -> SlowCounts:
    """Count in each group the values beyond the one at its `place`, the treatment's log latencies less `less`.

    `place` counts from 1 over both arms, (groups,); `less` is (..., groups). No group of either arm is empty.
    """
    less = np.broadcast_to(less, np.broadcast_shapes(np.shape(less), (len(treatment),)))
    # The `place` fastest of a group are so many of the treatment, and the rest of the control.
    low = np.broadcast_to(np.maximum(0, place - control.sizes), less.shape)
    high = np.broadcast_to(np.minimum(treatment.sizes, place), low.shape)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        mine = _at(treatment, middle) - less
        more = open_ & (mine < _at(control, place - middle - 1))
        low, high = np.where(more, middle + 1, low), np.where(open_ & ~more, middle, high)
    fast = np.where(low > 0, _at(treatment, low - 1) - less, -math.inf)
    bound = np.maximum(fast, np.where(low < place, _at(control, place - low - 1), -math.inf))
    return SlowCounts(
        treatment=_above(treatment, bound, low, less=less),
        control=_above(control, bound, place - low),
        own=treatment.sizes,
        other=control.sizes,
    )


def _at(groups: SortedGroups, place: Ints) -> Floats:
    """Return the value at each place of its group, (..., groups); an arbitrary one for a place outside."""
    return np.asarray(groups.values.take(groups.starts + place, mode="clip"))


def _above(groups: SortedGroups, bound: Floats, low: Ints, *, less: Floats | float = 0.0) -> Ints:
    """Count the values of each group, less `less`, that exceed its bound, (..., groups). The first `low` do not."""
    # Only ties with the bound are left to count.
    high = np.where(_at(groups, low) - less > bound, low, groups.sizes)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        within = open_ & (_at(groups, middle) - less <= bound)
        low, high = np.where(within, middle + 1, low), np.where(open_ & ~within, middle, high)
    return np.asarray(groups.sizes - low)


@lru_cache(maxsize=_CACHED)
def _bets(above: int, slow: int, own: int, total: int) -> Floats:
    """Return log(w^k / E[w^k]) of each log odds ratio and of its negative, (2, odds).

    k = `above` of `slow` requests are of the treatment, which has `own` of `total`: k is hypergeometric.
    """
    counts = np.arange(max(0, slow + own - total), min(slow, own) + 1)
    chances = log_choose(own, counts) + log_choose(total - own, slow - counts) - log_choose(total, slow)
    odds = np.array([_ODDS, -_ODDS])
    return np.asarray(odds * above - logsumexp(chances + odds[..., None] * counts, axis=-1))
