"""Compiles while serving: their count, the longest stall, stall seconds per minute and requests hit
(`gates.max_recompiles`, `max_stall_s`, `max_stall_s_per_min`, `max_requests_hit_pct`), and steps that ran eagerly
(`gates.max_eager_steps_pct`).

An arm of ours reports its compiles. Of an external arm the log shows that it compiles, and so can fail it. A stall that
clients see shows that something delayed requests, and not what: it leaves a gate open that it would fail as a compile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.plain_values import mapping
from analysis.run.client_stalls import HOST, PART, UNKNOWN, ArmStalls, Stall
from analysis.run.compile_events import JIT, RECOMPILE_KINDS, CompileEvent, held_s
from analysis.run.run import Run
from analysis.run.startup import EagerSteps, compiled_steps, most_eager
from analysis.run.trials import SECOND
from analysis.settings.gate_limits import CompileBudget
from analysis.wording import counted, digits, percent

# Name, unit and limit of each gate.
COMPILE_GATES = (
    ("recompiles", "count", "max_recompiles"),
    ("longest stall", "s", "max_stall_s"),
    ("stall per minute", "s", "max_stall_s_per_min"),
    ("requests hit", "pct", "max_requests_hit_pct"),
)
SHORTEST_COMPILE_S = 0.5  # garbage collections are shorter; tracing one shape takes 0.7 s or more
_MUST_SHOW_S = 1.0  # a stall this long must show, for a PASS on the number of compiles without a complete log
_FEWEST_REQUESTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What the telemetry reports of one arm while it served, or in one part of that time."""

    known: bool
    recompiles: int  # over all trials
    most_in_a_trial: int
    longest_event_s: float
    longest_stall_s: float  # the longest that one request was delayed
    stall_s_per_min: float
    requests_hit: int
    requests: int
    trials: int
    kernels: int = 0  # of the recompiles: kernels of another compiler than torch's


def compile_facts(run: Run, arm: str, part: str) -> CompileFacts:
    """What compiles did to the arm while it served: in its cold starts, past them ("steady"), or in all ("")."""
    ends = cold_ends(run)
    serving = [
        event
        for event in run.serving_events(arm)
        if not part or (event.start_ns < ends.get(event.trial, 0)) is (part == "cold")
    ]
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    stalling: list[CompileEvent] = [event for event in serving if event.stalls]
    own = run.of_arm(arm) & ~run.requests.broken
    if part:
        own &= run.cold if part == "cold" else ~run.cold
    stalls = run.attribution.stall_ms[own]
    minutes = part_minutes(run, arm, part)
    # An arm that compiles has events of its warm-up at least; none means that its telemetry was lost.
    silent = run.account(arm).compiles and not any(event.arm == arm for event in run.events)
    return CompileFacts(
        known=run.records.events is not None and not silent,
        recompiles=len(recompiles),
        most_in_a_trial=max(Counter(event.trial for event in recompiles).values(), default=0),
        longest_event_s=max((event.seconds for event in stalling), default=0.0),
        longest_stall_s=float(stalls.max()) / 1e3 if stalls.size else 0.0,
        stall_s_per_min=held_s(stalling) / minutes if minutes > 0 else 0.0,
        requests_hit=int(run.attribution.hit[own].sum()),
        requests=int(own.sum()),
        trials=max(1, len(run.trials_of(arm))),
        kernels=sum(event.kind == JIT for event in recompiles),
    )


def part_minutes(run: Run, arm: str, part: str) -> float:
    """Minutes of all replicas of the arm together, in its cold starts, past them ("steady"), or in all ("")."""
    seconds = sum(trial.seconds for trial in run.trials_of(arm))
    cold_s = sum(min(run.limits.cold_s, trial.seconds) for trial in run.trials_of(arm))
    return {"": seconds, "cold": cold_s, "steady": seconds - cold_s}[part] / 60.0 * run.replicas(arm)


def cold_ends(run: Run) -> dict[int, int]:
    """When the cold start of each trial ends, ns since the epoch."""
    return {trial.number: trial.first_ns + int(run.limits.cold_s * SECOND) for trial in run.trials}


def compile_gates(run: Run, arm: str, stalls: ArmStalls) -> list[Gate]:
    """The gates on compiles: of all that the arm served, or of its cold starts separately where these have a budget."""
    budgets: dict[str, CompileBudget] = {"": run.limits}
    if run.limits.cold is not None:
        budgets = {"steady": run.limits, "cold": run.limits.cold}
    account = run.account(arm)
    gates: list[Gate] = []
    for part, budget in budgets.items():
        facts = compile_facts(run, arm, part)
        reported = recompile_gates(arm, facts, budget, part=part)
        if not account.external:
            gates += reported
            continue
        ends, cold = cold_ends(run), part == "cold"
        seen = [item for item in stalls.stalls if not part or (item.start_ns < ends.get(item.trial, 0)) is cold]
        unexplained = client_gates(
            replace(stalls, stalls=tuple(seen)),
            budget,
            requests=facts.requests,
            minutes=part_minutes(run, arm, part),
            part=part,
            has_log=account.tells_compiles and not account.log_spots,
        )
        if not account.tells_compiles:
            gates += unexplained
            continue
        gates += [_with_log(gate, own, account.log_spots) for gate, own in zip(unexplained, reported, strict=True)]
    return gates


def recompile_gates(arm: str, facts: CompileFacts, budget: CompileBudget, *, part: str = "") -> list[Gate]:
    """The four gates by what was reported. `part` is "cold" or "steady" where the two have budgets of their own."""
    during = {"": "while serving", "cold": "in the cold start", "steady": "past the cold start"}[part]
    hit_pct = 100.0 * facts.requests_hit / facts.requests if facts.requests else 0.0
    hit = f"{facts.requests_hit} of {counted(facts.requests, 'request')} were delayed"
    count = f"{counted(facts.most_in_a_trial, 'recompile')} {during}"
    count += "" if facts.trials == 1 else f" in one trial, {facts.recompiles} in all"
    count += f" ({facts.kernels} of them JIT compiles of kernels)" if facts.kernels else ""
    count += f", longest {facts.longest_event_s:.1f} s" if facts.most_in_a_trial else ""
    count += f", limit {budget.max_recompiles}"
    count += f"; {hit}" if facts.most_in_a_trial else ""
    delayed = f"one request by {digits(facts.longest_stall_s, 2)} s" if facts.longest_stall_s else "no request"
    took = f"{digits(facts.stall_s_per_min, 2)} s" if facts.stall_s_per_min else "nothing"
    reasons = (
        f"{count}.",
        f"Compiles delayed {delayed}, limit {budget.max_stall_s:g} s.",
        f"Compiles took {took} of each minute, limit {budget.max_stall_s_per_min:g} s.",
        f"{hit} by a compile ({hit_pct:.3g} %), limit {budget.max_requests_hit_pct:g} %.",
    )
    values = (float(facts.most_in_a_trial), facts.longest_stall_s, facts.stall_s_per_min, hit_pct)
    gates = []
    for gate, value, reason in zip(_open_gates(arm, budget, part), values, reasons, strict=True):
        if not facts.known:
            unknown = "No compile events were recorded for this arm, so nothing is known."
            gates.append(replace(gate, reason=unknown))
            continue
        limit = gate.limit or 0.0
        verdict = FAIL if value > limit else PASS if facts.requests else INCONCLUSIVE
        gates.append(replace(gate, value=value, verdict=verdict, reason=reason))
    return gates


def _open_gates(arm: str, budget: CompileBudget, part: str) -> list[Gate]:
    return [
        Gate(
            arm=arm,
            gate=f"cold {name}" if part == "cold" else name,
            kind="recompile",
            value=None,
            limit=float(getattr(budget, key)),
            unit=unit,
            verdict=INCONCLUSIVE,
            reason="",
        )
        for name, unit, key in COMPILE_GATES
    ]


# --- As clients see it ------------------------------------------------------------------------------------------------


def may_compile(stall: Stall) -> bool:
    """Whether the stall may have been a compile: nothing else explains it, and it is as long as one."""
    return stall.cause == PART or (stall.cause == UNKNOWN and stall.seconds >= SHORTEST_COMPILE_S)


def stall_values(stalls: Sequence[Stall], *, requests: int, minutes: float) -> tuple[float, ...]:
    """The values of the four gates if the stalls were compiles, over `minutes` of all replicas together, in which
    `requests` were sent."""
    trials = [stall.trial for stall in stalls]
    hit = int(np.unique(np.concatenate([stall.requests for stall in stalls])).size) if stalls else 0
    return (
        max((trials.count(trial) for trial in set(trials)), default=0),
        max((stall.seconds for stall in stalls), default=0.0),
        sum(stall.seconds for stall in stalls) / minutes if minutes > 0 else 0.0,
        100.0 * min(hit, requests) / requests if requests else 0.0,
    )


def client_gates(
    seen: ArmStalls,
    budget: CompileBudget,
    *,
    requests: int,
    minutes: float,
    part: str = "",
    has_log: bool = False,
) -> list[Gate]:
    """The four gates by the stalls of an external arm: INCONCLUSIVE where stalls leave a gate open, or where a compile
    might not show and no complete log reports it (`has_log`); PASS else."""
    maybe = [stall for stall in seen.stalls if may_compile(stall)]
    values = stall_values(maybe, requests=requests, minutes=minutes)
    gates = []
    for gate, (name, _, _), value in zip(_open_gates(seen.arm, budget, part), COMPILE_GATES, values, strict=True):
        limit = gate.limit or 0.0
        doubt = _unexplained(seen, maybe) if value > limit else ""
        if not has_log and not doubt:
            doubt = _unseen(seen, requests, limit if name == "longest stall" else _MUST_SHOW_S)
        verdict, known = (INCONCLUSIVE, None) if doubt else (PASS, float(value))
        gates.append(
            replace(gate, value=known, verdict=verdict, reason=doubt or _clean(seen, maybe), unseen=bool(doubt))
        )
    return gates


def _with_log(gate: Gate, reported: Gate, spots: Sequence[str]) -> Gate:
    """The gate by stalls and by the log. Of a complete log the events count; `spots` say what it may leave out."""
    if reported.verdict == FAIL:
        return replace(reported, reason=f"By its log: {reported.reason}")
    if spots or gate.verdict == INCONCLUSIVE:
        left_out = f", and its log may leave compiles out ({'; '.join(spots)})" if spots else ""
        return replace(gate, reason=f"{gate.reason.removesuffix('.')}{left_out}.")
    if reported.verdict == INCONCLUSIVE:
        return reported
    value = max(gate.value or 0.0, reported.value or 0.0)
    return replace(reported, value=value, reason=f"By its log: {reported.reason}")


def _clean(seen: ArmStalls, stalls: Sequence[Stall]) -> str:
    if stalls:
        return f"Unexplained stalls ({_times(stalls)}) stay within the limit even if they were compiles."
    if math.isnan(seen.detectable_s):
        return "Too little traffic to see a stall."
    host = len(seen.of_cause(HOST))
    others = f", leaving out {counted(host, 'time')} that the others stalled too" if host else ""
    return f"Clients saw no stall of {digits(seen.detectable_s, 2)} s or more that could be a compile{others}."


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
    whole = [stall for stall in stalls if stall.cause != PART]
    if not whole:
        return (
            f"{seen.arm} delayed some requests {_times(stalls)}, while it answered others: several servers may share "
            "its address, of which one compiles."
        )
    alone = f"{seen.arm} alone" if seen.witnesses else f"{seen.arm}, with no other arm to compare,"
    return f"{alone} stalled {_times(whole)}, and it may compile: its own logs know."


def _times(stalls: Sequence[Stall]) -> str:
    longest = max(stall.seconds for stall in stalls)
    return f"{counted(len(stalls), 'time')}, up to {digits(longest, 2)} s"


# --- Steps that ran eagerly -------------------------------------------------------------------------------------------


def eager_gates(run: Run, arm: str) -> list[Gate]:
    """The gate on eager steps, where the policy provides for them or some ran eagerly."""
    if run.account(arm).external:
        return []
    most = most_eager(compiled_steps(run, arm))
    guarded = mapping(run.account(arm).config.get("compile")).get("guarded") is True
    if not guarded and (most is None or not most.eager):
        return []
    return [eager_gate(arm, most, run.limits.max_eager_steps_pct)]


def eager_gate(arm: str, most: EagerSteps | None, limit_pct: float) -> Gate:
    """At most so many of the arm's steps ran as plain Python, of the kind of step with the largest share."""
    verdict, reason = INCONCLUSIVE, "No step of this arm was recorded, so nothing is known."
    if most is not None:
        verdict = FAIL if most.pct > limit_pct else PASS
        share = f"{most.eager} of {most.steps} {most.kind} steps ran eagerly ({percent(most.pct / 100.0)})"
        reason = f"{share}, limit {limit_pct:g} %."
    return Gate(
        arm=arm,
        gate="eager steps",
        kind="recompile",
        value=None if most is None else most.pct,
        limit=limit_pct,
        unit="pct",
        verdict=verdict,
        reason=reason,
    )
