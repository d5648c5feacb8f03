"""profile_export.jsonl, as AIPerf 0.13 writes it, and what profile_export_aiperf.json next to it states of the load.

A line of JSON a request: moments in ns since the epoch, metrics in ms. The moment at which the rate limiter let a
request go is kept, so latency counts from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.imports.result import Result, Row, offsets_ns, requests_table
from analysis.records.plain_values import rows_of
from analysis.records.tables import RecordError

TOOL = "AIPerf"
SUMMARY = "aiperf_version"  # a key of the summary

_OPEN = ("poisson", "gamma", "constant", "fixed_schedule")
_OF_LOAD = ("type", "rate", "concurrency", "users", "smoothness")
_LAST_NS = 9.2e18  # beyond any clock


def is_aiperf(lines: Sequence[Any]) -> bool:
    """Return whether the lines are records of AIPerf."""
    return bool(lines) and all(isinstance(row, Mapping) and {"metadata", "metrics"} <= row.keys() for row in lines)


def summary_path(path: Path) -> Path:
    """Return where the summary of the records at `path` lies."""
    return path.with_name("profile_export_aiperf.json" if path.stem == "profile_export" else f"{path.stem}.json")


def result_of(content: Sequence[Any], summary: Mapping[str, Any] | None = None) -> Result:
    """Return the requests of the lines; `summary` is the table next to them, if it is AIPerf's. Raises RecordError."""
    about = Row(summary if summary is not None and SUMMARY in summary else {})
    phases = [row for row in rows_of(about.value("input_config.phases")) if row.get("kind") != "warmup"]
    if len(phases) > 1:
        raise RecordError(f"is of {len(phases)} phases, each of a load of its own: run it again with one")
    load = {key: phases[0][key] for key in _OF_LOAD if phases[0].get(key) is not None} if phases else {}
    limit = Row(load).count("concurrency") or None
    open_loop = load.get("type") in _OPEN and limit is None if phases else None
    models = [Row(model).text("name") for model in rows_of(about.value("input_config.models.items"))]
    unended = f"is of a run that did not end ({about.text('incomplete_reason') or 'no reason'})"
    return Result(
        tool=TOOL,
        requests=requests_table(content, lambda place, row: _columns(row, scheduled=open_loop is not False)),
        origin="when its rate limiter let a request go",
        open_loop=open_loop,
        concurrency=limit,
        sent=about.count("completed_request_count.avg"),
        model=next(filter(None, models), None),
        load=load,
        problems=(unended,) if about.value("is_complete") is False else (),
    )


def _columns(row: Row, *, scheduled: bool) -> dict[str, Any]:
    for name in ("request_latency", "time_to_first_token", "inter_chunk_latency"):
        unit = row.text(f"metrics.{name}.unit")
        if row.value(f"metrics.{name}") is not None and unit != "ms":
            raise RecordError(f"{name} is in {unit!r}; the unit read is ms: give a file of AIPerf 0.13")
    start, end = (row.needed(f"metadata.request_{what}_ns", most=_LAST_NS) for what in ("start", "end"))
    issued = row.number("metadata.credit_issued_ns", most=_LAST_NS)
    took, first = (row.number(f"metrics.{name}.value") for name in ("request_latency", "time_to_first_token"))
    gaps = row.numbers("metrics.inter_chunk_latency.value")
    failed = row.value("error") is not None
    cancelled = row.value("metadata.was_cancelled") is True
    return {
        "request_id": row.text("metadata.x_request_id") or None,
        "session_id": row.text("metadata.x_correlation_id") or None,
        "scheduled_ns": issued or None if scheduled else None,
        "sent_ns": start,
        "first_token_ns": None if first is None else start + round(first * 1e6),
        "end_ns": end if took is None else start + round(took * 1e6),
        "status": "CANCELLED" if cancelled else "UNKNOWN" if failed else "OK",
        "error": row.text("error.message", "error.type"),
        # The server's own counts before the client's.
        "prompt_tokens": row.count("metrics.usage_prompt_tokens.value", "metrics.input_sequence_length.value"),
        "output_tokens": row.count("metrics.usage_completion_tokens.value", "metrics.output_sequence_length.value"),
        "token_ns": offsets_ns(first / 1e3, [gap / 1e3 for gap in gaps]) if first and gaps is not None else None,
        "phase": "rampup" if row.text("metadata.benchmark_phase") == "warmup" else "measure",
    }
