"""What each arm costs at a load over all replicas: GPUs, and GPU-seconds and money for a million tokens.

The intervals of a frontier are carried through, so that the ends of all arms' costs are true at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.foresight.costs import Span, gpus_for
from analysis.frontier.holdings import Frontier
from analysis.settings.rollout import Rollout

_LOADS = 13  # of a default table: octaves and their halves
_LARGEST = 64.0  # times what the best replica holds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """One arm under `load_rps`. `surely_fewest`: no other arm may need as few GPUs."""

    arm: str
    load_rps: float
    gpus: Span
    token_gpu_s: Span  # for a million answered tokens
    token_price: Span
    surely_fewest: bool = False


def shown_loads(frontier: Frontier, rollout: Rollout) -> list[float]:
    """The rollout's load alone where it names one; else loads from half of one replica's up to a fleet's.

    Empty where no arm surely holds anything.
    """
    if rollout.load_rps is not None:
        return [rollout.load_rps]
    lows = [item.low_rps for item in frontier.holdings if item.low_rps is not None]
    if not lows:
        return []
    return [float(f"{load:.2g}") for load in np.geomspace(min(lows) / 2.0, max(lows) * _LARGEST, _LOADS)]


def load_costs(
    frontier: Frontier, loads: Sequence[float], *, rollout: Rollout, tokens: Mapping[str, float | None]
) -> list[LoadCost]:
    """A row for each load and arm. A request costs its share of the GPUs that carry the load, busy or not."""
    rows = []
    for load in loads:
        at_load = replace(rollout, load_rps=load)
        costs = []
        for item in frontier.holdings:
            held = Span(low=item.low_rps, seen=_inside(item.low_rps, item.seen_rps, item.high_rps), high=item.high_rps)
            gpus = gpus_for(held, at_load)
            each = tokens.get(item.arm)
            token_gpu_s = Span() if not each else _scaled(gpus, 1e6 / load / each)
            price = token_gpu_s.each(rollout.price_of)
            costs.append(LoadCost(arm=item.arm, load_rps=load, gpus=gpus, token_gpu_s=token_gpu_s, token_price=price))
        rows += [replace(cost, surely_fewest=_surely_fewest(cost, costs)) for cost in costs]
    return rows


def _inside(low: float | None, seen: float | None, high: float | None) -> float | None:
    """What was seen, within the interval: steps that contradict each other may put it outside. None where nothing is
    sure at all: one start decides nothing."""
    if seen is None or (low is None and high is None):
        return None
    return min(max(seen, low or 0.0), high if high is not None else seen)


def _scaled(span: Span, factor: float) -> Span:
    return span.each(lambda value: value * factor)


def _surely_fewest(cost: LoadCost, costs: Sequence[LoadCost]) -> bool:
    most = cost.gpus.high
    others = [other.gpus.low for other in costs if other.arm != cost.arm]
    return most is not None and bool(others) and all(least is not None and most < least for least in others)
