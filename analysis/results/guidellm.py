"""The report of `guidellm benchmark` (benchmarks.json), as GuideLLM 0.4 to 0.8 write it; the latter's is schema 2.

One table of JSON. Each benchmark of the report holds its strategy and, by how they ended, a row a request with moments
in seconds since the epoch. The moment for which a request was targeted is kept, so latency counts from a schedule.
There is no time of each token, only of the first and the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.records.plain_values import mapping, number, rows_of, text_of
from analysis.records.tables import RecordError
from analysis.results.result import (
    CLOSED_LOOP,
    LAST_S,
    Result,
    chosen,
    count_or_none,
    ns_or_null,
    requests_table,
)
from analysis.wording import counted

TOOL = "GuideLLM"
REMEDY = "run it again without a sample size, so that the report keeps every request"

_STATUS = {"successful": "OK", "incomplete": "CANCELLED", "errored": "UNKNOWN"}
_CLOSED = {
    "synchronous": f"sent each request when the one before had ended {CLOSED_LOOP}",
    "concurrent": f"kept {{limit}} under way and sent the next when one ended {CLOSED_LOOP}",
    "throughput": "sent requests as fast as they were taken: they waited for each other, as in no traffic",
}
_SLACK_S = 0.001
_OPEN = ("constant", "poisson", "trace")
_OF_LOAD = ("type_", "rate", "streams")


def is_guidellm(document: Mapping[str, Any]) -> bool:
    """Whether the table is one of GuideLLM's reports."""
    # GuideLLM 0.4 writes no metadata.
    return "guidellm_version" in mapping(document.get("metadata")) or any(
        row.get("type_") == "generative_benchmark" for row in rows_of(document.get("benchmarks"))
    )


def result_of(document: Mapping[str, Any], part: int | None = None) -> Result:
    """The requests of the report's benchmark numbered `part`, or of its only one. RecordError for several, none, and
    one that keeps no requests."""
    benchmarks = rows_of(document.get("benchmarks"))
    benchmark = chosen(benchmarks, part, [_load_of(row) for row in benchmarks])
    kept = mapping(benchmark.get("requests"))
    rows = [
        (name, row) for name in _STATUS for row in rows_of(kept.get(name)) if name != "incomplete" or _was_sent(row)
    ]
    if not rows:
        raise RecordError(f"keeps no requests, so it is a summary alone: {REMEDY}")
    config = mapping(benchmark.get("config"))
    strategy = mapping(config.get("strategy"))
    kind = text_of(strategy, "type_", "unknown")
    limit = number(strategy.get("streams"))
    timings = [mapping(mapping(row.get("info")).get("timings")) for _, row in rows]
    if not any(timings):
        raise RecordError("is of a GuideLLM before 0.4, which times requests otherwise: run it again with 0.4 or later")
    sent_s = _moments(timings, "request_start", "resolve_start")
    first_s = _moments(timings, "first_token_iteration")
    end_s = _moments(timings, "request_end", "resolve_end")
    columns: dict[str, Any] = {
        "request_id": [text_of(row, "request_id") or None for _, row in rows],
        "session_id": [text_of(mapping(row.get("info")), "conversation_id") or None for _, row in rows],
        "sent_ns": ns_or_null(sent_s, sent_s > 0),
        "first_token_ns": ns_or_null(first_s, first_s > 0),
        "end_ns": ns_or_null(end_s, end_s > 0),
        "status": [_STATUS[name] for name, _ in rows],
        "error": [text_of(mapping(row.get("info")), "error")[:200] or None for _, row in rows],
        "prompt_tokens": [count_or_none(row.get("prompt_tokens")) for _, row in rows],
        "output_tokens": [count_or_none(row.get("output_tokens")) for _, row in rows],
    }
    problems: tuple[str, ...] = ()
    if kind in _OPEN:
        targeted_s = _moments(timings, "targeted_start", least=-LAST_S)
        began_s = number(mapping(benchmark.get("scheduler_metrics")).get("start_time")) or 1.0
        planned = targeted_s >= began_s - _SLACK_S
        columns["scheduled_ns"] = ns_or_null(targeted_s, planned)
        if not planned.all():
            # A worker that asks for its first moment before the start is set counts from zero (GuideLLM 0.8.1).
            count = int((~planned).sum())
            problems = (f"has {count} of {len(rows)} requests targeted before the run began, which were sent at once",)
    total = count_or_none(mapping(mapping(benchmark.get("metrics")).get("request_totals")).get("total"))
    model = text_of(mapping(config.get("backend")), "model")
    return Result(
        tool=TOOL,
        requests=requests_table(len(rows), columns),
        pace=f"{TOOL} {_how(kind, limit)}.",
        open_loop=False if kind in _CLOSED else True if kind in _OPEN else None,
        concurrency=int(limit) if limit and kind in _CLOSED else None,
        sent=total,
        model=model or None,
        load={key: strategy[key] for key in _OF_LOAD if strategy.get(key) is not None},
        problems=problems,
    )


def _load_of(benchmark: Mapping[str, Any]) -> str:
    """Its strategy and rate in words."""
    strategy = mapping(mapping(benchmark.get("config")).get("strategy"))
    return " ".join(str(strategy[key]) for key in _OF_LOAD if strategy.get(key) is not None)


def _was_sent(row: Mapping[str, Any]) -> bool:
    """Whether a request that did not end had begun; others were still in the tool's own queue."""
    timings = mapping(mapping(row.get("info")).get("timings"))
    return timings.get("request_start") is not None or timings.get("resolve_start") is not None


def _how(kind: str, limit: float | None) -> str:
    """How requests were sent, in words that follow the tool's name."""
    if kind in _CLOSED:
        return _CLOSED[kind].format(limit=counted(limit, "request") if limit else "so many requests")
    if kind in _OPEN:
        return f"sent on schedule ({kind}), and latency counts from it"
    return f'had a strategy "{kind}" that is not known here'


def _moments(timings: list[Mapping[str, Any]], *names: str, least: float = 0.0) -> Floats:
    """The first moment of `names` that each request has, 0 where it has none. RecordError for one that is no moment."""
    moments = np.zeros(len(timings))
    for place, row in enumerate(timings):
        for name in names:
            if row.get(name) is None:
                continue
            at_s = number(row[name])
            if at_s is None or not least <= at_s <= LAST_S:
                limits = f"limits {least:g} and {LAST_S:.10g}"
                raise RecordError(f"has {name} {row[name]!r} in request {place + 1}, {limits}: run it again")
            moments[place] = at_s
            break
    return moments
