"""per_request_lifecycle_metrics.json, as inference-perf 0.7 writes it if `per_request` is on.

A list of JSON with an entry a request. Times are seconds of Python's performance counter. Neither the schedule nor how
the load was made is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.imports.result import Result, Row, ns, requests_table, rows_in
from analysis.records.tables import RecordError

TOOL = "inference-perf"
SUMMARY = frozenset({"load_summary", "successes", "failures"})  # keys of a summary


def is_inference_perf(entries: list[Any]) -> bool:
    """Return whether the list is one of inference-perf."""
    return bool(entries) and all(isinstance(x, Mapping) and {"start_time", "end_time"} <= x.keys() for x in entries)


def result_of(content: list[Any]) -> Result:
    """Return the requests of the list. Raises RecordError."""
    rows = rows_in(content)
    if not any(row.first("info")[1] for row in rows):
        raise RecordError(
            "holds no info of any request, so no time of a token: run it again with per_request_fields.info: true"
        )
    return Result(
        tool=TOOL,
        requests=requests_table([_request(place, row) for place, row in enumerate(rows)]),
        pace=f"{TOOL} keeps no schedule, nor how the load was made: latency counts from when a request was sent.",
    )


def _request(place: int, row: Row) -> dict[str, Any]:
    answer = "info.response_metrics"
    start, end = row.needed("start_time"), row.needed("end_time")
    # Times of tokens are made of those of chunks, by reading each chunk again.
    times = row.numbers(f"{answer}.chunk_times", f"{answer}.output_token_times") or []
    failed = row.first("error")[1] is not None
    return {
        "request_id": str(place),
        "sent_ns": ns(start),
        "first_token_ns": ns(times[0]) if times else None,
        "end_ns": ns(end) if start else None,
        "status": "UNKNOWN" if failed else "OK",
        "error": f"{row.text('error.error_type')}: {row.text('error.error_msg')}" if failed else None,
        "prompt_tokens": row.count("info.input_tokens"),
        # The server's own count, else the client's, which reads the text again.
        "output_tokens": row.count(f"{answer}.server_usage.completion_tokens", f"{answer}.output_tokens"),
        "token_ns": [ns(at - start) or 0 for at in times],
    }
