"""The report of `guidellm benchmark` (benchmarks.json), as GuideLLM 0.4 to 0.8 write it.

One table of JSON. Each benchmark holds its strategy and, by how they ended, a row a request with moments in seconds
since the epoch. The moment for which a request was targeted is kept, so latency counts from a schedule. Of tokens only
the times of the first and the last are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.imports.result import LAST_S, Result, Row, ns, requests_table
from analysis.records.plain_values import mapping, rows_of
from analysis.records.tables import RecordError
from analysis.wording import counted

TOOL = "GuideLLM"

_STATUS = {"successful": "OK", "incomplete": "CANCELLED", "errored": "UNKNOWN"}
_CLOSED = ("synchronous", "concurrent", "throughput")
_OPEN = ("constant", "poisson", "trace")
_OF_LOAD = ("type_", "rate", "streams")
_SENT = ("info.timings.request_start", "info.timings.resolve_start")
_SLACK_S = 0.001


def is_guidellm(document: Mapping[str, Any]) -> bool:
    """Return whether the table is one of GuideLLM's reports; 0.4 writes no metadata."""
    kinds = {str(row.get("type_")) for row in rows_of(document.get("benchmarks"))}
    return "guidellm_version" in mapping(document.get("metadata")) or "generative_benchmark" in kinds


def result_of(document: Mapping[str, Any]) -> Result:
    """Return the requests of the report's only benchmark. Raises RecordError."""
    benchmarks = rows_of(document.get("benchmarks"))
    if len(benchmarks) != 1:
        raise RecordError(f"holds {counted(len(benchmarks), 'benchmark')}: give a report of one load")
    benchmark = benchmarks[0]
    kept = mapping(benchmark.get("requests"))
    ended = [(status, row) for name, status in _STATUS.items() for row in rows_of(kept.get(name))]
    if not ended:
        raise RecordError("keeps no requests, so it is a summary alone: run it again without a sample size")
    # What neither began nor ended was still in the tool's own queue.
    ended = [(status, row) for status, row in ended if status != "CANCELLED" or Row(row).value(*_SENT)]
    about, strategy = Row(benchmark), mapping(mapping(benchmark.get("config")).get("strategy"))
    kind, limit = about.text("config.strategy.type_") or "unknown", about.count("config.strategy.streams")
    # A worker that asks for its first moment before the start is set counts from zero (GuideLLM 0.8.1).
    began_s = (about.number("scheduler_metrics.start_time") or 1.0) - _SLACK_S

    def columns(place: int, row: Row) -> dict[str, Any]:
        targeted_s = row.number("info.timings.targeted_start", least=-LAST_S) or 0.0
        return {
            "request_id": row.text("request_id") or None,
            "session_id": row.text("info.conversation_id") or None,
            "scheduled_ns": ns(targeted_s) if kind in _OPEN and targeted_s >= began_s else None,
            "sent_ns": ns(row.number(*_SENT)),
            "first_token_ns": ns(row.number("info.timings.first_token_iteration")),
            "end_ns": ns(row.number("info.timings.request_end", "info.timings.resolve_end")),
            "status": ended[place][0],
            "error": row.text("info.error"),
            "prompt_tokens": row.count("prompt_tokens"),
            "output_tokens": row.count("output_tokens"),
        }

    requests = requests_table([row for _, row in ended], columns)
    early = requests.column("scheduled_ns").null_count if kind in _OPEN else 0
    shown = f"{early} of {requests.num_rows} requests"
    return Result(
        tool=TOOL,
        requests=requests,
        origin="when a request was due" if kind in _OPEN else "when a request was sent",
        open_loop=False if kind in _CLOSED else True if kind in _OPEN else None,
        concurrency=limit if kind in _CLOSED else None,
        sent=about.count("metrics.request_totals.total"),
        model=about.text("config.backend.model") or None,
        load={key: strategy[key] for key in _OF_LOAD if strategy.get(key) is not None},
        problems=(f"has {shown} targeted before the run began, which were sent at once",) if early else (),
    )
