"""How many GPUs each arm needs at a load over all replicas.

The intervals of a frontier are carried through, so that the ends of all arms' numbers are true at once. Replicas are
taken to add up: two hold twice the load of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.frontier.holdings import Frontier
from analysis.judging.load_steps import Holding

_LOADS = 13  # of a default table: octaves and their halves
_LARGEST = 64.0  # times what the best replica holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A value as seen with the limits of its interval; None where it is not known."""

    low: float | None = None
    seen: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """One arm under `load_rps`. `surely_fewest`: no other arm may need as few GPUs."""

    arm: str
    load_rps: float
    gpus: Span
    surely_fewest: bool = False


def shown_loads(frontier: Frontier) -> list[float]:
    """Loads from half of one replica's up to a fleet's; none where no arm surely holds anything."""
    lows = [item.low_rps for item in frontier.holdings if item.low_rps is not None]
    if not lows:
        return []
    return [float(f"{load:.2g}") for load in np.geomspace(min(lows) / 2.0, max(lows) * _LARGEST, _LOADS)]


def load_costs(frontier: Frontier, loads: Sequence[float], *, gpus_per_replica: int) -> list[LoadCost]:
    """Return a row for each load and arm."""
    rows = []
    for load in loads:
        gpus = {item.arm: gpus_for(item, load, gpus_per_replica) for item in frontier.holdings}
        for arm, own in gpus.items():
            others = [other.low for name, other in gpus.items() if name != arm]
            fewest = own.high is not None and all(least is not None and own.high < least for least in others)
            rows.append(LoadCost(arm=arm, load_rps=load, gpus=own, surely_fewest=fewest and bool(others)))
    return rows


def gpus_for(item: Holding, load: float, each: int) -> Span:
    """Return the GPUs for `load`, `each` of them a replica: the fewest where a replica holds as much as it may, the
    most where as little."""

    def count(rps: float | None) -> float | None:
        return float(max(1, math.ceil(load / rps - 1e-9)) * each) if rps else None

    seen = _inside(item.low_rps, item.seen_rps, item.high_rps)
    return Span(low=count(item.high_rps), seen=count(seen), high=count(item.low_rps))


def _inside(low: float | None, seen: float | None, high: float | None) -> float | None:
    """What was seen, within the interval: steps that contradict each other may put it outside. None where nothing is
    sure at all: one start decides nothing."""
    if seen is None or (low is None and high is None):
        return None
    return min(max(seen, low or 0.0), high if high is not None else seen)
