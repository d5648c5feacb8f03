"""Objectives ([slo]), errors (`gates.max_error_pct`), deaths and refused requests: shares and counts of an arm."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from analysis.arrays import Bools, Ints
from analysis.judging.comparisons import blocks_at
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.gates.latency import whole_s
from analysis.judging.paths import Path, share_path, share_tests
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.run.slo import ShareResult, Units, failures, judge_share, observed, units
from analysis.settings.metrics import quantile_label
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.planning import share_needed_s
from analysis.wording import counted, percent


def objective_gate(run: Run, arm: str, target: SloTarget) -> Gate:
    """Whether the arm keeps the target."""
    rows = held_to(run, arm, target)
    seen = observed(run.requests, rows, target)
    if not run.limits.sequential or target.cold:
        result, needed_s = judge_target(run, arm, target)
        return slo_gate(arm, target, result, seen, needed_s)
    counted_units = units(run.requests, rows, target)
    block = blocks_at(run, run.requests.trial[counted_units.row], counted_units.at_ns)
    result, path = share_path(run, counted_units, block, allowed=target.allowed_share)
    return _with_path(slo_gate(arm, target, result, seen, whole_s(run, path)), path)


def held_to(run: Run, arm: str, target: SloTarget) -> Bools:
    """The requests of the arm that the target speaks of."""
    mask = run.of_arm(arm) & run.usable
    return mask & run.cold if target.cold else mask


def judge_target(run: Run, arm: str, target: SloTarget) -> tuple[ShareResult, float | None]:
    """The share of the arm's requests that miss the target, and the run length that would decide it.

    Judged over all traffic, or over the cold starts, each of which is one observation: no length decides those.
    """
    own = units(run.requests, held_to(run, arm, target), target)
    trial = run.requests.trial[own.row]
    if target.cold:
        block = np.unique(trial, return_inverse=True)[1]
        return _judge(run, own, block, allowed=target.allowed_share, least_blocks=None), None
    return _share(run, arm, own, blocks_at(run, trial, own.at_ns), target.allowed_share)


def slo_gate(arm: str, target: SloTarget, result: ShareResult, value: float, needed_s: float | None) -> Gate:
    """The gate of a judged objective of which `value` was seen."""
    share = f"{result.missed} of {result.requests} {'cold ' if target.cold else ''}"
    share += "token gaps" if target.metric == "itl" else "requests"
    if target.quantile is None:
        seen, name = f"{share} failed", f"a limit of {target.limit:g} % errors"
    else:
        seen = f"{share} took longer than {target.limit:g} ms"
        name = f"{quantile_label(target.metric, target.quantile)} within {target.limit:g} ms"
    reason = f"No request to judge {name}."
    if result.requests:
        reason = f"{seen} ({_limits_of_share(result)}); {name} allows {percent(result.allowed)}{_missing(result)}."
    return Gate(
        arm=arm,
        gate=f"{'cold ' if target.cold else ''}slo {target.key}",
        kind="cold" if target.cold else "slo",
        value=None if math.isnan(value) else value,
        limit=target.limit,
        unit="pct" if target.quantile is None else "ms",
        verdict=result.verdict,
        reason=reason,
        interval=_percentages(result),
        high=None if target.quantile is None else result.slowest_ms,
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def error_gates(run: Run, arm: str) -> list[Gate]:
    """The gates on failed requests and, where trials record them, on deaths."""
    own = failures(run.requests, run.of_arm(arm) & ~run.requests.broken)
    allowed, block = run.limits.max_error_pct / 100.0, run.block[own.row]
    if run.limits.sequential:
        result, path = share_path(run, own, block, allowed=allowed)
        gates = [_with_path(error_gate(arm, result, run.limits.max_error_pct, whole_s(run, path)), path)]
    else:
        result, needed_s = _share(run, arm, own, block, allowed)
        gates = [error_gate(arm, result, run.limits.max_error_pct, needed_s)]
    return [*gates, *death_gates(run, arm)] if run.records.trials else gates


def error_gate(arm: str, result: ShareResult, limit_pct: float, needed_s: float | None) -> Gate:
    """Whether the arm's share of failed requests is surely within the limit."""
    value = 100.0 * result.missed / result.requests if result.requests else None
    reason = "No request completed or failed, so the error rate is unknown."
    if value is not None:
        share = f"{result.missed} of {counted(result.requests, 'request')} failed"
        reason = f"{share} ({_limits_of_share(result)}), limit {limit_pct:g} %{_missing(result)}."
    return Gate(
        arm=arm,
        gate="errors",
        kind="error",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=result.verdict,
        reason=reason,
        interval=_percentages(result),
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
    )


def death_gates(run: Run, arm: str) -> list[Gate]:
    """The gate on deaths; none of an external arm, whose death shows in errors, nor of one that never started."""
    account = run.account(arm)
    never_started = not run.trials_of(arm) and not account.deaths
    return [] if account.external or never_started else [death_gate(arm, len(account.deaths))]


def death_gate(arm: str, deaths: int) -> Gate:
    """An arm that died under load may not replace one that did not."""
    times = "once" if deaths == 1 else f"{deaths} times"
    return Gate(
        arm=arm,
        gate="deaths",
        kind="error",
        value=float(deaths),
        limit=0.0,
        unit="count",
        verdict=FAIL if deaths else PASS,
        reason=f"{arm} died {times} under load, limit 0." if deaths else f"{arm} stayed up.",
    )


def refused_gates(run: Run, arm: str) -> list[Gate]:
    """The gate on requests that were refused because no graph fitted, where the policy refuses or some were."""
    own = run.of_arm(arm) & ~run.requests.broken & (run.requests.ok | run.requests.failed)
    refused, requests = int(run.requests.refused[own].sum()), int(own.sum())
    strict = mapping(run.account(arm).config.get("compile")).get("strict") is True
    if run.account(arm).external or not (strict or refused):
        return []
    limit_pct = run.limits.max_refused_pct
    value = 100.0 * refused / requests if requests else None
    seen = f"{refused} of {requests} requests were refused, since no graph fitted their step"
    return [
        Gate(
            arm=arm,
            gate="refused",
            kind="error",
            value=value,
            limit=limit_pct,
            unit="pct",
            verdict=INCONCLUSIVE if value is None else FAIL if value > limit_pct else PASS,
            reason=f"{seen} ({percent((value or 0.0) / 100.0)}), limit {limit_pct:g} %.",
        )
    ]


# --- Shares -----------------------------------------------------------------------------------------------------------


def _percentages(result: ShareResult) -> tuple[float, float] | tuple[None, None]:
    """The one-sided limits of the share in percent."""
    return (100.0 * result.low, 100.0 * result.high) if result.requests else (None, None)


def _limits_of_share(result: ShareResult) -> str:
    seen = percent(result.missed / result.requests)
    return f"{seen}, error bars {percent(result.low)} to {percent(result.high)}"


def _missing(result: ShareResult) -> str:
    """What a PASS needs where the limits alone allow it, as the end of a sentence; empty elsewhere."""
    if result.needed_blocks is None:
        return ""
    return f"; a PASS needs {counted(result.needed_blocks, 'block')}, and this run has {result.blocks}"


def _with_path(gate: Gate, path: Path) -> Gate:
    """The gate with how its evidence grew, and when that decided: limits may have widened since."""
    after = "" if path.decided_s is None else f": decided after {path.decided_s / 60.0:.1f} minutes"
    return replace(gate, path=path, reason=f"{gate.reason.removesuffix('.')}{after}.")


def _share(run: Run, arm: str, own: Units, block: Ints, allowed: float) -> tuple[ShareResult, float | None]:
    """The share that missed, judged over blocks, and the run length that would decide it."""
    result = _judge(run, own, block, allowed=allowed, least_blocks=run.limits.min_blocks)
    needed = share_needed_s(
        result.missed,
        result.requests,
        allowed=result.allowed,
        design_effect=result.design_effect,
        requests_per_s=run.rate(len(own.row), arm if run.separate else None),
        block_s=run.block_s,
        min_blocks=max(run.limits.min_blocks, result.needed_blocks or 0),
        alpha=run.limits.alpha / (share_tests(run) if result.missed > allowed * result.requests else 1),
    )
    return result, needed


def _judge(run: Run, own: Units, block: Ints, *, allowed: float, least_blocks: int | None) -> ShareResult:
    return judge_share(
        own.missed,
        block,
        allowed=allowed,
        alpha=run.limits.alpha,
        ms=own.ms,
        limit_ms=own.limit_ms,
        least_blocks=least_blocks,
        tests=share_tests(run),
    )
