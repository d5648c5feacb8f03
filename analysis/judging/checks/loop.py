"""Whether starts wait for ends, as those of users do who ask again some time after they were answered.

Such a load thins out while a server stands still, which hides the stall. A schedule does not know what is in flight:
its starts may come in bursts or at a steady pace, but not the sooner the fewer requests are under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Ints
from analysis.statistics.distributions import normal_quantile

_MOST = 20_000  # gaps that are looked at
_BINS = 64
_SURE_Z = -4.0  # one schedule in 30,000
_LEVEL = 0.95
_STALL_S = 1.0
_KEPT_BY_A_SCHEDULE = 0.9  # a dependence that takes less of the rate than that hides nothing, however sure it is
_KEPT_IF_KNOWN = 0.8
_STEADY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How the rate of starts goes with the requests in flight, on one set of users."""

    z: float  # of no dependence; negative where starts come later the more is in flight; NaN where it cannot be seen
    kept: float  # at least so much of the rate would be kept in a stall of one second, at 95 %; 0 to 1

    @property
    def closed(self) -> bool:
        """Whether starts wait for ends, beyond doubt."""
        return self.z <= _SURE_Z and self.kept < _KEPT_BY_A_SCHEDULE

    @property
    def known(self) -> bool:
        """Whether it is known: users who wait would have shown if they hid much of a stall."""
        return self.closed or self.kept >= _KEPT_IF_KNOWN


UNKNOWN = Loop(z=math.nan, kept=0.0)
_PACED = Loop(z=0.0, kept=1.0)


def loop_of(start_ns: Ints, end_ns: Ints) -> Loop:
    """How the rate of starts depends on the requests in flight, from starts and ends (n,) of one set of requests.

    The score test of a proportional hazards model for the gap from one start to the next, with the number of requests
    in flight as a covariate that changes over the gap [Cox 1972]. Gaps may have any distribution, so that a steady
    pace shows no dependence; a rate that wanders makes it positive. Gaps are cut into at most 64 bins that hold about
    as many starts each, and what is in flight is counted at the begin of a bin. Starts at a steady pace, whatever the
    answers took, are a schedule. UNKNOWN of fewer than two gaps.

    Looks like a closed loop: a schedule that avoids its own last start, as one start anywhere in each slot
    of time does.
    """
    starts, ends = np.sort(start_ns), np.sort(end_ns)
    gaps = np.diff(starts)
    if gaps.size < 2:
        return UNKNOWN
    pace, took = _spread_ns(gaps), _spread_ns(end_ns - start_ns)
    if pace < _STEADY * float(np.median(gaps)) and took > pace / _STEADY:
        return _PACED
    chosen = np.arange(gaps.size) if gaps.size <= _MOST else np.linspace(0, gaps.size - 1, _MOST).astype(np.int64)
    gaps = gaps[chosen]
    order = np.argsort(gaps, kind="stable")
    chosen, gaps = chosen[order], gaps[order]
    edges = np.unique(np.append(0, np.quantile(gaps, np.linspace(0, 1, _BINS + 1)[1:-1], method="nearest")))
    score = information = 0.0
    for low, high in zip(edges, np.append(edges[1:], np.iinfo(np.int64).max), strict=True):
        first, until = np.searchsorted(gaps, [low, high])
        at_risk, over = chosen[first:], int(until - first)
        if over == 0 or at_risk.size < 2:
            continue
        # What began with this gap counts from its begin on; an end at the very instant has ended.
        in_flight = at_risk + 1 - np.searchsorted(ends, starts[at_risk] + low, side="right")
        score += float(in_flight[:over].sum() - over * in_flight.mean())
        information += over * (at_risk.size - over) / (at_risk.size - 1) * float(in_flight.var())
    if information <= 0.0:
        return UNKNOWN
    slope = (score - float(normal_quantile(_LEVEL)) * math.sqrt(information)) / information
    rate = 1e9 / max(float(gaps.mean()), 1.0)
    return Loop(z=score / math.sqrt(information), kept=math.exp(min(0.0, max(-700.0, slope * rate * _STALL_S))))


def _spread_ns(times: Ints) -> float:
    """From the first to the last tenth."""
    low, high = np.quantile(times, [0.1, 0.9], method="linear")
    return float(high - low)
