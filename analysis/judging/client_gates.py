"""The gates on compiles of an external arm: by the compiles that its log reports, and by its stalls.

A log shows that an arm compiles, and so it can fail one. A stall shows that something held requests up, and not what:
it leaves a gate open that it would fail if it were a compile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from analysis.judging.gates import COMPILE_GATES, FAIL, INCONCLUSIVE, PASS, Gate
from analysis.run.client_stalls import HOST, PART, UNKNOWN, ArmStalls, Stall
from analysis.settings.gate_limits import CompileBudget
from analysis.wording import counted, digits

SHORTEST_COMPILE_S = 0.5  # garbage collections are shorter; tracing one shape takes 0.7 s or more
_MUST_SHOW_S = 1.0  # a stall this long must show, for a PASS on the number of compiles without a complete log
_FEWEST_REQUESTS = 50


def stall_values(stalls: Sequence[Stall], *, requests: int, minutes: float) -> tuple[float, ...]:
    """The values of the four gates on compiles if the stalls were compiles, over `minutes` of all replicas together,
    in which `requests` were sent."""
    trials = [stall.trial for stall in stalls]
    hit = int(np.unique(np.concatenate([stall.requests for stall in stalls])).size) if stalls else 0
    return (
        max((trials.count(trial) for trial in set(trials)), default=0),
        max((stall.seconds for stall in stalls), default=0.0),
        sum(stall.seconds for stall in stalls) / minutes if minutes > 0 else 0.0,
        100.0 * min(hit, requests) / requests if requests else 0.0,
    )


def may_compile(stall: Stall) -> bool:
    """Whether the stall may have been a compile: nothing else explains it, and it is as long as one."""
    return stall.cause == PART or (stall.cause == UNKNOWN and stall.seconds >= SHORTEST_COMPILE_S)


def client_gates(
    seen: ArmStalls,
    budget: CompileBudget,
    *,
    requests: int,
    minutes: float,
    part: str = "",
    cold_ns: Mapping[int, int] | None = None,
    timed: bool = True,
    reported: Sequence[Gate] | None = None,
    log: str = "",
    blind_spots: Collection[str] = (),
) -> list[Gate]:
    """The four gates on compiles while serving.

    `part` "cold" or "steady" takes the stalls that began before or after `cold_ns` of their trial. `reported` are the
    same gates by the events of the log, which reports what `log` says and leaves out what `blind_spots` say; None
    without a log. FAIL where they FAIL. INCONCLUSIVE where stalls leave the gate open, or, without a complete log, a
    compile might not show. PASS else.
    """
    began = cold_ns or {}
    maybe = [
        stall
        for stall in seen.stalls
        if may_compile(stall) and (not part or (stall.start_ns < began.get(stall.trial, 0)) is (part == "cold"))
    ]
    values = stall_values(maybe, requests=requests, minutes=minutes)
    complete = reported is not None and not blind_spots
    gates = []
    for number, ((name, unit, key), value) in enumerate(zip(COMPILE_GATES, values, strict=True)):
        limit = float(getattr(budget, key))
        doubt = _unexplained(seen, maybe) if value > limit else ""
        if not timed:
            doubt = "Its results do not say when each request was sent, so no stall shows."
        if not complete and not doubt:
            doubt = _unseen(seen, requests, limit if key == "max_stall_s" else _MUST_SHOW_S)
        gate = Gate(
            arm=seen.arm,
            gate=f"cold {name}" if part == "cold" else name,
            kind="recompile",
            value=None if doubt else float(value),
            limit=limit,
            unit=unit,
            verdict=INCONCLUSIVE if doubt else PASS,
            reason=doubt or _clean(seen, maybe),
            unseen=bool(doubt),
        )
        gates.append(gate if reported is None else _with_log(gate, reported[number], log, blind_spots))
    return gates


def _with_log(gate: Gate, reported: Gate, log: str, blind_spots: Collection[str]) -> Gate:
    """The gate by stalls and by the log."""
    if reported.verdict == FAIL:
        return replace(reported, reason=f"By its log: {reported.reason}")
    if blind_spots:
        return replace(gate, reason=f"{gate.reason} Its log may leave compiles out: {'; '.join(blind_spots)}.")
    if gate.verdict == PASS and reported.verdict == INCONCLUSIVE:
        return reported
    reason = f"{gate.reason} By its log, which reports {log}: {reported.reason}"
    value = None if gate.value is None else max(gate.value, reported.value or 0.0)
    return replace(gate, reason=reason, value=value)


def _clean(seen: ArmStalls, stalls: Sequence[Stall]) -> str:
    if stalls:
        return f"Unexplained stalls ({_times(stalls)}) stay within the limit even if they were compiles."
    if math.isnan(seen.detectable_s):
        return "Too little traffic to see a stall."
    host = len(seen.of_cause(HOST))
    secondary = f", leaving out {counted(host, 'time')} that the others stalled too" if host else ""
    shortest = digits(seen.detectable_s, 2)
    return (
        f"Clients saw no stall of {shortest} s or more that could be a compile{secondary}. Shorter ones do not show, "
        "nor do compiles that delay single requests."
    )


def _unseen(seen: ArmStalls, requests: int, must_show_s: float) -> str:
    """Why a stall of `must_show_s` might not show; "" where it would."""
    if requests < _FEWEST_REQUESTS:
        return f"{counted(requests, 'request')} show too little: send {_FEWEST_REQUESTS} or more."
    if math.isnan(seen.detectable_s):
        return "Too little traffic to know how long the arm is silent when all is well."
    if seen.detectable_s > must_show_s:
        return (
            f"Only stalls of {seen.detectable_s:.2g} s or more would show in this traffic, and {must_show_s:g} s must: "
            "record token times, or send more requests at once."
        )
    return ""


def _unexplained(seen: ArmStalls, stalls: Sequence[Stall]) -> str:
    """Why the stalls leave a gate open."""
    reasons = []
    if whole := [stall for stall in stalls if stall.cause != PART]:
        alone = f"{seen.arm} alone" if seen.witnesses else f"{seen.arm}, with no other arm to compare,"
        reasons.append(f"{alone} stalled {_times(whole)}, and it may compile. Its own logs know.")
    if parts := [stall for stall in stalls if stall.cause == PART]:
        reasons.append(
            f"{seen.arm} delayed some requests {_times(parts)}, while it answered others: several servers may share "
            "its address, and one of them may compile. Give each an address of its own."
        )
    return " ".join(reasons)


def _times(stalls: Sequence[Stall]) -> str:
    longest = max(stall.seconds for stall in stalls)
    return f"{counted(len(stalls), 'time')}, up to {digits(longest, 2)} s"
