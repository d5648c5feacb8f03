"""interim.jsonl: one line for each interim analysis."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.interim.outlook import Interim
from analysis.judging.gates import Gate
from analysis.records.documents import read_rows
from analysis.run.run import Run
from analysis.statistics.quantiles import quantile

JOURNAL = "interim.jsonl"
PREVIEW = "preview.jsonl"  # analyses by which nothing is decided


_OF_CHECKS = ("check", "arm", "ok", "value", "limit", "reason", "remedy")


def row_of(interim: Interim, run: Run, *, number: int, at_ns: int) -> dict[str, Any]:
    """The analysis as plain values. Times are ns since the epoch and seconds of judged traffic, latencies ms, `harm`
    and `safety` e-values as decimal logarithms, of which a FAIL takes `needed` and a PASS `needed_safety`."""
    arms = {item.arm: {key: value for key, value in asdict(item).items() if key != "arm"} for item in interim.arms}
    return {
        "number": number,
        "at_ns": at_ns,
        "trial": max((trial.number for trial in run.trials), default=1),
        "seconds": run.seconds,
        "sequential": run.limits.sequential,
        "arms": arms,
        **({} if interim.step is None else {"step": asdict(interim.step)}),
        "gates": [_gate(gate) for gate in interim.gates],
        "checks": [{key: getattr(check, key) for key in _OF_CHECKS} for check in interim.checks],
        "latency": {arm: _latency(run, arm) for arm in run.arms},
    }


def _gate(gate: Gate) -> dict[str, Any]:
    """Value, limit and interval are in one unit: of an objective all are shares of requests, as its interval is."""
    path = gate.path
    last: dict[str, float | None] = {"value": None, "low": gate.low, "high": gate.high, "harm": None, "safety": None}
    if path is not None and len(path.at_s):
        last = {name: _finite(getattr(path, name)[-1]) for name in last}
    return {
        **{name: getattr(gate, name) for name in ("arm", "gate", "kind", "verdict", "reason")},
        "unit": "pct" if gate.is_share else gate.unit,
        "limit": gate.limit if path is None else path.limit,
        **last,
        "value": last["value"] if gate.is_share else gate.value,
        **{name: getattr(path, name, None) for name in ("decided_s", "outlook_s")},
        **{name: None if path is None else _finite(getattr(path, name)) for name in ("needed", "needed_safety")},
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


def read_interim(directory: Path, *, journal: str = JOURNAL) -> list[dict[str, Any]]:
    """Every whole line of the journal; empty where there is none."""
    return read_rows(directory / journal)[0]
