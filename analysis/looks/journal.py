"""looks.jsonl: one line a look, for whoever wants to see a verdict form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.judging.gates import Gate
from analysis.looks.look import Look
from analysis.records.documents import read_rows
from analysis.run.run import Run
from analysis.statistics.quantiles import quantile

JOURNAL = "looks.jsonl"
PREVIEW = "preview.jsonl"  # looks by which nothing is decided


def row_of(look: Look, run: Run, *, number: int, at_ns: int) -> dict[str, Any]:
    """The look as plain values. Times are ns since the epoch and seconds of judged traffic, latencies ms, `harm` and
    `safety` e-values as decimal logarithms, of which a FAIL takes `needed` and a PASS `needed_safety`."""
    return {
        "look": number,
        "at_ns": at_ns,
        "trial": look.trial,
        "seconds": look.seconds,
        "sequential": run.limits.sequential,
        "decided": look.decided,
        "arms": {
            item.arm: {
                "decision": item.decision,
                "decided_s": item.decided_s,
                "outlook_s": item.outlook_s,
                "hopeless": item.hopeless,
                "reason": item.reason,
            }
            for item in look.arms
        },
        **({} if look.step is None else {"step": asdict(look.step)}),
        "gates": [_gate(gate) for gate in look.gates],
        "checks": [
            {
                "check": check.check,
                "arm": check.arm,
                "ok": check.ok,
                "value": check.value,
                "limit": check.limit,
                "reason": check.reason,
                "remedy": check.remedy,
            }
            for check in look.checks
        ],
        "latency": {arm: _latency(run, arm) for arm in run.arms},
    }


def _gate(gate: Gate) -> dict[str, Any]:
    """Value, limit and interval are in one unit: of an objective all are shares of requests, as its interval is."""
    path = gate.path
    known = path is not None and len(path.at_s) > 0
    return {
        "arm": gate.arm,
        "gate": gate.gate,
        "kind": gate.kind,
        "unit": gate.path_unit,
        "limit": gate.path_limit,
        "value": (_finite(path.value[-1]) if known else None) if path is not None and gate.is_share else gate.value,
        "low": _finite(path.low[-1]) if path is not None and known else gate.low,
        "high": _finite(path.high[-1]) if path is not None and known else gate.high,
        "verdict": gate.verdict,
        "reason": gate.reason,
        "decided_s": None if path is None else path.decided_s,
        "outlook_s": None if path is None else path.outlook_s,
        "harm": _finite(path.harm[-1]) if path is not None and known else None,
        "safety": _finite(path.safety[-1]) if path is not None and known else None,
        "needed": None if path is None else _finite(path.needed),
        "needed_safety": None if path is None else _finite(path.needed_safety),
    }


def _latency(run: Run, arm: str) -> Mapping[str, Any]:
    own = run.of_arm(arm) & run.usable
    found = {}
    for metric in [name for name in ("ttft", "e2e") if name in run.metrics]:
        values = run.requests.metric_ms(metric)[own]
        values = values[~np.isnan(values)]
        found[f"{metric}_ms"] = {name: _finite(quantile(values, q)) for name, q in (("p50", 0.5), ("p99", 0.99))}
    return found


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def append(directory: Path, row: Mapping[str, Any], *, journal: str = JOURNAL) -> None:
    """The row is the last line of the journal, in the hands of the kernel."""
    with (directory / journal).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_looks(directory: Path, *, journal: str = JOURNAL) -> list[dict[str, Any]]:
    """Every whole line of the journal; empty where there is none."""
    return read_rows(directory / journal)[0]
