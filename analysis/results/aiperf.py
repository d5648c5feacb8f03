"""profile_export.jsonl, as AIPerf 0.13 writes it, and what profile_export_aiperf.json beside it says of the load.

A line of JSON a request: moments in ns since the epoch, metrics in ms. The moment at which the rate limiter let a
request go is kept, so latency counts from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.arrays import Floats, Ints
from analysis.records.plain_values import mapping, number, rows_of, text_of
from analysis.records.tables import RecordError
from analysis.results.result import (
    CLOSED_LOOP,
    Result,
    count_or_none,
    numbers,
    requests_table,
    times_table,
)
from analysis.wording import counted

TOOL = "AIPerf"

_OPEN = ("poisson", "gamma", "constant", "fixed_schedule")
_OF_LOAD = ("type", "rate", "concurrency", "users", "smoothness")
_LAST_NS = 9.2e18  # beyond any clock


def is_aiperf(lines: Sequence[Any]) -> bool:
    """Whether the lines are records of AIPerf's."""
    return bool(lines) and all(isinstance(row, Mapping) and {"metadata", "metrics"} <= row.keys() for row in lines)


def is_summary(document: Mapping[str, Any]) -> bool:
    """Whether the table is AIPerf's summary."""
    return "aiperf_version" in document


def summary_path(path: Path) -> Path:
    """Where the summary lies of the records at `path`."""
    return path.with_name("profile_export_aiperf.json" if path.stem == "profile_export" else f"{path.stem}.json")


def result_of(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None = None) -> Result:
    """The requests of the lines; `summary` is the table beside them, None where there is none."""
    about = [mapping(row["metadata"]) for row in lines]
    metrics = [mapping(row["metrics"]) for row in lines]
    start = _moments(about, "request_start_ns")
    took_ms, first_ms = _ms(metrics, "request_latency"), _ms(metrics, "time_to_first_token")
    end = np.where(np.isnan(took_ms), _moments(about, "request_end_ns"), start + _ns(took_ms))
    seen = ~np.isnan(first_ms)
    errors = [mapping(row.get("error")) for row in lines]
    cancelled = [row.get("was_cancelled") is True for row in about]
    pace, open_loop, concurrency, load = _pace(mapping(mapping(summary).get("input_config")))
    columns: dict[str, Any] = {
        "request_id": [text_of(row, "x_request_id") or None for row in about],
        "session_id": [text_of(row, "x_correlation_id") or None for row in about],
        "sent_ns": start,
        "first_token_ns": pa.array(start + _ns(first_ms), mask=~seen),
        "end_ns": end,
        "status": [
            "CANCELLED" if cut else "UNKNOWN" if row.get("error") is not None else "OK"
            for row, cut in zip(lines, cancelled, strict=True)
        ],
        "error": [(text_of(row, "message") or text_of(row, "type"))[:200] or None for row in errors],
        "prompt_tokens": [_count(row, "usage_prompt_tokens", "input_sequence_length") for row in metrics],
        "output_tokens": [_count(row, "usage_completion_tokens", "output_sequence_length") for row in metrics],
        "token_ns": times_table([_offsets(row, place) for place, row in enumerate(metrics)]),
        "phase": ["rampup" if row.get("benchmark_phase") == "warmup" else "measure" for row in about],
    }
    issued = _moments(about, "credit_issued_ns", needed=False)
    if open_loop is not False:
        columns["scheduled_ns"] = pa.array(issued, mask=issued <= 0)
    sent = count_or_none(mapping(mapping(summary).get("completed_request_count")).get("avg"))
    models = rows_of(mapping(mapping(mapping(summary).get("input_config")).get("models")).get("items"))
    return Result(
        tool=TOOL,
        requests=requests_table(len(lines), columns),
        pace=pace,
        open_loop=open_loop,
        concurrency=concurrency,
        sent=sent,
        model=next((text_of(row, "name") for row in models), None) or None,
        load=load,
        problems=(f"is of a run that did not end ({text_of(mapping(summary), 'incomplete_reason', 'no reason')})",)
        if mapping(summary).get("is_complete") is False
        else (),
    )


def _pace(config: Mapping[str, Any]) -> tuple[str, bool | None, int | None, dict[str, Any]]:
    """How requests were sent, whether without waiting for answers, how many at most, and the settings of the load."""
    phases = [row for row in rows_of(config.get("phases")) if row.get("kind") != "warmup"]
    origin = f"{TOOL} keeps when its rate limiter let a request go, and latency counts from there"
    if not phases:
        return f"{origin}; how the load was made is not known without the summary beside the records.", None, None, {}
    if len(phases) > 1:
        raise RecordError(f"is of {len(phases)} phases, each of a load of its own: run it again with one")
    (phase,) = phases
    load = {key: phase[key] for key in _OF_LOAD if phase.get(key) is not None}
    kind, limit = text_of(phase, "type"), number(phase.get("concurrency"))
    most = int(limit) if limit else None
    if kind in _OPEN:
        if most is None:
            return f"{origin}.", True, None, load
        how = f"kept at most {counted(most, 'request')} under way, and not what others waited for room"
        return f"{TOOL} {how} {CLOSED_LOOP}.", False, most, load
    how = f"kept {counted(most, 'request')} under way" if most else "had users who waited for their answers"
    return f"{TOOL} {how} and sent the next when one ended {CLOSED_LOOP}.", False, most, load


def _moments(rows: Sequence[Mapping[str, Any]], name: str, *, needed: bool = True) -> Ints:
    """The moment of each request, 0 where it has none. RecordError for one that is no moment."""
    for place, row in enumerate(rows):
        value = row.get(name)
        if (value is not None or needed) and (type(value) is not int or not 0 <= value < _LAST_NS):
            raise RecordError(f"has {name} {value!r} in line {place + 1}; it counts ns since the epoch: run it again")
    return np.array([row.get(name) or 0 for row in rows], dtype=np.int64)


def _value(row: Mapping[str, Any], name: str) -> Any:
    """The metric's value; RecordError where it is in another unit than ms."""
    metric = mapping(row.get(name))
    if metric and metric.get("unit") != "ms":
        raise RecordError(f"has {name} in {metric.get('unit')!r}; the unit read is ms: give a file of AIPerf 0.13")
    return metric.get("value")


def _ms(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    """The metric of each request, NaN where it has none. RecordError for one below 0."""
    values = [_value(row, name) for row in rows]
    known = [place for place, value in enumerate(values) if value is not None]
    column = np.full(len(rows), np.nan)
    column[known] = numbers([values[place] for place in known], name, remedy="run it again")
    return column


def _ns(ms: Floats) -> Ints:
    return np.rint(np.nan_to_num(ms) * 1e6).astype(np.int64)


def _offsets(row: Mapping[str, Any], place: int) -> list[float]:
    """The time of each piece of the answer in seconds from its send; empty where they are not kept."""
    first, gaps = _value(row, "time_to_first_token"), _value(row, "inter_chunk_latency")
    if first is None or gaps is None:
        return []
    what = f"line {place + 1}: inter_chunk_latency"
    return list(np.cumsum([first, *numbers(gaps, what, remedy="run it again")]) / 1e3)


def _count(row: Mapping[str, Any], *names: str) -> int | None:
    """The first of these counts that the request has: the server's own before the client's."""
    known = (count_or_none(mapping(row.get(name)).get("value")) for name in names)
    return next((value for value in known if value is not None), None)
