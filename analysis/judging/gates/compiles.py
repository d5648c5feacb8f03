"""Compiles while serving: their count, longest compile stall, compile stall per minute and requests hit
(`gates.max_recompiles`, `max_stall_s`, `max_stall_s_per_min`, `max_requests_hit_pct`), and steps that ran eagerly
(`gates.max_eager_steps_pct`).

The log of an external arm can fail it. A stall that clients see does not show what delayed requests: it leaves a gate
open that it would fail as a compile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate, count_gate
from tailgate.analysis.run.client_stalls import PART, UNKNOWN, ArmStalls, Stall
from tailgate.analysis.run.compile_events import JIT, RECOMPILE_KINDS, held_s
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.startup import compiled_steps, most_eager
from tailgate.analysis.settings.gate_limits import GateLimits
from tailgate.analysis.wording import counted, digits, enough

# Name, unit, limit, reason, and reason where the value is 0.
COMPILE_GATES = (
    (
        "recompiles",
        "count",
        "max_recompiles",
        "{value:.0f} {recompiles} while serving in one trial (limit {limit:g}), longest {longest} s{kernels}; {hit} of "
        "{requests} requests were delayed, by up to {delay} s{several}.",
        "No recompile while serving, limit {limit:g}.",
    ),
    (
        "longest compile stall",
        "s",
        "max_stall_s",
        "Compiles delayed a request by up to {delay} s, limit {limit:g} s.",
        "Compiles delayed no request, limit {limit:g} s.",
    ),
    (
        "compile stall per minute",
        "s",
        "max_stall_s_per_min",
        "Compiles stalled a replica for {short} s of each minute on average, limit {limit:g} s.",
        "No compile stalled a replica, limit {limit:g} s of each minute.",
    ),
    (
        "requests hit",
        "pct",
        "max_requests_hit_pct",
        "{hit} of {requests} requests were delayed by a compile ({short} %), limit {limit:g} %.",
        "No compile delayed any of {requests} requests, limit {limit:g} %.",
    ),
)
SHORTEST_COMPILE_S = 0.5  # garbage collections are shorter; tracing one shape takes 0.7 s or more
_MUST_SHOW_S = 1.0  # a stall this long must show, for a PASS on the number of compiles without a complete log
_FEWEST_REQUESTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What the telemetry reports of one arm while it served."""

    known: bool
    recompiles: int  # over all trials
    most_in_a_trial: int
    kernels: str  # " (NAME)" or " (NAME and others)", of those that another compiler than torch's built
    longest_event_s: float
    longest_stall_s: float  # the longest that one request was delayed
    stall_s_per_min: float
    requests_hit: int
    requests: int

    @property
    def hit_pct(self) -> float:
        return 100.0 * self.requests_hit / self.requests if self.requests else 0.0


def compile_facts(run: Run, arm: str) -> CompileFacts:
    serving = [event for event in run.events if event.arm == arm and event.serving]
    recompiles = [event for event in serving if event.kind in RECOMPILE_KINDS]
    kernels = list(filter(None, dict.fromkeys(event.row["frame"] for event in recompiles if event.kind == JIT)))
    stalling = [event for event in serving if event.stalls]
    own = run.of_arm(arm) & ~run.requests.broken
    stalls, minutes = run.attribution.stall_ms[own], replica_minutes(run, arm)
    # An arm that compiles has events of its warm-up at least; none means that its telemetry was lost.
    silent = run.account(arm).compiles and not any(event.arm == arm for event in run.events)
    return CompileFacts(
        known=run.records.events is not None and not silent and run.account(arm).reports_compiles,
        recompiles=len(recompiles),
        most_in_a_trial=max(Counter(event.trial for event in recompiles).values(), default=0),
        kernels=f" ({kernels[0]}{' and others' if len(kernels) > 1 else ''})" if kernels else "",
        longest_event_s=max((event.seconds for event in stalling), default=0.0),
        longest_stall_s=float(stalls.max()) / 1e3 if stalls.size else 0.0,
        stall_s_per_min=held_s(stalling) / minutes if minutes > 0 else 0.0,
        requests_hit=int(run.attribution.hit[own].sum()),
        requests=int(own.sum()),
    )


def delayed_text(run: Run, arm: str) -> str:
    """Say how long the prompts were that a compile of the arm delayed: " (4 to 9 tokens)"; empty where unknown."""
    tokens = run.requests.prompt_tokens
    known = tokens[run.of_arm(arm) & run.attribution.hit & (tokens >= 0)]
    return f" ({' to '.join(map(str, dict.fromkeys((known.min(), known.max()))))} tokens)" if known.size else ""


def replica_minutes(run: Run, arm: str) -> float:
    """Return the minutes of traffic of all replicas of the arm together."""
    return sum(trial.seconds for trial in run.trials_of(arm)) / 60.0 * run.replicas(arm)


def compile_gates(run: Run, arm: str, stalls: ArmStalls) -> list[Gate]:
    """Judge the gates on compiles: by reports; for an external arm by its log and its clients' stalls."""
    account, facts = run.account(arm), compile_facts(run, arm)
    reported = reported_gates(arm, facts, run.limits)
    if not account.external:
        return reported
    whole = account.reports_compiles and not account.log_spots
    needs = "see its server's log"  # results of other tools have no address, and no setting either
    if account.log_spots:
        needs = f"complete its log ({'; '.join(account.log_spots)})"
    elif account.external.get("address") and not whole:
        needs = f"set arms.{arm}.telemetry.log to its server's log, begun at its start"
    minutes, sent = replica_minutes(run, arm), facts.requests
    seen = client_gates(stalls, run.limits, requests=sent, minutes=minutes, has_log=whole, needs=needs)
    return [
        replace(logged, reason=f"By its log, {logged.reason[0].lower()}{logged.reason[1:]}")
        if logged.verdict == FAIL or (whole and gate.verdict == PASS)
        else gate
        for gate, logged in zip(seen, reported, strict=True)
    ]


def reported_gates(arm: str, facts: CompileFacts, limits: GateLimits) -> list[Gate]:
    values = (float(facts.most_in_a_trial), facts.longest_stall_s, facts.stall_s_per_min, facts.hit_pct)
    gates = []
    for (name, unit, key, sentence, nothing), value in zip(COMPILE_GATES, values, strict=True):
        limit = float(getattr(limits, key))
        reason = (sentence if value else nothing).format(
            value=value,
            short=digits(value, enough(limit, [value])),
            limit=limit,
            recompiles="recompile" if value == 1 else "recompiles",
            longest=digits(facts.longest_event_s),
            kernels=facts.kernels,
            delay=digits(facts.longest_stall_s, enough(limit, [facts.longest_stall_s])),
            several=" (several compiles in a row)" if facts.longest_stall_s > 1.05 * facts.longest_event_s else "",
            hit=facts.requests_hit,
            requests=facts.requests,
        )
        if not facts.known:
            reason = "No compile events were recorded for this arm, so nothing is known."
        gate = count_gate(arm, name, "recompile", value if facts.known else None, limit, unit, reason)
        is_open = gate.verdict == PASS and not facts.requests
        gates.append(replace(gate, verdict=INCONCLUSIVE) if is_open else gate)
    return gates


def may_compile(stall: Stall) -> bool:
    """Return whether the stall may be a compile: nothing else explains it, and it is as long as one."""
    return stall.cause == PART or (stall.cause == UNKNOWN and stall.seconds >= SHORTEST_COMPILE_S)


def stall_values(stalls: Sequence[Stall], *, requests: int, minutes: float) -> tuple[float, ...]:
    """Return the values of the four gates if the stalls were compiles, over `minutes` of all replicas together and
    `requests` sent."""
    hit = int(np.unique(np.concatenate([stall.requests for stall in stalls])).size) if stalls else 0
    return (
        float(max(Counter(stall.trial for stall in stalls).values(), default=0)),
        max((stall.seconds for stall in stalls), default=0.0),
        sum(stall.seconds for stall in stalls) / minutes if minutes > 0 else 0.0,
        100.0 * min(hit, requests) / requests if requests else 0.0,
    )


def client_gates(
    seen: ArmStalls, limits: GateLimits, *, requests: int, minutes: float, has_log: bool = False, needs: str = "its log"
) -> list[Gate]:
    """Judge the four gates by the stalls of an external arm, of which those that stay open need what `needs` says.

    INCONCLUSIVE if stalls exceed a limit, or if a compile might not show and no complete log reports it (`has_log`);
    else PASS. They have no value, since clients see no compiles.
    """
    maybe = [stall for stall in seen.stalls if may_compile(stall)]
    longest = max((stall.seconds for stall in maybe), default=0.0)
    times = f"{counted(len(maybe), 'time')}, up to {digits(longest)} s"
    shown = "" if math.isnan(seen.detectable_s) else f" of {digits(seen.detectable_s)} s or more"
    gates = []
    values = stall_values(maybe, requests=requests, minutes=minutes)
    for (name, unit, key, _, _), value in zip(COMPILE_GATES, values, strict=True):
        limit, known = float(getattr(limits, key)), None
        must_show_s = limit if name == "longest compile stall" else _MUST_SHOW_S
        if value > limit:
            reason = f"{seen.arm} stalled {times}, for some or all of its requests, and compiles may be why: {needs}."
        elif not has_log and (requests < _FEWEST_REQUESTS or not seen.detectable_s <= must_show_s):
            reason = (
                f"A stall of {must_show_s:g} s might not show in these {counted(requests, 'request')}: record token "
                f"times, send more requests at once, or {needs}."
            )
        elif maybe:
            known, reason = value, f"Unexplained stalls ({times}) stay within the limit even if they were compiles."
        else:
            known, reason = value, f"Clients saw no stall{shown} that could be a compile."
        gate = count_gate(seen.arm, name, "recompile", known, limit, unit, reason)
        gates.append(replace(gate, value=None, unseen=needs if known is None else ""))
    return gates


def eager_gates(run: Run, arm: str) -> list[Gate]:
    """Judge the share of eager steps, of the kind of step with the largest share; none if no step ran eagerly."""
    most = None if run.account(arm).external else most_eager(compiled_steps(run, arm))
    if most is None or most.eager_pct == 0:
        return []
    limit_pct = run.limits.max_eager_steps_pct
    ran = f"{most.steps - most.compiled} of {most.steps} {most.kind} steps ran eagerly"
    reason = f"{ran} ({digits(most.eager_pct)} %), limit {limit_pct:g} %."
    return [count_gate(arm, "eager steps", "recompile", most.eager_pct, limit_pct, "pct", reason)]
