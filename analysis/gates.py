"""The requirements on one arm, each judged by itself and in plain words: PASS, FAIL or INCONCLUSIVE with a reason.

Gates on latency and errors are estimates, so a run may be too short for them. Gates on compiles are counts of what
happened: they FAIL in a run of any length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.compare import METRIC_NAMES, Comparison
from analysis.limits import GateLimits
from analysis.slo import ShareResult, SloTarget

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: str  # noninferiority | slo | goodput | recompile | error
    value: float | None
    limit: float | None
    unit: str  # ratio | ms | count | s | pct
    verdict: str
    reason: str
    needed_s: float | None = None  # run length that would decide it; None when decided or out of reach
    blocked_by: tuple[str, ...] = ()  # checks that forbid to believe it
    unseen: bool = False  # no run can tell: the arm shows nothing of it


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What the telemetry says of one arm while it served."""

    known: bool
    recompiles: int  # over all trials
    most_in_a_trial: int
    longest_event_s: float
    longest_stall_s: float  # the longest that one request was held up
    stall_s_per_min: float
    requests_hit: int
    requests: int
    trials: int
    seen: bool = True  # whether the arm has telemetry at all; an external one has none


def noninferiority_gate(comparison: Comparison, needed_s: float | None) -> Gate:
    """The gate that a decided comparison makes."""
    return Gate(
        arm=comparison.arm,
        gate=noninferiority_name(comparison),
        kind="noninferiority",
        value=comparison.ratio,
        limit=1.0 + comparison.margin,
        unit="ratio",
        verdict=comparison.verdict,
        reason=comparison.reason,
        needed_s=needed_s if comparison.verdict == INCONCLUSIVE else None,
    )


def noninferiority_name(comparison: Comparison) -> str:
    """The name of the comparison's gate: "noninferiority p99_ttft", "noninferiority p99_9_e2e"."""
    quantile = f"p{100.0 * comparison.quantile:.10g}".replace(".", "_")
    return f"noninferiority {quantile}_{comparison.metric}"


def slo_gate(arm: str, target: SloTarget, result: ShareResult, value: float, needed_s: float | None) -> Gate:
    """Whether the arm keeps the target, with the count behind it."""
    share = f"{result.missed} of {result.requests} requests"
    sure = f"the true share may lie between {_pct(result.low)} and {_pct(result.high)}"
    if target.quantile is None:
        seen, name = f"{share} failed", f"at most {target.limit:g} % errors"
    else:
        label = f"p{100.0 * target.quantile:.10g} {METRIC_NAMES[target.metric]}"
        seen, name = f"{share} took longer than {target.limit:g} ms", f"{label} within {target.limit:g} ms"
    if not result.requests:
        reason = f"No request to judge {name}."
    else:
        reason = f"{seen}; {name} allows {_pct(result.allowed)}, {sure}."
    return Gate(
        arm=arm,
        gate=f"slo {target.key}",
        kind="slo",
        value=None if math.isnan(value) else value,
        limit=target.limit,
        unit="pct" if target.quantile is None else "ms",
        verdict=result.verdict,
        reason=reason,
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def _pct(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def error_gate(arm: str, result: ShareResult, limit_pct: float, needed_s: float | None) -> Gate:
    """Whether the arm's share of failed requests is surely within the limit."""
    value = 100.0 * result.missed / result.requests if result.requests else None
    if value is None:
        reason = "No request completed or failed, so the error rate is unknown."
    elif result.verdict == INCONCLUSIVE:
        reason = (
            f"{result.missed} of {result.requests} requests failed; so few requests only show that fewer than "
            f"{_pct(result.high)} fail, and the limit is {limit_pct:g} %."
        )
    else:
        reason = f"{result.missed} of {result.requests} requests failed ({value:.3g} %), limit {limit_pct:g} %."
    return Gate(
        arm=arm,
        gate="errors",
        kind="error",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=result.verdict,
        reason=reason,
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def death_gate(arm: str, deaths: int) -> Gate:
    """An arm that died under load may not replace one that did not."""
    times = "once" if deaths == 1 else f"{deaths} times"
    reason = f"{arm} died {times} under load." if deaths else f"{arm} stayed up."
    return Gate(
        arm=arm,
        gate="deaths",
        kind="error",
        value=float(deaths),
        limit=0.0,
        unit="count",
        verdict=FAIL if deaths else PASS,
        reason=reason,
    )


def recompile_gates(arm: str, facts: CompileFacts, limits: GateLimits) -> list[Gate]:
    """The four gates on compiles while serving: facts, so they FAIL in a run of any length."""
    per_trial = "" if facts.trials == 1 else f" in one trial, {facts.recompiles} in all"
    hit_pct = 100.0 * facts.requests_hit / facts.requests if facts.requests else 0.0
    waited = f"{facts.requests_hit} of {facts.requests} requests waited"
    count = f"{facts.most_in_a_trial} recompile{'' if facts.most_in_a_trial == 1 else 's'} while serving{per_trial}"
    if facts.most_in_a_trial:
        count += f", longest {facts.longest_event_s:.1f} s, limit {limits.max_recompiles}; {waited}"
    else:
        count += f", limit {limits.max_recompiles}"
    rows: list[tuple[str, float, float, str, str]] = [
        ("recompiles", float(facts.most_in_a_trial), float(limits.max_recompiles), "count", f"{count}."),
        (
            "longest stall",
            facts.longest_stall_s,
            limits.max_stall_s,
            "s",
            f"Compiles held up one request for {facts.longest_stall_s:.2g} s, limit {limits.max_stall_s:g} s.",
        ),
        (
            "stall per minute",
            facts.stall_s_per_min,
            limits.max_stall_s_per_min,
            "s",
            f"Compiles took {facts.stall_s_per_min:.2g} s of each minute, limit {limits.max_stall_s_per_min:g} s.",
        ),
        (
            "requests hit",
            hit_pct,
            limits.max_requests_hit_pct,
            "pct",
            f"{waited} for a compile ({hit_pct:.3g} %), limit {limits.max_requests_hit_pct:g} %.",
        ),
    ]
    gates = []
    for name, value, limit, unit, reason in rows:
        unknown = not facts.known or not facts.seen
        undecided = unknown or (facts.requests == 0 and value <= limit)
        gates.append(
            Gate(
                arm=arm,
                gate=name,
                kind="recompile",
                value=None if unknown else value,
                limit=limit,
                unit=unit,
                verdict=INCONCLUSIVE if undecided else FAIL if value > limit else PASS,
                reason=(
                    f"No telemetry: {arm} is external and shows none of its compiles. Black-box detection applies, "
                    "and latencies and errors are judged as ever."
                    if not facts.seen
                    else "No compile events were recorded for this arm, so nothing is known."
                    if unknown
                    else reason
                ),
                unseen=not facts.seen,
            )
        )
    return gates
