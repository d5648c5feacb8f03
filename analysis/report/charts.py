"""The part of a summary that the charts draw, small and safe to embed in a script element."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from analysis.records.schemas import EVENT_KINDS
from analysis.summary.model import Bins, Frontier, Histogram, Summary


def chart_data(summary: Summary) -> dict[str, Any]:
    """What the scripts need: arms by index, columns of the time series, events, distributions."""
    names = [arm.name for arm in summary.arms]
    index = {name: position for position, name in enumerate(names)}
    places = {"trial", "offset_s", "seconds"}
    return {
        "arms": [{"name": name} for name in names],
        "kinds": EVENT_KINDS,
        "metrics": summary.metric_names,
        "bin_s": summary.series.bin_s,
        "block_s": summary.design.block_s,
        "duration_s": summary.design.duration_s,
        "series": [summary.series.arms.get(name, Bins()) for name in names],
        "events": [
            {"arm": index.get(event.arm), **event.model_dump(include={*places, "kind", "shape", "requests_hit"})}
            for event in summary.events
        ],
        "spikes": [
            {"arm": index.get(spike.arm), **spike.model_dump(include={*places, "cause", "explained_pct"})}
            for spike in summary.spikes
            if spike.offset_s is not None
        ],
        "stalls": [
            {"arm": index[arm.name], **stall.model_dump(include=places)}
            for arm in summary.arms
            for stall in arm.client_stalls.unexplained
        ],
        # The SLO line of a chart, by quantile and metric: {"p99_ttft_ms": 2000.0}.
        "limits": {gate.gate.removeprefix("slo "): gate.limit for gate in summary.gates if gate.kind == "slo"},
        "distribution": {
            metric: [arms.get(name, Histogram()) for name in names] for metric, arms in summary.distribution.items()
        },
        "knees": _knees(summary.frontier, index),
    }


def script_json(data: object) -> str:
    """JSON that can stand in a script element: no "</script" or "<!--" can occur in it."""
    return re.sub("[<>&]", lambda mark: f"\\u{ord(mark[0]):04x}", to_json(data, inf_nan_mode="null").decode())


def _knees(search: Frontier | None, index: Mapping[str, int]) -> dict[str, Any]:
    """Latency of each arm against load; empty where no search was made."""
    if search is None or not search.latency:
        return {}
    steps = [row.model_dump() | {"arm": index.get(row.arm)} for row in search.steps if row.ms is not None]
    return {"label": search.latency, "limit_ms": search.limit_ms, "steps": steps}
