"""per_request_lifecycle_metrics.json, as inference-perf 0.7 writes it where `per_request` is on.

A list of JSON with an entry a request. Seconds of Python's performance counter, which counts from nobody knows when.
Neither the schedule nor the stage of a request is kept, nor how the load was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.arrays import Floats
from analysis.records.plain_values import mapping, text_of
from analysis.records.tables import RecordError
from analysis.results.result import Result, count_or_none, ns_or_null, numbers, requests_table, times_table

TOOL = "inference-perf"
REMEDY = "run it again with report.request_lifecycle.per_request: true"

_SUMMARY = {"load_summary", "successes", "failures"}


def is_inference_perf(entries: Sequence[Any]) -> bool:
    """Whether the list is one of inference-perf's."""
    return bool(entries) and all(
        isinstance(row, Mapping) and {"start_time", "end_time"} <= row.keys() for row in entries
    )


def is_summary(document: Mapping[str, Any]) -> bool:
    """Whether the table is one of the tool's summaries, of all requests or of a stage."""
    return document.keys() >= _SUMMARY


def result_of(entries: Sequence[Mapping[str, Any]]) -> Result:
    """The requests of the list."""
    start_s = numbers([row["start_time"] for row in entries], "start_time", remedy="run it again")
    end_s = numbers([row["end_time"] for row in entries], "end_time", remedy="run it again")
    infos = [mapping(row.get("info")) for row in entries]
    if not any(infos):
        raise RecordError(
            "holds no info of any request, so no time of a token: run it again with per_request_fields.info: true"
        )
    answers = [mapping(info.get("response_metrics")) for info in infos]
    times = [_times(answer, place) for place, answer in enumerate(answers)]
    first_s = np.array([own[0] if len(own) else 0.0 for own in times])
    errors = [mapping(row.get("error")) for row in entries]
    known = start_s > 0
    offsets = [(own - start).tolist() for own, start in zip(times, start_s, strict=True)]
    columns: dict[str, Any] = {
        "request_id": [str(place) for place in range(len(entries))],
        "sent_ns": ns_or_null(start_s, known),
        "first_token_ns": ns_or_null(first_s, first_s > 0),
        "end_ns": ns_or_null(end_s, known),
        "status": ["UNKNOWN" if row.get("error") is not None else "OK" for row in entries],
        "error": [
            f"{text_of(error, 'error_type')}: {text_of(error, 'error_msg')}"[:200] if error else None
            for error in errors
        ],
        "prompt_tokens": [count_or_none(info.get("input_tokens")) for info in infos],
        "output_tokens": [_tokens(answer) for answer in answers],
        "token_ns": times_table(offsets),
    }
    return Result(
        tool=TOOL,
        requests=requests_table(len(entries), columns),
        pace=f"{TOOL} keeps no schedule, nor how the load was made: latency counts from when a request was sent.",
    )


def _times(answer: Mapping[str, Any], place: int) -> Floats:
    """When pieces of the answer came. Times of tokens are made of these, by reading each piece again."""
    for name in ("chunk_times", "output_token_times"):
        if answer.get(name):
            return numbers(answer[name], f"request {place + 1}: {name}", remedy="run it again")
    return np.zeros(0)


def _tokens(answer: Mapping[str, Any]) -> int | None:
    """The server's own count, else the client's, which reads the text again."""
    served = count_or_none(mapping(answer.get("server_usage")).get("completion_tokens"))
    return served if served is not None else count_or_none(answer.get("output_tokens"))
