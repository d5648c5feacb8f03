"""Which policy to ship at which load, as ranges of load and as sentences.

What is said without "open" or "as seen" follows from a frontier, whose statements are all true at once but for a chance
of `alpha`. At a load that one replica of two arms holds, both need one replica, and the simpler start is preferred: the
control first, then whichever serves sooner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis.frontier.holdings import Frontier
from analysis.frontier.latencies import StepLatency, latency_at_one_load
from analysis.frontier.search import Left
from analysis.judging.gates import FAIL, PASS
from analysis.judging.load_steps import FEWEST_STARTS, Holding
from analysis.run.startup import Start
from analysis.wording import bytes_text, digits, listed

_FEWEST_S, _FEWEST_BYTES = 0.5, 2.0**24  # less than this is no cost worth a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRange:
    """Loads of one replica, in requests/s, above `low_rps` up to `high_rps` (None: all above).

    `pick` is the arm to ship there: of those that surely hold it and do not FAIL by their gates the one that starts
    soonest; None where there is none.
    """

    low_rps: float
    high_rps: float | None
    holds: tuple[str, ...]
    open: tuple[str, ...]
    pick: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs for a load, as seen with the ends of their interval; None where they are not known."""

    low: float | None = None
    seen: float | None = None
    high: float | None = None


def by_start(frontier: Frontier, starts: Mapping[str, Start]) -> list[str]:
    """The arms, the control first, then those that serve sooner; unknown starts come last."""
    control, *others = frontier.arms
    serving = {arm: starts[arm].serving_s if arm in starts else None for arm in others}

    def seconds(arm: str) -> float:
        known = serving[arm]
        return math.inf if known is None else known

    return [control, *sorted(others, key=seconds)]


def load_ranges(frontier: Frontier, starts: Mapping[str, Start], *, failed: Collection[str] = ()) -> list[LoadRange]:
    """All loads from nothing upwards, cut wherever what is known of an arm changes. No arm of `failed` is picked."""
    cuts = {end for item in frontier.holdings for end in (item.low_rps, item.high_rps) if end is not None}
    preferred = by_start(frontier, starts)
    ranges = []
    for low, high in itertools.pairwise([0.0, *sorted(cuts), None]):
        assert low is not None
        inside = math.nextafter(low, math.inf) if high is None else high
        known = {arm: frontier.of(arm).at(inside) for arm in preferred}
        holds = tuple(arm for arm in preferred if known[arm] == "holds")
        ranges.append(
            LoadRange(
                low_rps=low,
                high_rps=high,
                holds=holds,
                open=tuple(arm for arm in preferred if known[arm] == "open"),
                pick=next((arm for arm in holds if arm not in failed), None),
            )
        )
    return ranges


def answer(
    frontier: Frontier,
    *,
    objective: str,
    starts: Mapping[str, Start],
    verdicts: Mapping[str, str | None] | None = None,
    left: Sequence[Left] = (),
    dropped: Sequence[Left] = (),
    blocked: Mapping[str, Sequence[str]] | None = None,
    unproven: Mapping[str, str] | None = None,
    disturbed: Sequence[str] = (),
    latencies: Sequence[StepLatency] = (),
    label: str = "",
    load_rps: float | None = None,
    gpus_per_replica: int = 1,
) -> list[str]:
    """Return the answer, a sentence each: what to ship where, what it costs, what is open.

    `verdicts` are those of the gates. `left` are the arms that the search let go, `dropped` those that it never
    started, and `blocked` those whose steps are not used, with the checks that forbid it: nothing is claimed of the
    last two, nor of an arm that was let go after one start. `unproven` are the arms with other weights that are not
    shown to answer as well, each with why, and `disturbed` the checks by which machines were disturbed. `latencies`,
    called `label`, are those of each step; `load_rps` is the load that the rollout names.
    """
    unknown = blocked or {}
    out = {item.arm for item in left if frontier.of(item.arm).starts < FEWEST_STARTS}
    out |= {item.arm for item in dropped} | set(unknown)
    known = verdicts or {}
    others = [(arm, known.get(arm)) for arm in frontier.arms[1:]]
    return [
        *_loads(frontier, objective, out),
        *_at_the_limit(frontier, out, [arm for arm, verdict in others if verdict == FAIL]),
        *_at_the_load(frontier, load_rps, gpus_per_replica, out),
        *_at_one_load(frontier, latencies, label, out),
        *_costs(frontier, starts, out),
        *(
            f"{arm} is {verdict} by its gates, and nothing here changes that."
            for arm, verdict in others
            if verdict is not None and verdict != PASS
        ),
        *(f"{arm} is not shown to answer as well: {why}" for arm, why in (unproven or {}).items() if arm not in out),
        *(f"{item.arm} left the search early: it {item.reason}." for item in left),
        *(f"{item.arm} was not tried: {item.reason}." for item in dropped),
        *(f"Nothing is known of {arm}, for {', '.join(checks)}: see the checks." for arm, checks in unknown.items()),
        *_open(frontier, out),
        _surely(frontier.alpha, disturbed),
    ]


def _surely(alpha: float, disturbed: Sequence[str]) -> str:
    chance = f"true all at once, but for a chance of {digits(100.0 * alpha)} %"
    if not disturbed:
        return f"What is said of loads is {chance}."
    return (
        f"What is said of loads is of machines that were disturbed ({', '.join(disturbed)}: see the checks). Left "
        f"alone it would be {chance}."
    )


def _loads(frontier: Frontier, objective: str, out: Collection[str]) -> list[str]:
    control, *treatments = frontier.holdings
    floor = control.low_rps
    sentences = []
    if floor is not None:
        sentences.append(
            f"Up to {digits(floor)} requests/s a replica of {control.arm} holds {objective}: nothing is gained in "
            "load by compiling."
        )
    else:
        sentences.append(f"No load is known that {control.arm} surely holds.")
    further = sorted(
        ((item.low_rps, item.arm) for item in treatments if item.low_rps is not None and item.low_rps > (floor or 0.0)),
        key=lambda pair: -pair[0],
    )
    if further:
        (best_rps, best), *others = further
        start = "Up to" if floor is None else f"From {digits(floor)} to"
        more = "".join(f", {arm} to {digits(rps)}" for rps, arm in others)
        sentences.append(f"{start} {digits(best_rps)} {best} holds {'it' if floor is not None else objective}{more}.")
    elif names := " or ".join(item.arm for item in treatments if item.arm not in out):
        sentences.append(f"Beyond that nothing is shown to be held by {names}.")
    ends = [item.high_rps for item in frontier.holdings]
    known = [end for end in ends if end is not None]
    if len(known) == len(ends):
        sentences.append(f"Above {digits(max(known))} requests/s none does.")
    return sentences


def _at_the_limit(frontier: Frontier, out: Collection[str], failed: Collection[str]) -> list[str]:
    """What to ship where one replica is not enough, of the arms that were not let go unheard."""
    arms = [arm for arm in frontier.arms if arm not in out]
    if len(arms) < 2:
        return []
    among = [order for order in frontier.orders if order.more in arms and order.less in arms]
    beaten = {order.less for order in among if order.surely}
    rest = [arm for arm in arms if arm not in beaten]
    best = next((arm for arm in arms if all(frontier.surely_more(arm, other) for other in arms if other != arm)), None)
    if best is None:
        return [f"For more load than one replica holds it is open between {listed(rest)}."]
    others = [order for order in among if order.more == best]
    least = min((order.least for order in others if order.least is not None and order.least > 1.0), default=None)
    known = least is not None and all(order.least is not None and order.least > 1.0 for order in others)
    factor = f", {digits(least)} times or more" if least is not None and known else ""
    every = "every other arm that stayed in the search" if out else "every other arm"
    if best in failed:
        return [f"{best} surely holds more than {every}{factor}, and is {FAIL} by its gates: it is not one to ship."]
    return [f"For more load than one replica holds, {best}: it surely holds more than {every}{factor}."]


def _at_the_load(frontier: Frontier, load: float | None, each: int, out: Collection[str]) -> list[str]:
    """The GPUs of each arm for the load over all replicas that the rollout names."""
    if load is None:
        return []
    known = [(item.arm, gpus_for(item, load, each)) for item in frontier.holdings if item.arm not in out]
    texts = [f"{_gpus_text(gpus)} GPUs with {arm}" for arm, gpus in known if gpus != Gpus()]
    return [f"{digits(load)} requests/s over all replicas need {listed(texts)}."] if texts else []


def gpus_for(item: Holding, load: float, each: int) -> Gpus:
    """Return the GPUs for `load`, `each` of them a replica: the fewest where a replica holds as much as it may, the
    most where as little. Replicas are taken to add up."""

    def count(rps: float | None) -> float | None:
        return float(max(1, math.ceil(load / rps - 1e-9)) * each) if rps else None

    low, seen, high = item.low_rps, item.seen_rps, item.high_rps
    if low is None and high is None:
        return Gpus()  # one start decides nothing
    if seen is not None:  # steps that contradict each other may put it outside
        seen = min(max(seen, low or 0.0), high if high is not None else seen)
    return Gpus(low=count(high), seen=count(seen), high=count(low))


def _gpus_text(gpus: Gpus) -> str:
    """Such as "13 (10 to 23)"; what is not known is an en dash."""
    low, seen, high = ("–" if value is None else digits(value) for value in (gpus.low, gpus.seen, gpus.high))
    return seen if low == seen == high else f"{seen} ({low} to {high})"


def _at_one_load(frontier: Frontier, latencies: Sequence[StepLatency], label: str, out: Collection[str]) -> list[str]:
    """What requests wait at one load that the control was seen to hold."""
    control = frontier.holdings[0]
    if control.seen_rps is None or control.arm in out:
        return []
    arms = [arm for arm in frontier.arms if arm not in out]
    latency = latency_at_one_load(latencies, arms, control.seen_rps)
    if latency is None:
        return []
    fewest, most = min(latency.starts.values()), max(latency.starts.values())
    starts = f"{fewest} to {most} starts" if fewest < most else "one start" if most == 1 else f"{most} starts"
    each = listed([f"{digits(ms)} ms on {arm}" for arm, ms in latency.ms.items()])
    return [f"As seen at {digits(latency.rate)} requests/s ({starts} each), {label} is {each}."]


def _costs(frontier: Frontier, starts: Mapping[str, Start], out: Collection[str]) -> list[str]:
    control, *treatments = (arm for arm in frontier.arms if arm not in out)
    base = starts.get(control, Start())
    sentences = []
    for arm in treatments:
        own = starts.get(arm, Start())
        more = [
            f"{digits(own.serving_s - base.serving_s)} s of start"
            if own.serving_s is not None and base.serving_s is not None and own.serving_s - base.serving_s > _FEWEST_S
            else "",
            f"{bytes_text(own.memory_bytes - base.memory_bytes)}"
            if own.memory_bytes is not None
            and base.memory_bytes is not None
            and own.memory_bytes - base.memory_bytes > _FEWEST_BYTES
            else "",
        ]
        if any(more):
            sentences.append(f"{arm} costs {' and '.join(filter(None, more))} more than {control}.")
    return sentences


def _open(frontier: Frontier, out: Collection[str]) -> list[str]:
    """What is open: loads by arm, and pairs whose order is not known."""
    by_loads: dict[str, list[str]] = {}
    for item in frontier.holdings:
        if item.arm not in out:
            by_loads.setdefault(_open_loads(item), []).append(item.arm)
    among = [order for order in frontier.orders if not {order.more, order.less} & set(out)]
    pairs = [f"{order.more} against {order.less}" for order in among if not order.surely]
    ordered = [f"{order.more} above {order.less}" for order in among if order.surely]
    sentences = [f"Open: {'; '.join(f'{listed(arms)} {loads}' for loads, arms in by_loads.items())}."]
    if len(pairs) > 1 and len(pairs) == len(among):
        sentences.append("No two of these arms are ordered by what they hold.")
    elif len(pairs) > len(ordered):
        sentences.append(f"Of these arms only some are ordered by what they hold: {', '.join(ordered)}.")
    elif pairs:
        sentences.append(f"Not ordered by what they hold: {', '.join(pairs)}.")
    return sentences


def _open_loads(item: Holding) -> str:
    if item.steps and item.starts < 2:
        return "at every load (one start decides nothing)"
    low, high = item.low_rps, item.high_rps
    if item.thin:
        below = "every load" if high is None else f"loads below {digits(high)} requests/s"
        return f"at {below} (its steps had too few requests for the objective: make them longer)"
    if low is None and high is None:
        return "at every load (none of its steps could be judged)" if not item.steps else "at every load"
    if high is None:
        return f"above {digits(low or 0.0)} requests/s (no step was missed: search higher)"
    return f"below {digits(high)} requests/s" if low is None else f"from {digits(low)} to {digits(high)} requests/s"
