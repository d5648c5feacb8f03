"""The part of a summary that the charts draw, small and safe to embed in a script element."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from analysis.records.schemas import EVENT_KINDS
from analysis.report.arms import arm_names, metric_names
from analysis.report.stalls import unexplained_stalls
from analysis.report.values import at, clean, is_number, metric_label, rows, text
from analysis.settings.metrics import METRIC_NAMES
from analysis.summary.model import Event, Histogram, Machines, Point, Spike, Summary

SERIES = ("ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "e2e_max_ms")
SHOWN_REQUESTS = 12
SHOWN_REASON = 400


def chart_data(summary: Summary) -> dict[str, Any]:
    """What the scripts need: arms by index, columns of the time series, events, distributions."""
    names = arm_names(summary)
    index = {name: position for position, name in enumerate(names)}
    data = {
        "arms": [{"name": name, "control": name == summary.control} for name in names],
        "kinds": dict(EVENT_KINDS),
        "metrics": metric_names(summary),
        "bin_s": summary.series.bin_s,
        "block_s": summary.design.block_s,
        "duration_s": summary.design.duration_s,
        "series": [_columns(summary.series.arms.get(name, [])) for name in names],
        "events": [_event(event, index) for event in summary.events],
        "spikes": [_spike(spike, index) for spike in summary.spikes if spike.offset_s is not None],
        "stalls": [
            {"arm": index[name], "trial": stall.trial, "at_s": stall.offset_s, "seconds": stall.seconds}
            for name, stall in unexplained_stalls(summary)
        ],
        "machines": _machines(summary.machines, index),
        "limits": _limits(summary),
        "distribution": {
            metric: [_outline(arms.get(name)) for name in names] for metric, arms in summary.distribution.items()
        },
        "knees": _knees(summary.frontier, index),
    }
    embedded: dict[str, Any] = clean(data)
    return embedded


def script_json(data: object) -> str:
    """JSON that can stand in a script element: no "</script", "<!--" or line separator can occur in it."""
    encoded = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: object) -> float | int | None:
    """Five significant digits: more than a pixel shows, and a third of the bytes."""
    return float(f"{value:.5g}") if is_number(value) else None


def _columns(series: list[Point]) -> dict[str, list[Any]]:
    """Columns instead of a table a bin, in order of trial and time."""
    ordered = sorted(series, key=lambda row: (row.trial, row.t_s))
    columns: dict[str, list[Any]] = {key: [_rounded(getattr(row, key)) for row in ordered] for key in SERIES}
    columns |= {key: [getattr(row, key) for row in ordered] for key in ("trial", "n", "failed")}
    columns["t_s"] = [round(row.t_s, 6) for row in ordered]
    return columns


def _event(event: Event, index: Mapping[str, int]) -> dict[str, Any]:
    return {
        "arm": index.get(event.arm),
        "trial": event.trial,
        "kind": event.kind,
        "at_s": event.offset_s,
        "seconds": event.seconds,
        "shape": text(event.shape),
        "reason": text(event.reason)[:SHOWN_REASON],
        "hits": event.requests_hit,
        "requests": list(map(text, event.request_ids[:SHOWN_REQUESTS])),
    }


def _spike(spike: Spike, index: Mapping[str, int]) -> dict[str, Any]:
    start_s = spike.offset_s or 0.0
    return {
        "arm": index.get(spike.arm),
        "trial": spike.trial,
        "metric": "e2e",
        "start_s": _rounded(start_s),
        "end_s": _rounded(start_s + spike.seconds),
        "cause": text(spike.cause),
        "explained_pct": _rounded(spike.explained_pct),
    }


def _outline(known: Histogram | None) -> dict[str, Any]:
    if known is None:
        return {"edges_ms": [], "counts": [], "ladder": []}
    return {"edges_ms": known.edges_ms, "counts": known.counts, "ladder": known.ecdf}


def _machines(machines: Machines, index: Mapping[str, int]) -> dict[str, Any] | None:
    """The samples of the machines; a device has the colour of the arm that it served in the trial."""
    series = machines.series
    served = {(text(row.trial), text(row.host), text(row.name)): row.arms for row in machines.devices}
    shown = []
    for row in rows(series, "rows"):
        times = row.get("t_s")
        if not isinstance(times, list) or not all(map(is_number, times)):
            continue
        arms = [
            text(arm) for arm in served.get((text(row.get("trial")), text(row.get("host")), text(row.get("name"))), [])
        ]
        name = text(row.get("name"))
        own = index.get(name) if row.get("kind") == "arm" else index.get(arms[0]) if arms else None
        columns = {key: value for key, value in row.items() if isinstance(value, list) and len(value) == len(times)}
        shown.append(
            {
                **{key: row.get(key) for key in ("trial", "kind")},
                "host": text(row.get("host")),
                "label": f"{name} ({', '.join(arms)})" if arms else name,
                "arm": own,
                **{key: [_rounded(item) for item in value] for key, value in columns.items()},
            }
        )
    return {**{key: at(series, key) for key in ("bin_s", "stretch_s")}, "rows": shown} if shown else None


def _limits(summary: Summary) -> dict[str, float]:
    """The SLO line of a chart, by series key: {"ttft_p99_ms": 2000.0}."""
    limits: dict[str, float] = {}
    for gate in summary.gates:
        named = re.search(rf"(p\d+(?:_\d+)?)_({'|'.join(METRIC_NAMES)})", gate.gate)
        if named and gate.kind == "slo" and gate.unit == "ms" and gate.limit is not None:
            limits.setdefault(f"{named[2]}_{named[1]}_ms", gate.limit)
    return limits


def _knees(search: Mapping[str, Any] | None, index: Mapping[str, int]) -> dict[str, Any]:
    """Latency of each arm against load; empty where no search was made."""
    found = at(search, "latency")
    if not isinstance(found, Mapping):
        return {}
    return {
        "label": metric_label(at(found, "metric"), at(found, "quantile")),
        "limit_ms": at(found, "limit_ms"),
        "steps": [
            {
                "arm": index.get(str(row.get("arm"))),
                **{key: _rounded(row.get(key)) for key in ("rate", "ms", "low_ms", "high_ms", "compile_s")},
                **{key: row.get(key) for key in ("trial", "requests", "compiles")},
            }
            for row in rows(found, "steps")
        ],
    }
