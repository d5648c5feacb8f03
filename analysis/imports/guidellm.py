"""The report of `guidellm benchmark` (benchmarks.json), as GuideLLM 0.4 to 0.8 write it.

One table of JSON. Each benchmark holds its strategy and, by how they ended, a row a request with moments in seconds
since the epoch. The moment for which a request was targeted is kept, so latency counts from a schedule. Of tokens only
the times of the first and the last are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.imports.result import CLOSED_LOOP, LAST_S, Result, Row, ns, requests_table, rows_in
from analysis.records.plain_values import mapping, rows_of
from analysis.records.tables import RecordError
from analysis.wording import counted

TOOL = "GuideLLM"

_STATUS = {"successful": "OK", "incomplete": "CANCELLED", "errored": "UNKNOWN"}
_CLOSED = {
    "synchronous": f"sent each request when the one before had ended {CLOSED_LOOP}",
    "concurrent": f"kept {{limit}} under way and sent the next when one ended {CLOSED_LOOP}",
    "throughput": "sent requests as fast as they were taken: they waited for each other, as in no traffic",
}
_OPEN = ("constant", "poisson", "trace")
_SLACK_S = 0.001


_OF_LOAD = ("type_", "rate", "streams")
_SENT = ("info.timings.request_start", "info.timings.resolve_start")


def is_guidellm(document: Mapping[str, Any]) -> bool:
    """Return whether the table is one of GuideLLM's reports; 0.4 writes no metadata."""
    benchmarks = rows_of(document.get("benchmarks"))
    kinds = {str(row.get("type_")) for row in benchmarks}
    return "guidellm_version" in mapping(document.get("metadata")) or "generative_benchmark" in kinds


def result_of(document: Mapping[str, Any]) -> Result:
    """Return the requests of the report's only benchmark. Raises RecordError."""
    benchmarks = rows_of(document.get("benchmarks"))
    if len(benchmarks) != 1:
        raise RecordError(f"holds {counted(len(benchmarks), 'benchmark')}: give a report of one load")
    benchmark = benchmarks[0]
    about = Row(benchmark)
    kept = mapping(benchmark.get("requests"))
    ended = [(status, row) for name, status in _STATUS.items() for row in rows_in(rows_of(kept.get(name)))]
    if not ended:
        raise RecordError("keeps no requests, so it is a summary alone: run it again without a sample size")
    # What neither began nor ended was still in the tool's own queue.
    ended = [(status, row) for status, row in ended if status != "CANCELLED" or row.number(*_SENT)]
    requests = [_request(status, row) for status, row in ended]
    kind = about.text("config.strategy.type_") or "unknown"
    limit = about.count("config.strategy.streams")
    problems: tuple[str, ...] = ()
    if kind in _OPEN:
        began_s = about.number("scheduler_metrics.start_time") or 1.0
        early = 0
        for request, (_, row) in zip(requests, ended, strict=True):
            # A worker that asks for its first moment before the start is set counts from zero (GuideLLM 0.8.1).
            targeted = row.number("info.timings.targeted_start", least=-LAST_S) or 0.0
            request["scheduled_ns"] = ns(targeted) if targeted >= began_s - _SLACK_S else None
            early += request["scheduled_ns"] is None
        if early:
            problems = (f"has {early} of {len(ended)} requests targeted before the run began, which were sent at once",)
    return Result(
        tool=TOOL,
        requests=requests_table(requests),
        pace=f"{TOOL} {_how(kind, limit)}.",
        open_loop=False if kind in _CLOSED else True if kind in _OPEN else None,
        concurrency=limit if kind in _CLOSED else None,
        sent=about.count("metrics.request_totals.total"),
        model=about.text("config.backend.model") or None,
        load=_load(benchmark),
        problems=problems,
    )


def _load(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    strategy = mapping(mapping(benchmark.get("config")).get("strategy"))
    return {key: strategy[key] for key in _OF_LOAD if strategy.get(key) is not None}


def _request(status: str, row: Row) -> dict[str, Any]:
    return {
        "request_id": row.text("request_id") or None,
        "session_id": row.text("info.conversation_id") or None,
        "sent_ns": ns(row.number(*_SENT)),
        "first_token_ns": ns(row.number("info.timings.first_token_iteration")),
        "end_ns": ns(row.number("info.timings.request_end", "info.timings.resolve_end")),
        "status": status,
        "error": row.text("info.error"),
        "prompt_tokens": row.count("prompt_tokens"),
        "output_tokens": row.count("output_tokens"),
    }


def _how(kind: str, limit: int | None) -> str:
    """Return how requests were sent, in words that follow the tool's name."""
    if kind in _CLOSED:
        return _CLOSED[kind].format(limit=counted(limit, "request") if limit else "so many requests")
    if kind in _OPEN:
        return f"sent on schedule ({kind}), and latency counts from it"
    return f'had a strategy "{kind}" that is not known here'
