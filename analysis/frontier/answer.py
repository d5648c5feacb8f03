"""Which policy to ship at which load, as sentences.

What is said without "open" or "as seen" follows from a frontier, whose statements are all true at once but for a chance
of `alpha`.
"""

from __future__ import annotations

from collections.abc import Collection

from analysis.frontier.holdings import Frontier
from analysis.judging.gates import FAIL
from analysis.judging.load_steps import FEWEST_STARTS, Holding
from analysis.wording import digits, listed


def to_ship(frontier: Frontier, objective: str, *, out: Collection[str], failed: Collection[str]) -> list[str]:
    """Which arm holds which load, and what to ship where one replica is not enough, a sentence each.

    Nothing is claimed of the arms in `out`. Those in `failed` are not offered for any load.
    """
    control, *treatments = frontier.holdings
    floor = control.low_rps
    sentences = [f"No load is known that {control.arm} surely holds."]
    if floor is not None:
        sentences = [
            f"Up to {digits(floor)} requests/s a replica of {control.arm} holds {objective}: nothing is gained in "
            "load by compiling."
        ]
    offered = [item for item in treatments if item.arm not in failed]
    further = [(item.low_rps, item.arm) for item in offered if (item.low_rps or 0.0) > (floor or 0.0)]
    if further:
        (best_rps, best), *others = sorted(further, key=lambda pair: -(pair[0] or 0.0))
        start = "Up to" if floor is None else f"From {digits(floor)} to"
        more = "".join(f", {arm} to {digits(rps or 0.0)}" for rps, arm in others)
        what = objective if floor is None else "it"
        sentences.append(f"{start} {digits(best_rps or 0.0)} {best} holds {what}{more}.")
    elif names := " or ".join(item.arm for item in offered if item.arm not in out):
        sentences.append(f"Beyond that nothing is shown to be held by {names}.")
    ends = [item.high_rps for item in frontier.holdings]
    if None not in ends:
        sentences.append(f"Above {digits(max(end for end in ends if end is not None))} requests/s none does.")
    arms = [arm for arm in frontier.arms if arm not in out]
    if len(arms) < 2:
        return sentences
    best_arm = frontier.highest(out)
    if best_arm is None:
        rest = [arm for arm in arms if not any(frontier.surely_more(other, arm) for other in arms)]
        return [*sentences, f"For more load than one replica holds it is open between {listed(rest)}."]
    factors = [order.least or 0.0 for order in frontier.orders if order.more == best_arm and order.less in arms]
    factor = f", {digits(min(factors))} times or more" if min(factors) > 1.0 else ""
    every = "every other arm that stayed in the search" if out else "every other arm"
    if best_arm in failed:
        return [*sentences, f"{best_arm} surely holds more than {every}{factor}, and is {FAIL} by its gates."]
    return [*sentences, f"For more load than one replica holds, {best_arm}: it surely holds more than {every}{factor}."]


def still_open(frontier: Frontier, out: Collection[str]) -> list[str]:
    """The loads at which nothing is known of each arm, and which pairs are ordered where some are not."""
    loads: dict[str, list[str]] = {}
    for item in frontier.holdings:
        if item.arm not in out:
            loads.setdefault(_open_loads(item), []).append(item.arm)
    among = [order for order in frontier.orders if not {order.more, order.less} & set(out)]
    ordered = [f"{order.more} above {order.less}" for order in among if order.surely]
    known = f"Surely ordered by what they hold: {', '.join(ordered)}" if ordered else "No two arms are ordered"
    return [
        f"Open: {'; '.join(f'{listed(arms)} {text}' for text, arms in loads.items())}.",
        *([f"{known} ({len(ordered)} of {len(among)} pairs)."] if len(ordered) < len(among) else []),
    ]


def _open_loads(item: Holding) -> str:
    low, high = item.low_rps, item.high_rps
    if item.steps and item.starts < FEWEST_STARTS:
        return "at every load (one start decides nothing)"
    thin = " (its steps had too few requests for the objective: make them longer)" if item.thin else ""
    if low is None:
        return f"at every load{thin}" if high is None else f"below {digits(high)} requests/s{thin}"
    if high is None:
        return f"above {digits(low)} requests/s (no step was missed: search higher)"
    return f"from {digits(low)} to {digits(high)} requests/s"
