"""What one arm did: requests, latencies, compiles, padding and start-up, as a row of the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools
from analysis.blackbox.row import outside_row
from analysis.judging.gates import CompileFacts
from analysis.judging.judgement import Judgement
from analysis.records.requests import METRICS
from analysis.run.counterfactual import counterfactual
from analysis.run.run import Run
from analysis.run.slo import meets_all
from analysis.run.spikes import BACKLOG, CAUSES, excursions, windows_of
from analysis.run.startup import compiler_facts, startup_row
from analysis.statistics.quantiles import quantiles


def arm_row(run: Run, arm: str, judgement: Judgement) -> dict[str, Any]:
    """Everything that the summary says of the arm."""
    requests = run.requests
    own = run.of_arm(arm)
    usable = own & run.usable
    completed = int((own & requests.ok).sum())
    failed = int((own & requests.failed).sum())
    steady = np.zeros(len(requests), dtype=np.bool_)
    steady[run.steady(usable, (arm,))] = True
    tokens = int(requests.output_tokens[usable].sum())
    return {
        "name": arm,
        "preset": run.account(arm).config.get("preset"),
        "control": arm == run.control,
        "requests": int(own.sum()),
        "ok": completed,
        "failed": failed,
        "cancelled": int((own & requests.cut).sum()),
        "error_pct": 100.0 * failed / (completed + failed) if completed + failed else None,
        "output_tokens": tokens,
        "request_rate": run.rate(int(usable.sum())),
        "output_token_rate": tokens / run.seconds if run.seconds > 0 else None,
        "goodput_rps": run.rate(int((meets_all(requests, run.goodput_targets) & usable).sum()))
        if run.goodput_targets
        else None,
        "metrics": _metrics(run, usable),
        "steady": _metrics(run, steady),
        "cold": _metrics(run, usable & run.cold),
        "slo": [
            {
                "key": target.key,
                "phase": "cold" if target.cold else "all",
                "limit": target.limit,
                "value": gate.value,
                "verdict": gate.verdict,
                "reason": gate.reason,
            }
            for target, gate in zip((*run.targets, *run.cold_targets), judgement.slo[arm], strict=True)
        ],
        "external": _external_row(run, arm),
        "compile": _compile_row(run, arm, judgement.facts[arm], judgement.parts[arm]),
        "blackbox": outside_row(run, judgement.outside[arm]),
        "padding": _padding(run, arm),
        "startup": startup_row(run, arm),
        "deaths": len(run.account(arm).deaths),
        "verdict": judgement.verdicts.get(arm),
    }


def _metrics(run: Run, mask: Bools) -> dict[str, Any]:
    requests = run.requests
    table = {name: _described(requests.metric_ms(name)[mask]) for name in METRICS}
    gaps = np.repeat(mask & (requests.ok | requests.cut), np.diff(requests.gap_offsets))
    table["itl"] = _described(requests.gaps_ms[gaps])
    for name in METRICS:
        # Failed requests stand in these figures with their deadline.
        table[name]["failed"] = int((mask & requests.failed & ~np.isnan(requests.metric_ms(name))).sum())
    return table


def _described(values: npt.NDArray[Any]) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    p50, p90, p95, p99, p99_9, top = quantiles(known, (0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
    return {
        "n": int(known.size),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "p99_ms": p99,
        "p99_9_ms": p99_9,
        "max_ms": top,
        "mean_ms": float(known.mean(dtype=np.float64)) if known.size else None,
    }


def _external_row(run: Run, arm: str) -> dict[str, Any] | None:
    """Where an external arm is, and what cannot be known of it, in sentences; None for tailgate's own arms."""
    found = run.account(arm).external
    if not found:
        return None
    times, tokens = run.times_per_answer(arm)
    counts = run.account(arm).counts_tokens
    notes = [
        "Tailgate did not start it: there are no sections on its start-up and compiles, and nothing resets it between "
        "trials.",
        "Its weights, precision, limits, batching and answers were not checked.",
    ]
    if not counts:
        notes.append("It does not count its tokens: TPOT, ITL and token rates are per piece of text.")
    elif tokens and abs(times - tokens) > 0.01 * tokens:
        notes.append(
            f"{tokens} tokens came in {times} chunks with text: ITL is per chunk, tokens are the server's own count."
        )
    if any(probe.get("streams") is False for probe in run.account(arm).probes):
        notes.append("It does not stream: the first token comes with the last.")
    return {
        "kind": found["kind"],
        "address": found.get("address"),
        "model_name": found.get("model_name"),
        "counts_tokens": counts,
        "chunks": times,
        "notes": notes,
    }


_COMPILE_COLUMNS = (
    *("warmup_events", "warmup_s", "serving_events", "recompiles", "graph_captures", "limit_hits"),
    *("eager_fallback_pct", "longest_event_s", "longest_stall_s", "stall_s", "stall_s_per_min"),
    *("requests_hit", "requests_hit_pct", "graph_breaks", "cudagraph_skips"),
    *("cold", "steady"),
    *("causes", "backlog", "without_withdrawn"),
    *(
        f"p99_{metric}_ms_without{end}"
        for metric in ("ttft", "e2e")
        for end in ("", "_least", "_most", "_low", "_high")
    ),
    *(f"p99_{metric}_explained{end}_pct" for metric in ("ttft", "e2e") for end in ("", "_low", "_high")),
)


def _compile_row(run: Run, arm: str, facts: CompileFacts, parts: Mapping[str, CompileFacts]) -> dict[str, Any]:
    events = [event for event in run.events if event.arm == arm]
    warmup = [event for event in events if not event.serving]
    serving = run.serving_events(arm)
    if run.account(arm).external:
        return dict.fromkeys(_COMPILE_COLUMNS)
    known = facts.known
    # Without events the servers' own word for a wait still shows it, but its silence does not say that nobody waited.
    waited = known or facts.requests_hit > 0
    warmup_s = 0.0
    for trial, replica in sorted({(event.trial, event.replica or "") for event in warmup}):
        warmup_s += windows_of(
            (event.start_ns, event.end_ns)
            for event in warmup
            if event.trial == trial and (event.replica or "") == replica
        ).seconds
    row: dict[str, Any] = {
        "warmup_events": len(warmup) if known else None,
        "warmup_s": warmup_s if known else None,
        "serving_events": len(serving) if known else None,
        "recompiles": facts.recompiles if known else None,
        "graph_captures": sum(event.kind == "graph_capture" for event in serving) if known else None,
        "limit_hits": sum(event.kind == "limit_hit" for event in serving) if known else None,
        "eager_fallback_pct": _eager_fallback_pct(run, arm),
        "longest_event_s": facts.longest_event_s if known else None,
        "longest_stall_s": facts.longest_stall_s if waited else None,
        "stall_s": run.stall_s(arm) if known else None,
        "stall_s_per_min": facts.stall_s_per_min if known else None,
        "requests_hit": facts.requests_hit if waited else None,
        "requests_hit_pct": 100.0 * facts.requests_hit / facts.requests if waited and facts.requests else None,
        "causes": _causes(run, arm) if known else None,
        "backlog": _backlog(run, arm) if known else None,
        **compiler_facts(run.records.directory, arm),
        **{part: _part_row(own) if known else None for part, own in parts.items()},
    }
    for metric in ("ttft", "e2e"):
        found = counterfactual(run, arm, metric)
        row["without_withdrawn"] = found.withdrawn
        row[f"p99_{metric}_ms_without"] = found.without_ms
        row[f"p99_{metric}_ms_without_least"] = found.least_ms
        row[f"p99_{metric}_ms_without_most"] = found.most_ms
        row[f"p99_{metric}_ms_without_low"] = found.low_ms
        row[f"p99_{metric}_ms_without_high"] = found.high_ms
        row[f"p99_{metric}_explained_pct"] = found.explained_pct
        row[f"p99_{metric}_explained_low_pct"] = found.explained_low_pct
        row[f"p99_{metric}_explained_high_pct"] = found.explained_high_pct
    return row


def _causes(run: Run, arm: str) -> dict[str, dict[str, Any]]:
    """What compiles did to the arm's requests, and what the requests that took much too long are put down to."""
    own = np.flatnonzero(run.of_arm(arm) & ~run.requests.broken)
    beyond = excursions(run.requests, run.attribution, arm=arm, control=run.control)
    rows = {}
    for code, cause in reversed(list(enumerate(CAUSES))):
        held = own[run.attribution.cause[own] == code]
        mine = run.attribution.cause[beyond.rows] == code
        rows[cause] = {
            "requests": int(held.size),
            "seconds": float(run.attribution.stall_ms[held].sum()) / 1e3,
            "backlog_s": float(run.attribution.backlog_ms[held].sum()) / 1e3,
            "excursions": int(mine.sum()),
            "excess_s": float(beyond.excess_ms[mine].sum()) / 1e3,
        }
    return rows


def _backlog(run: Run, arm: str) -> dict[str, Any]:
    """The arm's requests in the backlog of compiles, those among them that no compile touched, and those of the latter
    that are judged as steady traffic."""
    own = run.of_arm(arm)
    waited = own & (run.attribution.backlog_ms > 0)
    behind = own & (run.attribution.cause == BACKLOG)
    steady = run.steady(own & run.usable, (arm,))
    return {
        "requests": int(waited.sum()),
        "seconds": float(run.attribution.backlog_ms[waited].sum()) / 1e3,
        "untouched": int(behind.sum()),
        "steady_requests": int(steady.size),
        "steady_behind": int(behind[steady].sum()),
    }


def _part_row(facts: CompileFacts) -> dict[str, Any]:
    """What compiles did in the cold starts, or past them."""
    return {
        "recompiles": facts.recompiles,
        "longest_event_s": facts.longest_event_s,
        "longest_stall_s": facts.longest_stall_s,
        "stall_s_per_min": facts.stall_s_per_min,
        "requests_hit": facts.requests_hit,
        "requests": facts.requests,
    }


def _eager_fallback_pct(run: Run, arm: str) -> float | None:
    """The share of steps that ran uncompiled on an arm that asks for compiling; None elsewhere."""
    steps = run.steps(arm) if run.account(arm).compiles else None
    if steps is None:
        return None
    known = steps.column("compiled").drop_null()
    total = len(known)
    return 100.0 * (1.0 - (pc.sum(known).as_py() or 0) / total) if total else None


def _padding(run: Run, arm: str) -> dict[str, Any]:
    steps = None if run.account(arm).external else run.steps(arm)
    if steps is None:
        return dict.fromkeys(("tokens", "padded_tokens", "waste_pct", "prefill_waste_pct", "decode_waste_pct"))
    tokens, padded, waste = _waste(steps)
    by_kind = {kind: _waste(steps.filter(pc.equal(steps.column("kind"), kind)))[2] for kind in ("prefill", "decode")}
    return {
        "tokens": tokens,
        "padded_tokens": padded,
        "waste_pct": waste,
        "prefill_waste_pct": by_kind["prefill"],
        "decode_waste_pct": by_kind["decode"],
    }


def _waste(steps: pa.Table) -> tuple[int, int, float | None]:
    tokens = int(pc.sum(steps.column("tokens")).as_py() or 0)
    padded = int(pc.sum(steps.column("padded_tokens")).as_py() or 0)
    return tokens, padded, 100.0 * (1.0 - tokens / padded) if padded else None
