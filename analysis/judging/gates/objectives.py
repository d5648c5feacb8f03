"""Shares of an arm's requests: objectives ([slo]), errors (`gates.max_error_pct`) and refused requests
(`gates.max_refused_pct`); and deaths."""

from __future__ import annotations

import math
from dataclasses import replace

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, Gate, count_gate
from tailgate.analysis.judging.gates.latency import whole_s
from tailgate.analysis.judging.paths import share_path, share_tests
from tailgate.analysis.records.plain_values import mapping
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import ShareResult, Units, failures, judge_share, observed, units
from tailgate.analysis.settings.metrics import METRIC_NAMES, gate_label
from tailgate.analysis.settings.slo_targets import SloTarget
from tailgate.analysis.statistics.planning import share_needed_s
from tailgate.analysis.wording import counted, digits, enough, percent


def objective_gate(run: Run, arm: str, target: SloTarget) -> Gate:
    rows = run.of_arm(arm) & run.usable
    value = observed(run.requests, rows, target)
    what = "token gaps" if target.metric == "itl" else "requests"
    if target.quantile is None:
        what += " failed"
    else:
        what += f" had {METRIC_NAMES[target.metric]} above {target.limit:g} ms"
    own = units(run.requests, rows, target)
    gate = share_gate(run, arm, own, name=f"slo {target.key}", kind="slo", allowed=target.allowed_share, what=what)
    base = observed(run.requests, run.of_arm(run.control) & run.usable, target)
    if gate.verdict == FAIL and not math.isnan(base):
        shown = f"{digits(base)} {'%' if target.quantile is None else 'ms'}"
        also = f"{gate_label(target.key)} of {run.control} is {shown}{' and misses it too' * (base > target.limit)}"
        gate = replace(gate, reason=f"{gate.reason.removesuffix('.')}; {also}.")
    if target.quantile is None:
        return gate
    slowest = float(own.ms.max()) if len(own.ms) and not own.missed.any() else None
    return replace(gate, value=None if math.isnan(value) else value, limit=target.limit, unit="ms", high=slowest)


def error_gates(run: Run, arm: str) -> list[Gate]:
    """Judge failed requests and, if trials record them, deaths."""
    own = failures(run.requests, run.of_arm(arm) & ~run.requests.broken)
    allowed = run.limits.max_error_pct / 100.0
    gate = share_gate(run, arm, own, name="errors", kind="error", allowed=allowed, what="requests failed")
    return [gate, *death_gates(run, arm)] if run.records.trials else [gate]


def share_gate(run: Run, arm: str, own: Units, *, name: str, kind: str, allowed: float, what: str) -> Gate:
    """Judge whether the share of `own` that missed is surely allowed; `what` describes a miss.

    All figures are percent. Interim analyses decide it block by block.
    """
    path, after, block = None, "", run.block_of(own.row, own.at_ns)
    if run.limits.sequential:
        result, path = share_path(run, own, block, allowed=allowed)
        needed_s = whole_s(run, path)
        after = "" if path.decided_s is None else f" (after {path.decided_s / 60.0:.1f} minutes)"
    else:
        result = judge_share(
            own.missed,
            block,
            allowed=allowed,
            alpha=run.limits.alpha,
            ms=own.ms,
            limit_ms=own.limit_ms,
            least_blocks=run.limits.min_blocks,
            tests=share_tests(run),
        )
        needed_s = _needed_s(run, arm, result)
    seen, reason = None, f"No request to judge whether {what}."
    if result.requests:
        seen = result.missed / result.requests
        most = enough(allowed, (seen, result.low, result.high), percent)
        bars = f"{percent(seen, most)}, error bars {percent(result.low, most)} to {percent(result.high, most)}"
        cause = f"blocks of {run.block_s:g} s differ" if result.missed else "slow requests come in bunches"
        bars += f", wider since {cause}" if result.design_effect > 1.0 else ""
        if result.needed_blocks is not None:
            blocks = counted(result.needed_blocks, "block")
            after = f"; a PASS needs {blocks}, and this run has {result.blocks}{after}"
        reason = f"{result.missed} of {result.requests} {what} ({bars}), limit {percent(allowed, most)}{after}."
    return Gate(
        arm=arm,
        gate=name,
        kind=kind,
        value=None if seen is None else 100.0 * seen,
        limit=100.0 * allowed,
        unit="pct",
        verdict=result.verdict,
        reason=reason,
        interval=(None, None) if seen is None else (100.0 * result.low, 100.0 * result.high),
        needed_s=needed_s if result.verdict == INCONCLUSIVE else None,
        path=path,
    )


def _needed_s(run: Run, arm: str, result: ShareResult) -> float | None:
    misses_too_many = result.missed > result.allowed * result.requests
    return share_needed_s(
        result.missed,
        result.requests,
        allowed=result.allowed,
        design_effect=result.design_effect,
        requests_per_s=run.rate(result.requests, arm if run.separate else None),
        block_s=run.block_s,
        min_blocks=max(run.limits.min_blocks, result.needed_blocks or 0),
        alpha=run.limits.alpha / (share_tests(run) if misses_too_many else 1),
    )


def death_gates(run: Run, arm: str) -> list[Gate]:
    """Judge deaths; not of an external arm, whose death shows in errors, nor of one that never started."""
    account = run.account(arm)
    deaths = len(account.deaths)
    if account.external or (not run.trials_of(arm) and not deaths):
        return []
    reason = f"{arm} died {counted(deaths, 'time')} under load, limit 0." if deaths else f"{arm} stayed up."
    return [count_gate(arm, "deaths", "error", float(deaths), 0.0, "count", reason)]


def refused_gates(run: Run, arm: str) -> list[Gate]:
    """Judge requests refused because no graph fitted, if the policy refuses or some were refused."""
    own = run.of_arm(arm) & ~run.requests.broken & (run.requests.ok | run.requests.failed)
    refused, requests = int(run.requests.refused[own].sum()), int(own.sum())
    strict = mapping(run.account(arm).config.get("compile")).get("strict") is True
    if run.account(arm).external or not (strict or refused):
        return []
    limit = run.limits.max_refused_pct
    share = refused / requests if requests else None
    seen = f"{refused} of {requests} requests were refused, since no graph fitted their step"
    reason = f"{seen} ({percent(share or 0.0)}), limit {limit:g} %."
    return [count_gate(arm, "refused", "error", None if share is None else 100.0 * share, limit, "pct", reason)]
