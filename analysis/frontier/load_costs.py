"""What each arm costs at a load over all replicas: GPUs, and GPU-seconds for a million tokens.

The intervals of a frontier are carried through, so that the ends of all arms' costs are true at once. Replicas are
taken to add up: two hold twice the load of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.frontier.holdings import Frontier, Holding

_LOADS = 13  # of a default table: octaves and their halves
_LARGEST = 64.0  # times what the best replica holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A value as seen with the limits of its interval; None where it is not known."""

    low: float | None = None
    seen: float | None = None
    high: float | None = None

    def each(self, change: Callable[[float], float | None]) -> Span:
        """`change` of what is known."""
        low, seen, high = (None if value is None else change(value) for value in (self.low, self.seen, self.high))
        return Span(low=low, seen=seen, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """One arm under `load_rps`. `surely_fewest`: no other arm may need as few GPUs."""

    arm: str
    load_rps: float
    gpus: Span
    token_gpu_s: Span  # for a million answered tokens
    surely_fewest: bool = False


def shown_loads(frontier: Frontier) -> list[float]:
    """Loads from half of one replica's up to a fleet's; none where no arm surely holds anything."""
    lows = [item.low_rps for item in frontier.holdings if item.low_rps is not None]
    if not lows:
        return []
    return [float(f"{load:.2g}") for load in np.geomspace(min(lows) / 2.0, max(lows) * _LARGEST, _LOADS)]


def load_costs(
    frontier: Frontier, loads: Sequence[float], *, gpus_per_replica: int, tokens: Mapping[str, float | None]
) -> list[LoadCost]:
    """A row for each load and arm. A request costs its share of the GPUs that carry the load, busy or not."""
    rows = []
    for load in loads:
        costs = [_load_cost(item, load, gpus_per_replica, tokens.get(item.arm)) for item in frontier.holdings]
        rows += [replace(cost, surely_fewest=_surely_fewest(cost, costs)) for cost in costs]
    return rows


def _load_cost(item: Holding, load: float, gpus_per_replica: int, tokens: float | None) -> LoadCost:
    """`tokens` are answered to a request on average; None where that is not known."""
    gpus = gpus_for(item, load, gpus_per_replica)
    token_gpu_s = gpus.each(lambda count: count * 1e6 / load / tokens) if tokens else Span()
    return LoadCost(arm=item.arm, load_rps=load, gpus=gpus, token_gpu_s=token_gpu_s)


def gpus_for(item: Holding, load: float, each: int) -> Span:
    """GPUs for `load`, `each` of them a replica: the fewest where a replica holds as much as it may, the most where as
    little."""
    held = Span(low=item.high_rps, seen=_inside(item.low_rps, item.seen_rps, item.high_rps), high=item.low_rps)
    return held.each(lambda rps: float(max(1, math.ceil(load / rps - 1e-9)) * each) if rps else None)


def _inside(low: float | None, seen: float | None, high: float | None) -> float | None:
    """What was seen, within the interval: steps that contradict each other may put it outside. None where nothing is
    sure at all: one start decides nothing."""
    if seen is None or (low is None and high is None):
        return None
    return min(max(seen, low or 0.0), high if high is not None else seen)


def _surely_fewest(cost: LoadCost, costs: Sequence[LoadCost]) -> bool:
    most = cost.gpus.high
    others = [other.gpus.low for other in costs if other.arm != cost.arm]
    return most is not None and bool(others) and all(least is not None and most < least for least in others)
