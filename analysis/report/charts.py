"""The part of a summary that the charts draw, small and safe to embed in a script element."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from analysis.records.schemas import EVENT_KINDS
from analysis.report.arms import arm_names, metric_names
from analysis.report.stalls import unexplained_stalls
from analysis.report.values import Row, at, clean, is_number, metric_label, rows, text
from analysis.settings.metrics import METRIC_NAMES

SERIES = ("ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "e2e_max_ms")
SHOWN_REQUESTS = 12
SHOWN_REASON = 400


def chart_data(summary: Row) -> dict[str, Any]:
    """What the scripts need: arms by index, columns of the time series, events, distributions, padding, comparisons."""
    names = arm_names(summary)
    index = {name: position for position, name in enumerate(names)}
    data = {
        "arms": [{"name": name, "control": name == at(summary, "control")} for name in names],
        "kinds": dict(EVENT_KINDS),
        "metrics": metric_names(summary),
        "bin_s": at(summary, "series", "bin_s"),
        "block_s": at(summary, "design", "block_s"),
        "duration_s": at(summary, "design", "duration_s"),
        "series": [_columns(rows(summary, "series", "arms", name)) for name in names],
        "events": [_event(event, index) for event in rows(summary, "events")],
        "spikes": _spikes(summary, index),
        "stalls": [
            {"arm": index.get(str(name)), "trial": stall.get("trial")}
            | {"at_s": stall.get("offset_s"), "seconds": stall.get("seconds")}
            for name, stall in unexplained_stalls(summary)
        ],
        **({"machines": machines} if (machines := _machines(summary, index)) else {}),
        **({"server_load": load} if (load := _server_load(summary, index)) else {}),
        "limits": _limits(summary),
        "distribution": _distribution(summary, names),
        "knees": _knees(summary, index),
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


def _columns(series: list[Row]) -> dict[str, list[Any]]:
    """Columns instead of a table a bin, in order of trial and time."""
    ordered = sorted(
        (row for row in series if is_number(row.get("t_s"))), key=lambda row: (row.get("trial") or 0, row["t_s"])
    )
    columns: dict[str, list[Any]] = {key: [_rounded(row.get(key)) for row in ordered] for key in SERIES}
    columns |= {key: [row.get(key) for row in ordered] for key in ("trial", "n", "failed")}
    columns["t_s"] = [round(float(row["t_s"]), 6) for row in ordered]
    return columns


def _event(event: Row, index: Mapping[str, int]) -> dict[str, Any]:
    ids = event.get("request_ids")
    return {
        "arm": index.get(str(event.get("arm"))),
        "trial": event.get("trial"),
        "kind": event.get("kind"),
        "at_s": event.get("offset_s"),
        "seconds": event.get("seconds"),
        "shape": text(event.get("shape")),
        "reason": text(event.get("reason"))[:SHOWN_REASON],
        "hits": event.get("requests_hit"),
        "requests": [text(item) for item in ids[:SHOWN_REQUESTS]] if isinstance(ids, list) else [],
    }


def _spikes(summary: Row, index: Mapping[str, int]) -> list[dict[str, Any]]:
    shown = []
    for spike in rows(summary, "spikes"):
        offset, start, end = (spike.get(key) for key in ("offset_s", "start_ns", "end_ns"))
        if is_number(offset) and is_number(start) and is_number(end):
            shown.append(
                {
                    "arm": index.get(str(spike.get("arm"))),
                    "trial": spike.get("trial"),
                    "metric": spike.get("metric"),
                    "start_s": _rounded(offset),
                    "end_s": _rounded(offset + (end - start) / 1e9),
                    "cause": text(spike.get("cause")),
                    "explained_pct": _rounded(spike.get("explained_pct")),
                }
            )
    return shown


def _machines(summary: Row, index: Mapping[str, int]) -> dict[str, Any]:
    """The samples of the machines; a device has the colour of the arm that it served in the trial."""
    series = at(summary, "machines", "series")
    served = {
        _machine(row): row["arms"] for row in rows(summary, "machines", "devices") if isinstance(row.get("arms"), list)
    }
    shown = []
    for row in rows(series, "rows"):
        times = row.get("t_s")
        if not isinstance(times, list) or not all(map(is_number, times)):
            continue
        arms = [text(arm) for arm in served.get(_machine(row), [])]
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
    return {**{key: at(series, key) for key in ("bin_s", "stretch_s")}, "rows": shown} if shown else {}


def _server_load(summary: Row, index: Mapping[str, int]) -> dict[str, Any]:
    """What the pages of external arms say, a row a page and trial, with the colour of the arm."""
    shown = []
    for row in rows(summary, "server_load", "rows"):
        times = row.get("t_s")
        if not isinstance(times, list) or not all(map(is_number, times)):
            continue
        columns = {key: value for key, value in row.items() if isinstance(value, list) and len(value) == len(times)}
        shown.append(
            {
                "trial": row.get("trial"),
                "arm": index.get(str(row.get("arm"))),
                "label": text(row.get("replica") or row.get("arm")),
                **{key: [_rounded(item) for item in value] for key, value in columns.items()},
            }
        )
    return {"bin_s": at(summary, "server_load", "bin_s"), "rows": shown} if shown else {}


def _machine(row: Row) -> tuple[str, ...]:
    return tuple(text(row.get(key)) for key in ("trial", "host", "name"))


def _limits(summary: Row) -> dict[str, float]:
    """The SLO line of a chart, by series key: {"ttft_p99_ms": 2000.0}."""
    limits: dict[str, float] = {}
    for gate in rows(summary, "gates"):
        named = re.search(rf"(p\d+(?:_\d+)?)_({'|'.join(METRIC_NAMES)})", text(gate.get("gate")))
        if named and gate.get("kind") == "slo" and gate.get("unit") == "ms" and is_number(gate.get("limit")):
            limits.setdefault(f"{named[2]}_{named[1]}_ms", float(gate["limit"]))
    return limits


def _distribution(summary: Row, names: list[str]) -> dict[str, list[Any]]:
    metrics = at(summary, "distribution", "metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {
        str(metric): [
            {
                "edges_ms": at(arms, name, "edges_ms") or [],
                "counts": at(arms, name, "counts") or [],
                "ladder": at(arms, name, "ecdf") or [],
            }
            for name in names
        ]
        for metric, arms in metrics.items()
    }


def _knees(summary: Row, index: Mapping[str, int]) -> dict[str, Any]:
    """Latency of each arm against load; empty where no search was made."""
    found = at(summary, "frontier", "latency")
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
