"""Which load each arm surely holds, and which of any two arms holds more: all statements right together.

Any statement is wrong with a chance of at most `alpha`, over all arms, pairs and loads. Half of it is for the arms: an
interval of each knee, two-sided at alpha / 2 over the number of arms (Bonferroni). Loads cost nothing more, since an
interval that holds the knee makes every "holds this load" below it and every "does not" above it true. The other half
is for the pairs: the likelihood ratio that one knee is no higher than another's, both ways for each pair, by Holm.
Intervals that do not meet order their arms as well, at no cost. `benchmarks/simulation/frontiers.py` shows the error.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tailgate.analysis.judging.load_steps import FEWEST_STARTS, Holding, Step, holding_of, profiles_of
from tailgate.analysis.statistics.compare import holm
from tailgate.analysis.statistics.knees import p_not_higher


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Two arms, the one first that is seen to hold more.

    `least` is by which factor it holds more at the least, from the far ends of both intervals; None where one is open.
    """

    more: str
    less: str
    surely: bool
    least: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What every arm holds, the control first, and every pair of them in order; `alpha` is the error of it all."""

    holdings: tuple[Holding, ...]
    orders: tuple[Order, ...]
    alpha: float

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, the control first."""
        return tuple(item.arm for item in self.holdings)

    def of(self, arm: str) -> Holding:
        """Return the arm's holding."""
        return next(item for item in self.holdings if item.arm == arm)

    def surely_more(self, one: str, other: str) -> bool:
        """Return whether `one` surely holds more than `other`."""
        return any(order.surely and (order.more, order.less) == (one, other) for order in self.orders)

    def highest(self, without: Collection[str] = ()) -> str | None:
        """Return the arm that surely holds more than every other except `without`; None while that is open."""
        arms = [arm for arm in self.arms if arm not in without]
        found = (arm for arm in arms if all(self.surely_more(arm, other) for other in arms if other != arm))
        return next(found, None) if len(arms) > 1 else None


def frontier_of(steps: Sequence[Step], arms: Sequence[str], *, alpha: float = 0.05) -> Frontier:
    """Return the frontier after the steps; `arms` are all arms of the search, the control first.

    Arms without a judged step, or with one start, are open everywhere, and still count in the error of the others.
    """
    profiles = profiles_of(steps)
    error = alpha / 2.0 / len(arms)
    by_arm = {arm: holding_of(arm, steps, profiles.get(arm), error=error) for arm in arms}
    pairs = list(itertools.permutations(arms, 2))
    tested = [min(by_arm[arm].starts for arm in pair) >= FEWEST_STARTS for pair in pairs]
    p_values = [
        p_not_higher(profiles[one], profiles[other]) if known else 1.0
        for (one, other), known in zip(pairs, tested, strict=True)
    ]
    adjusted = dict(zip(pairs, holm(p_values), strict=True))
    raw = dict(zip(pairs, p_values, strict=True))
    orders = []
    for one, other in itertools.combinations(arms, 2):
        more, less = (one, other) if raw[one, other] <= raw[other, one] else (other, one)
        low, high = by_arm[more].low_rps, by_arm[less].high_rps
        least = low / high if low is not None and high is not None else None
        # The pairs have half of the error; two intervals that do not meet have paid for theirs.
        surely = adjusted[more, less] <= alpha / 2.0 or (least is not None and least >= 1.0)
        orders.append(Order(more=more, less=less, surely=surely, least=least))
    return Frontier(holdings=tuple(by_arm.values()), orders=tuple(orders), alpha=alpha)
