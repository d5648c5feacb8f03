"""The tail of a typical block: whether an arm exceeds each window's own quantile more often than the control does.

With the treatment's latencies divided by a ratio, the exceedances of the two arms balance when that is the ratio of
their tails in a typical window (docs/explanation/method.md, "Comparing arms"). The standard error is that of groups of
windows [1], each by how much it moved the ratio that was fitted to it (HC3 [15]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tailgate.analysis.arrays import Floats, Ints
from tailgate.analysis.statistics.dependence import Dependence
from tailgate.analysis.statistics.distributions import t_quantile, t_sf
from tailgate.analysis.statistics.machines import Part
from tailgate.analysis.statistics.slow_counts import SortedGroups, slow_counts

FARTHEST = math.log(1000.0)  # a limit beyond this ratio is no limit
ENOUGH = 2.0  # requests of both arms beyond a window's quantile, where its group has as many
_FEWEST = 1.0  # fewer in a whole group, and it is the quantile of another tail
_SPAN = math.log(1.1)  # over which the slope of the exceedances is taken: counts are too coarse for less
_MOST_LEVERAGE = 0.75
_FINEST = 1e-3  # in log ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The result of a test on the log ratio, `ratio` as seen.

    `low` and `high` are one-sided limits, None where the data set none. The p-values are of
    H0: log ratio >= bound and <= bound. `spread` is the standard error.
    """

    ratio: float
    low: float | None
    high: float | None
    p_noninferior: float
    p_inferior: float
    spread: float


def student_limits(effect: float, part: Part, *, bound: float, alpha: float) -> Limits:
    """Return Student's t limits around a log ratio whose estimate has the variance `part`."""
    error = math.sqrt(part.variance)
    reach = float(t_quantile(1.0 - alpha, part.degrees)) * error
    return Limits(
        ratio=effect,
        low=effect - reach,
        high=effect + reach,
        p_noninferior=_p_positive(bound - effect, error, part.degrees),
        p_inferior=_p_positive(effect - bound, error, part.degrees),
        spread=error,
    )


def _p_positive(distance: float, error: float, degrees: float) -> float:
    """Return the p-value of H0: the true distance is 0 or less."""
    if error <= 0:
        return 0.0 if distance > 0 else 1.0
    return float(t_sf(distance / error, degrees))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The log latencies of both arms by window. `group` numbers the group of each window from 0, rising. Ratios are
    tried in steps of `width`."""

    treatment: SortedGroups
    control: SortedGroups
    group: Ints
    q: float
    width: float

    @classmethod
    def of(
        cls, treatment: SortedGroups, control: SortedGroups, group: Ints, *, q: float, bound: float = 0.0
    ) -> Windows | None:
        """Join blocks within their group until a window holds enough of the tail; None if groups hold too little.

        A block that holds enough is a window of its own, and a group that does not is one window. `group` is that of
        each block. A log ratio of `bound` is a whole number of steps, so that a margin is tested where it lies.
        """
        if tail_of_group(treatment, control, group, q) < _FEWEST - 1e-9:
            return None
        sizes = np.bincount(group)
        joined = min(math.ceil(ENOUGH / _beyond(treatment, control, group, q) - 1e-9), int(np.median(sizes)))  # blocks
        window, first = np.empty(len(group), dtype=np.int64), 0
        for number, size in enumerate(sizes):
            count = max(1, round(size / joined))
            window[group == number] = first + np.arange(size) * count // size
            first += count
        one, other = (blocks.joined(window, first) for blocks in (treatment, control))
        width = bound / math.ceil(bound / _FINEST) if bound > 0 else _FINEST
        starts = np.flatnonzero(np.diff(window, prepend=-1))
        return cls(treatment=one, control=other, group=group[starts], q=q, width=width)

    @property
    def groups(self) -> int:
        return int(self.group[-1]) + 1

    def excess(self, shift: int | Ints) -> Floats:
        """Return how much more often the treatment, divided by exp(shift × width), exceeds each window's quantile.

        Shape (windows,), as that of several shifts; both arms and all windows weigh the same.
        """
        place = np.ceil(self.q * (self.treatment.sizes + self.control.sizes) - 1e-6).astype(np.int64)
        counts = slow_counts(self.treatment, self.control, np.asarray(shift * self.width), place)
        more = counts.treatment / counts.own - counts.control / counts.other
        return np.asarray(more * float((counts.own + counts.other).mean()) / 2.0)


def _beyond(treatment: SortedGroups, control: SortedGroups, group: Ints, q: float) -> float:
    """Return how many requests of both arms lie beyond the quantile in a block, on average."""
    return (len(treatment.values) + len(control.values)) / len(group) * (1.0 - q)


def tail_of_group(treatment: SortedGroups, control: SortedGroups, group: Ints, q: float) -> float:
    """Return how many requests of both arms lie beyond the quantile in a group of median size."""
    return _beyond(treatment, control, group, q) * int(np.median(np.bincount(group)))


def balanced_ratios(windows: Windows, group: Ints) -> Floats:
    """Return the log ratio at which the exceedances of each group of windows balance. Shape (groups,)."""
    first, last = _balance(windows, group)
    return np.asarray((first + last) / 2.0 * windows.width)


def window_limits(windows: Windows, *, bound: float, alpha: float, dependence: Dependence) -> Limits | None:
    """Return limits of the log ratio of a typical window's tail, and the p-values at `bound`; None if nothing varies.

    Student's t with groups − 1 degrees of freedom over the exceedances of groups. Two errors add up: that of counts,
    and how far `dependence` may have moved the ratio itself. Once all of the tail is on one side, counts say no more.
    """
    width, groups = windows.width, windows.groups

    def sums(shift: int) -> Floats:
        counts = np.bincount(windows.group, weights=windows.excess(shift), minlength=groups)
        return np.asarray(counts, dtype=np.float64)

    first, last = (int(shifts[0]) for shifts in _balance(windows, np.zeros_like(windows.group)))
    centre = (first + last) / 2.0
    fitted, span = round(centre), max(1, round(_SPAN / width))
    slopes = np.maximum(sums(fitted - span) - sums(fitted + span), 0.0)
    if not slopes.sum() > 0:
        return None
    leverage = np.minimum(slopes / slopes.sum(), _MOST_LEVERAGE)
    # Half of the requests that could tell the arms apart, each a fair coin: no fewer are at stake.
    coins = float(np.abs(windows.excess(fitted)).sum()) / 2.0
    error = math.sqrt(max(float(((sums(fitted) / (1.0 - leverage)) ** 2).sum()), coins, 0.5))
    per_shift = float(slopes.sum()) / (2.0 * span)
    # Few requests balance over a whole stretch of ratios, and cannot separate them.
    error = max(error, (last - first) / 2.0 * per_shift)
    spread = error / per_shift * width
    widening = dependence.widening(spread, groups=groups, alpha=alpha)
    moved = spread / width * math.sqrt(max(0.0, widening**2 - 1.0))  # shifts, one standard error

    def distance(shift: int) -> float:
        """Return how many standard errors the exceedances are above balance."""
        excess = float(windows.excess(shift).sum())
        slope = abs(excess) / max(0.5, abs(shift - centre))
        return excess / math.hypot(error, slope * moved)

    reach = float(t_quantile(1.0 - alpha, groups - 1))

    def limit(direction: int) -> float | None:
        """Return the first shift from the fit outwards that the test rejects; None without one."""
        inner, outer = 0, round(FARTHEST / width)
        if -direction * distance(fitted + direction * outer) < reach:
            return None
        while outer - inner > 1:
            middle = (inner + outer) // 2
            kept = -direction * distance(fitted + direction * middle) < reach
            inner, outer = (middle, outer) if kept else (inner, middle)
        return (centre + direction * outer) * width

    at_bound, low, high = distance(round(bound / width)), limit(-1), limit(1)
    # Shifts are whole bins: where a limit lies within one of the bound, the p-value says on which side.
    if high is not None:
        high = min(high, bound) if at_bound <= -reach else max(high, bound) if high > bound - width else high
    if low is not None:
        low = max(low, bound) if at_bound >= reach else min(low, bound) if low < bound + width else low
    return Limits(
        ratio=centre * width,
        low=low,
        high=high,
        p_noninferior=float(t_sf(-at_bound, groups - 1)),
        p_inferior=float(t_sf(at_bound, groups - 1)),
        spread=math.hypot(spread, math.sqrt(dependence.drift)),
    )


def _balance(windows: Windows, group: Ints) -> tuple[Ints, Ints]:
    """Return each group's first shift of balanced exceedances, and the first with fewer.

    By bisection of all groups at once. `group` numbers that of each window from 0. Shape (groups,) each.
    """
    farthest, groups = round(FARTHEST / windows.width), int(group[-1]) + 1
    low, high = np.full((2, groups), -farthest), np.full((2, groups), farthest)
    most = np.array([[1e-6], [-1e-6]])
    while (open_ := (high - low > 1).any(axis=1, keepdims=True)).any():
        middle = (low + high) // 2
        sums = [np.bincount(group, excess, groups) for excess in windows.excess(middle[:, group])]
        fewer = np.array(sums) <= most
        low, high = np.where(open_ & ~fewer, middle, low), np.where(open_ & fewer, middle, high)
    return high[0], high[1]
