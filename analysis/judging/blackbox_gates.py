"""The gates on compiles of an arm that shows none of them: judged by what its stalls look like from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from analysis.blackbox.stalls import COMPILE, HOST, PART, UNKNOWN, Stall
from analysis.blackbox.view import Outside
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.settings.gate_limits import CompileBudget

# What a gate on the number of compiles must be able to see; one from a disk cache takes as long.
SHORTEST_COMPILE_S = 1.0
# An unexplained stall shorter than this is taken for a collection or a hiccup, not for a compile.
SHORTEST_OPEN_S = 0.5
_FEWEST_REQUESTS = 50
_SLOW_P, _SLOW_MS = 0.001, 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a set of stalls comes to."""

    stalls: int
    most_in_a_trial: int
    longest_s: float
    s_per_min: float
    requests_hit: int
    hit_pct: float

    @classmethod
    def of(cls, stalls: Sequence[Stall], *, requests: int, minutes: float) -> Tally:
        """The tally over `minutes` of all replicas together, in which `requests` were sent."""
        trials = [stall.trial for stall in stalls]
        hit = int(np.unique(np.concatenate([stall.requests for stall in stalls])).size) if stalls else 0
        return cls(
            stalls=len(stalls),
            most_in_a_trial=max((trials.count(trial) for trial in set(trials)), default=0),
            longest_s=max((stall.seconds for stall in stalls), default=0.0),
            s_per_min=sum(stall.seconds for stall in stalls) / minutes if minutes > 0 else 0.0,
            requests_hit=hit,
            hit_pct=100.0 * min(hit, requests) / requests if requests else 0.0,
        )


def open_stalls(outside: Outside) -> list[Stall]:
    """Stalls of the arm alone that may have been compiles: of unknown cause and not too short for one, or of some of
    its requests."""
    unknown = [stall for stall in outside.of_cause(UNKNOWN) if stall.seconds >= SHORTEST_OPEN_S or stall.trigger >= 0]
    return unknown + outside.of_cause(PART)


def outside_gates(
    outside: Outside,
    budget: CompileBudget,
    *,
    requests: int,
    minutes: float,
    part: str = "",
    cold_ns: Mapping[int, int] = MappingProxyType({}),
) -> list[Gate]:
    """The four gates on compiles while serving, without telemetry.

    FAIL where stalls that are compiles, on the evidence of first-seen shapes, go beyond the limit. PASS where the arm
    could be watched closely enough and neither they nor unexplained stalls do. INCONCLUSIVE else, with the reason.
    `part` "cold" or "steady" takes the stalls that began before or after `cold_ns` of their trial.
    """

    def within(stall: Stall) -> bool:
        return not part or (stall.start_ns < cold_ns.get(stall.trial, 0)) is (part == "cold")

    sure = [stall for stall in outside.of_cause(COMPILE) if within(stall)]
    maybe = [stall for stall in open_stalls(outside) if within(stall)]
    found = Tally.of(sure, requests=requests, minutes=minutes)
    most = Tally.of([*sure, *maybe], requests=requests, minutes=minutes)
    rows = (
        ("recompiles", "count", budget.max_recompiles, SHORTEST_COMPILE_S, found.most_in_a_trial, most.most_in_a_trial),
        ("longest stall", "s", budget.max_stall_s, budget.max_stall_s, found.longest_s, most.longest_s),
        ("stall per minute", "s", budget.max_stall_s_per_min, SHORTEST_COMPILE_S, found.s_per_min, most.s_per_min),
        ("requests hit", "pct", budget.max_requests_hit_pct, SHORTEST_COMPILE_S, found.hit_pct, most.hit_pct),
    )
    gates = []
    for name, unit, limit, visible_s, value, upper in rows:
        verdict, reason = _judged(
            outside, found, maybe, requests=requests, visible_s=visible_s, over=value > limit, open_=upper > limit
        )
        shown = {"count": f"{value:.0f}", "pct": f"{value:.3g} %"}.get(unit, f"{value:.2g} s")
        bound = {"count": f"{limit:.0f}", "pct": f"{limit:g} %"}.get(unit, f"{limit:g} s")
        decided = verdict != INCONCLUSIVE
        gates.append(
            Gate(
                arm=outside.arm,
                gate=f"cold {name}" if part == "cold" else name,
                kind="recompile",
                value=float(value) if decided else None,
                limit=float(limit),
                unit=unit,
                verdict=verdict,
                reason=f"Seen from outside: {reason}" + (f" {_NAMES[name]} {shown}, limit {bound}." if decided else ""),
                unseen=not decided,
            )
        )
    return gates


_NAMES = {
    "recompiles": "Compiles while serving, the most in one trial:",
    "longest stall": "The longest:",
    "stall per minute": "Of each minute they took",
    "requests hit": "Requests in flight in them:",
}


def _judged(
    outside: Outside,
    found: Tally,
    maybe: Sequence[Stall],
    *,
    requests: int,
    visible_s: float,
    over: bool,
    open_: bool,
) -> tuple[str, str]:
    """(verdict, what it rests on)."""
    visible = outside.detectable_s
    if over:
        return FAIL, (
            f"{_count(found.stalls, 'stall')} of {outside.arm} alone began with a prompt length that it had not met, "
            f"more often than chance explains ({_p(outside.p_value)})."
        )
    if requests < _FEWEST_REQUESTS:
        return INCONCLUSIVE, f"{_count(requests, 'request')} show too little: send {_FEWEST_REQUESTS} or more."
    if math.isnan(visible):
        return INCONCLUSIVE, "too little traffic to know how long the arm is silent when all is well."
    if open_:
        whole = [stall for stall in maybe if stall.cause != PART]
        parts = [stall for stall in maybe if stall.cause == PART]
        return INCONCLUSIVE, " ".join(
            [*([_unexplained(outside, found, whole)] if whole else []), *([_in_part(outside, parts)] if parts else [])]
        )
    if visible > visible_s:
        return INCONCLUSIVE, (
            f"only stalls from {visible:.2g} s on would show in this traffic, and {visible_s:g} s must: "
            "record token times, or send more requests at once."
        )
    slow = outside.slow
    if slow.p_value <= _SLOW_P and slow.excess_ms >= _SLOW_MS:
        return INCONCLUSIVE, (
            f"nothing stood still, but requests with a first-seen prompt length wait {slow.excess_ms:.0f} ms longer "
            f"than others of their length ({_p(slow.p_value)}), as compiles beside the traffic would make them."
        )
    host = len(outside.of_cause(HOST))
    beside = f", leaving out {_count(host, 'time')} that the others stood still too" if host else ""
    return PASS, (
        f"no stall from {visible:.2g} s on that could be a compile{beside}; shorter ones do not show."
        if not found.stalls
        else f"{_count(found.stalls, 'stall')} began with a first-seen prompt length ({_p(outside.p_value)})."
    )


def _unexplained(outside: Outside, found: Tally, maybe: Sequence[Stall]) -> str:
    """Why stalls of the whole server leave a gate open."""
    longest = max(stall.seconds for stall in maybe)
    why = (
        "the lengths of its prompts are not recorded"
        if not outside.shapes_known
        else "their prompts may have taken as long by themselves"
        if not any(stall.beyond_work for stall in maybe)
        else f"too few began with a first-seen prompt length to call them compiles ({_p(outside.p_value)})"
        if not found.stalls
        else "they cannot be told from compiles"
    )
    alone = f"{outside.arm} alone" if outside.witnesses else f"{outside.arm}, with no other arm to compare,"
    return (
        f"{alone} stood still {_count(len(maybe), 'more time') if found.stalls else _count(len(maybe), 'time')}, "
        f"up to {longest:.2g} s, and {why}. Its own logs know."
    )


def _in_part(outside: Outside, parts: Sequence[Stall]) -> str:
    """Why stalls of some requests leave a gate open."""
    longest = max(stall.seconds for stall in parts)
    return (
        f"{outside.arm} left requests standing {_count(len(parts), 'time')}, up to {longest:.2g} s, while it answered "
        "others: several servers may share its address, and a compile of one cannot be excluded. Give each an address "
        "of its own."
    )


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
