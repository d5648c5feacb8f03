"""From a run directory to the one JSON document that says what happened and what follows from it.

This module only arranges: it reads the run, has it judged, and writes what came of it. The same records and seed
give the same bytes.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.arms import arm_row
from analysis.compare import Comparison
from analysis.gates import FAIL, INCONCLUSIVE, PASS, Gate, noninferiority_name
from analysis.judgement import Judgement, judge
from analysis.quantiles import quantile_interval, quantiles
from analysis.records import read_run
from analysis.run import SECOND, Run
from analysis.saturation import summary_rows
from analysis.slo import design_effect
from analysis.spikes import Spike, find_spikes
from analysis.traffic import traffic_facts
from analysis.validity import Check

SCHEMA = 1
EXIT_CODES = {PASS: 0, INCONCLUSIVE: 3, FAIL: 99}

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_MOST_EVENTS = 500
_MOST_REQUEST_IDS = 50
_MOST_BINS = 1200
_CURVE_BINS = 60


def analyze(run_dir: Path, *, seed: int | None = None) -> dict[str, Any]:
    """The summary of the run in `run_dir`, ready for JSON. Raises RecordError when there is nothing to judge.

    `seed` drives the permutations; by default the experiment's own.
    """
    run = Run.of(read_run(run_dir), seed)
    return {key: _plain(value) for key, value in _summary(run, judge(run)).items()}


def write_summary(summary: Mapping[str, Any], path: Path) -> None:
    """`path` holds the summary as JSON, whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def exit_code(summary: Mapping[str, Any]) -> int:
    """0 for PASS, 99 for FAIL, 3 for INCONCLUSIVE."""
    return EXIT_CODES[str(summary["overall"])]


def _summary(run: Run, judgement: Judgement) -> dict[str, Any]:
    spikes = find_spikes(run.requests, run.attribution, run.events, control=run.control)
    return {
        "schema": SCHEMA,
        "name": run.name,
        "run_id": run.run_id,
        "created": _created(run),
        "overall": judgement.overall,
        "exit_code": EXIT_CODES[judgement.overall],
        "headline": judgement.headline,
        "control": run.control,
        "seed": run.seed,
        "arms": [arm_row(run, arm, judgement) for arm in run.arms],
        "comparisons": [_comparison_row(item, judgement.gates) for item in (*judgement.steady, *judgement.everything)],
        "gates": [_gate_row(gate) for gate in judgement.gates],
        "validity": [_check_row(check) for check in judgement.checks],
        "parity": _parity(run),
        "spikes": [_spike_row(run, spike) for spike in spikes],
        "events": _events(run),
        "series": _series(run),
        "distribution": _distribution(run),
        "design": _design(run),
        **({"traffic": traffic} if (traffic := traffic_facts(run)) else {}),
        **({"saturation": search} if (search := summary_rows(run)) else {}),
        "advice": {"needed_s": judgement.advice.needed_s, "text": judgement.advice.text},
        "environment": run.records.environment,
    }


def _created(run: Run) -> str | None:
    """When the first request started, in UTC."""
    started_ns = min((trial.first_ns for trial in run.trials if trial.first_ns > 0), default=0)
    try:
        moment = datetime.datetime.fromtimestamp(started_ns // SECOND, tz=datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat() if started_ns > 0 else None


def _comparison_row(item: Comparison, gates: Sequence[Gate]) -> dict[str, Any]:
    name = noninferiority_name(item)
    gate = next(row for row in gates if row.arm == item.arm and row.gate == name)
    blocked = gate.blocked_by if item.verdict != INCONCLUSIVE else ()
    steady = item.phase == "steady"
    return {
        "arm": item.arm,
        "control": item.control,
        "metric": item.metric,
        "phase": item.phase,
        "quantile": item.quantile,
        "ratio": item.ratio,
        "low": item.low,
        "high": item.high,
        "p_worse": item.p_worse,
        "p_noninferior": item.p_noninferior,
        "p_inferior": item.p_inferior,
        "p_inferior_holm": item.p_inferior_holm,
        "cross_p_noninferior": item.cross_p_noninferior,
        "cross_p_inferior": item.cross_p_inferior,
        "autocorrelation": item.autocorrelation,
        "margin": item.margin,
        "method": item.method,
        "blocks": item.blocks,
        "trials": item.trials,
        "requests": item.requests,
        # What the test alone says; the verdict also heeds the validity checks.
        "test_verdict": item.verdict,
        "verdict": gate.verdict if steady else INCONCLUSIVE if blocked else item.verdict,
        "reason": gate.reason if steady else item.reason,
        "needed_s": gate.needed_s if steady else None,
    }


def _gate_row(gate: Gate) -> dict[str, Any]:
    return {
        "arm": gate.arm,
        "gate": gate.gate,
        "kind": gate.kind,
        "value": gate.value,
        "limit": gate.limit,
        "unit": gate.unit,
        "verdict": gate.verdict,
        "reason": gate.reason,
        "needed_s": gate.needed_s,
        "blocked_by": list(gate.blocked_by),
    }


def _check_row(check: Check) -> dict[str, Any]:
    return {
        "check": check.check,
        "ok": check.ok,
        "arm": check.arm,
        "value": check.value,
        "limit": check.limit,
        "reason": check.reason,
        "affects": list(check.affects),
        "remedy": check.remedy,
    }


_PARITY_FACTS = ("verdict", "dtype", "reference", "requests", "positions", "vocabulary", "control")


def _parity(run: Run) -> dict[str, Any]:
    """What was measured of each arm before the traffic, and what its replicas answered after it."""
    measured = run.records.parity or {}
    return {
        **{name: measured.get(name) for name in _PARITY_FACTS},
        "arms": [
            {"name": arm, "measured": dict(run.parity(arm)) or None, "answers": [dict(row) for row in run.answers(arm)]}
            for arm in run.arms
        ],
    }


def _spike_row(run: Run, spike: Spike) -> dict[str, Any]:
    return {
        "arm": spike.arm,
        "trial": spike.trial,
        "start_ns": spike.start_ns,
        "end_ns": spike.end_ns,
        "offset_s": run.offset_s(spike.trial, spike.start_ns),
        "metric": "e2e",
        "peak_ms": spike.peak_ms,
        "requests": spike.requests,
        "cause": spike.cause,
        "event_ids": list(spike.event_ids),
        "explained_pct": spike.explained_pct,
    }


_EVENT_COLUMNS = (
    *("compile_id", "frame", "reason", "shape", "dynamic", "cache", "batch_id", "backend_ns", "phase"),
    *("autotune_ns", "guards", "nodes", "kernels", "breaks"),
)


def _events(run: Run) -> list[dict[str, Any]]:
    """Serving events of all arms, those that cost requests most first."""
    rows: list[dict[str, Any]] = []
    for event, hit in zip(run.events, run.attribution.event_requests, strict=True):
        if not event.serving:
            continue
        rows.append(
            {
                "event_id": event.event_id,
                "trial": event.trial,
                "arm": event.arm,
                "replica": event.replica,
                "kind": event.kind,
                "start_ns": event.start_ns,
                "end_ns": event.end_ns,
                **{name: event.row.get(name) for name in _EVENT_COLUMNS},
                "request_ids": list(event.request_ids[:_MOST_REQUEST_IDS]),
                "request_count": len(event.request_ids),
                "seconds": event.seconds,
                "requests_hit": int(hit.size),
                "offset_s": run.offset_s(event.trial, event.start_ns),
            }
        )
    rows.sort(key=lambda row: (-row["seconds"], -row["requests_hit"], row["arm"], row["start_ns"], row["event_id"]))
    return rows[:_MOST_EVENTS]


def _series(run: Run) -> dict[str, Any]:
    """Latency over time, by when requests were due."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / _MOST_BINS)))
    requests = run.requests
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm in run.arms:
        points: list[dict[str, Any]] = []
        for trial in run.trials:
            own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
            bins = (requests.start_ns[own] - trial.start_ns) // int(bin_s * SECOND)
            order = np.argsort(bins, kind="stable")
            own, bins = own[order], bins[order]
            starts = np.flatnonzero(np.diff(bins, prepend=bins[:1] - 1)) if own.size else np.zeros(0, dtype=np.int64)
            for rows, number in zip(np.split(own, starts[1:]), bins[starts].tolist(), strict=False):
                ttft = quantiles(requests.ttft_ms[rows], (0.5, 0.99))
                e2e = quantiles(requests.e2e_ms[rows], (0.5, 0.99, 1.0))
                points.append(
                    {
                        "trial": trial.number,
                        "t_s": number * bin_s,
                        "n": int(rows.size),
                        "ttft_p50_ms": ttft[0],
                        "ttft_p99_ms": ttft[1],
                        "e2e_p50_ms": e2e[0],
                        "e2e_p99_ms": e2e[1],
                        "e2e_max_ms": e2e[2],
                        "failed": int(requests.failed[rows].sum()),
                    }
                )
        arms[arm] = points
    return {"bin_s": bin_s, "arms": arms}


def _distribution(run: Run) -> dict[str, Any]:
    """Histograms on edges common to the arms, and quantiles with 95 % limits that allow for bunching."""
    metrics: dict[str, dict[str, Any]] = {}
    for metric in ("ttft", "e2e"):
        values = run.requests.metric_ms(metric)
        usable = run.usable & ~np.isnan(values) & (values > 0)
        metrics[metric] = {}
        if not usable.any():
            continue
        low, high = float(values[usable].min()), float(values[usable].max())
        edges = np.geomspace(low * 0.999, max(high, low * 1.01) * 1.001, _CURVE_BINS + 1)
        for arm in run.arms:
            own = usable & run.of_arm(arm)
            mine, block = values[own], run.block[own]
            curve = []
            for q, value in zip(_QUANTILES, quantiles(mine, _QUANTILES), strict=True):
                effect = design_effect(mine > value, block)
                lower, upper = quantile_interval(mine, q, confidence=0.95, design_effect=effect)
                curve.append([q, value, lower, upper])
            metrics[metric][arm] = {
                "edges_ms": edges.tolist(),
                "counts": np.histogram(mine, edges)[0].tolist(),
                "ecdf": curve,
            }
    return {"metrics": metrics}


def _design(run: Run) -> dict[str, Any]:
    planned, open_loop = run.planned, run.told_open_loop
    return {
        "design": run.design,
        "duration_s": max((trial.seconds for trial in run.trials), default=0.0),
        "trials": len(run.trials),
        "block_s": run.block_s,
        "blocks": run.blocks,
        "planned": sum(planned.values()) if planned else None,
        "open_loop": bool(run.requests.scheduled.all()) if open_loop is None else open_loop,
        "generator_lag_p99_ms": run.generator_lag_ms,
    }


def _plain(value: Any) -> Any:
    """`value` in JSON's own types: unknown numbers become null, and floats keep seven digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        # Sums differ in their last digits between machines; nothing is known to more than seven.
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    return str(value)
