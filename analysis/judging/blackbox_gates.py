"""The gates on compiles of an arm that shows none of them: judged by what its stalls look like from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from analysis.blackbox.stalls import COMPILE, HOST, PART, UNKNOWN, Stall
from analysis.blackbox.view import Outside
from analysis.judging.gates import COMPILE_GATES, FAIL, INCONCLUSIVE, PASS, Gate
from analysis.settings.gate_limits import CompileBudget
from analysis.wording import counted, digits

# What a gate on the number of compiles must be able to see; one from a disk cache takes as long.
SHORTEST_COMPILE_S = 1.0
# An unexplained stall shorter than this is taken for a collection or a hiccup, not for a compile.
SHORTEST_OPEN_S = 0.5
_FEWEST_REQUESTS = 50
_SLOW_P, _SLOW_MS = 0.001, 250.0


# How the value of each gate reads.
_WORDS = (
    "Compiles while serving, the most in one trial:",
    "The longest:",
    "Of each minute they took",
    "Requests in flight in them:",
)


def _values(stalls: Sequence[Stall], *, requests: int, minutes: float) -> tuple[float, ...]:
    """What the stalls come to on each gate, over `minutes` of all replicas together, in which `requests` were sent."""
    trials = [stall.trial for stall in stalls]
    hit = int(np.unique(np.concatenate([stall.requests for stall in stalls])).size) if stalls else 0
    return (
        max((trials.count(trial) for trial in set(trials)), default=0),
        max((stall.seconds for stall in stalls), default=0.0),
        sum(stall.seconds for stall in stalls) / minutes if minutes > 0 else 0.0,
        100.0 * min(hit, requests) / requests if requests else 0.0,
    )


def outside_gates(
    outside: Outside,
    budget: CompileBudget,
    *,
    requests: int,
    minutes: float,
    part: str = "",
    cold_ns: Mapping[int, int] = MappingProxyType({}),
    told: bool = False,
) -> list[Gate]:
    """The four gates on compiles while serving, without telemetry.

    FAIL where stalls that are compiles, on the evidence of first-seen shapes, go beyond the limit. PASS where the arm
    could be watched closely enough and neither they nor unexplained stalls do. INCONCLUSIVE else, with the reason.
    `part` "cold" or "steady" takes the stalls that began before or after `cold_ns` of their trial. With `told` the log
    of the arm tells of its compiles, and it is no doubt that some might not show.
    """

    def within(stall: Stall) -> bool:
        return not part or (stall.start_ns < cold_ns.get(stall.trial, 0)) is (part == "cold")

    sure = [stall for stall in outside.of_cause(COMPILE) if within(stall)]
    # Stalls of the arm alone that may have been compiles: of unknown cause and not too short for one, or of some of its
    # requests.
    unknown = [stall for stall in outside.of_cause(UNKNOWN) if stall.seconds >= SHORTEST_OPEN_S or stall.trigger >= 0]
    maybe = [stall for stall in unknown + outside.of_cause(PART) if within(stall)]
    least = _values(sure, requests=requests, minutes=minutes)
    most = _values([*sure, *maybe], requests=requests, minutes=minutes)
    gates = []
    for (name, unit, key), words, value, upper in zip(COMPILE_GATES, _WORDS, least, most, strict=True):
        limit = float(getattr(budget, key))
        visible_s = limit if key == "max_stall_s" else SHORTEST_COMPILE_S
        if value > limit:
            verdict, reason = FAIL, _proven(outside, sure)
        elif doubt := _doubt(
            outside, sure, maybe, requests=requests, visible_s=math.inf if told else visible_s, open_=upper > limit
        ):
            verdict, reason = INCONCLUSIVE, doubt
        else:
            verdict, reason = PASS, _clean(outside, sure)
        decided = verdict != INCONCLUSIVE
        shown = {"count": f"{value:.0f}", "pct": f"{digits(value)} %"}.get(unit, f"{digits(value, 2)} s")
        bound = {"count": f"{limit:.0f}", "pct": f"{limit:g} %"}.get(unit, f"{limit:g} s")
        gates.append(
            Gate(
                arm=outside.arm,
                gate=f"cold {name}" if part == "cold" else name,
                kind="recompile",
                value=float(value) if decided else None,
                limit=limit,
                unit=unit,
                verdict=verdict,
                reason=f"Seen from outside: {reason}" + (f" {words} {shown}, limit {bound}." if decided else ""),
                unseen=not decided,
            )
        )
    return gates


def _proven(outside: Outside, sure: Sequence[Stall]) -> str:
    return (
        f"{counted(len(sure), 'stall')} of {outside.arm} alone began with a prompt length that it had not met, more "
        f"often than chance explains ({_p(outside.p_value)})."
    )


def _clean(outside: Outside, sure: Sequence[Stall]) -> str:
    if sure:
        return f"{counted(len(sure), 'stall')} began with a first-seen prompt length ({_p(outside.p_value)})."
    if math.isnan(outside.detectable_s):
        return "too little traffic to see a stall in."
    host = len(outside.of_cause(HOST))
    beside = f", leaving out {counted(host, 'time')} that the others stood still too" if host else ""
    shortest = digits(outside.detectable_s, 2)
    return f"no stall from {shortest} s on that could be a compile{beside}; shorter ones do not show."


def _doubt(
    outside: Outside, sure: Sequence[Stall], maybe: Sequence[Stall], *, requests: int, visible_s: float, open_: bool
) -> str:
    """Why a gate stays open; "" where it does not. `visible_s` is what must be seen; infinite where nothing must."""
    visible, slow = outside.detectable_s, outside.slow
    must_see = visible_s < math.inf
    if must_see and requests < _FEWEST_REQUESTS:
        return f"{counted(requests, 'request')} show too little: send {_FEWEST_REQUESTS} or more."
    if must_see and math.isnan(visible):
        return "too little traffic to know how long the arm is silent when all is well."
    if open_:
        whole = [stall for stall in maybe if stall.cause != PART]
        parts = [stall for stall in maybe if stall.cause == PART]
        reasons = [
            *([_unexplained(outside, sure, whole)] if whole else []),
            *([_in_part(outside, parts)] if parts else []),
        ]
        return " ".join(reasons)
    if visible > visible_s:
        return (
            f"only stalls from {visible:.2g} s on would show in this traffic, and {visible_s:g} s must: "
            "record token times, or send more requests at once."
        )
    if slow.p_value <= _SLOW_P and slow.excess_ms >= _SLOW_MS:
        return (
            f"nothing stood still, but requests with a first-seen prompt length wait {slow.excess_ms:.0f} ms longer "
            f"than others of their length ({_p(slow.p_value)}), as compiles beside the traffic would make them."
        )
    return ""


def _unexplained(outside: Outside, sure: Sequence[Stall], maybe: Sequence[Stall]) -> str:
    """Why stalls of the whole server leave a gate open."""
    longest = max(stall.seconds for stall in maybe)
    why = (
        "the lengths of its prompts are not recorded"
        if not outside.shapes_known
        else "their prompts may have taken as long by themselves"
        if not any(stall.beyond_work for stall in maybe)
        else f"too few began with a first-seen prompt length to call them compiles ({_p(outside.p_value)})"
        if not sure
        else "they cannot be told from compiles"
    )
    alone = f"{outside.arm} alone" if outside.witnesses else f"{outside.arm}, with no other arm to compare,"
    return (
        f"{alone} stood still {counted(len(maybe), 'more time' if sure else 'time')}, "
        f"up to {digits(longest, 2)} s, and {why}. Its own logs know."
    )


def _in_part(outside: Outside, parts: Sequence[Stall]) -> str:
    """Why stalls of some requests leave a gate open."""
    longest = max(stall.seconds for stall in parts)
    return (
        f"{outside.arm} left requests standing {counted(len(parts), 'time')}, up to {digits(longest, 2)} s, while it "
        "answered others: several servers may share its address, and a compile of one cannot be excluded. Give each an "
        "address of its own."
    )


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"
