"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes it.

One table of JSON: settings of the load, a summary, and lists with one entry a request. Seconds; starts are of Python's
performance counter, which counts from nobody knows when.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Bools, Floats
from analysis.nouns import counted
from analysis.records.plain_values import number, text_of
from analysis.records.tables import RecordError
from analysis.results.result import (
    CLOSED_LOOP,
    LAST_S,
    MOST_TOKENS,
    SECOND,
    Result,
    ns_or_null,
    numbers,
    requests_table,
    times_table,
)

TOOL = "vLLM bench serve"
REMEDY = "run it again with --save-result --save-detailed"

_LONGEST_ERROR = 200
_AT_ONCE_SHARE = 0.5  # of the run: starts that lie farther apart were timed by the data set (--self-timed)
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_OF_LOAD = (
    *("backend", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
)


def is_vllm(document: Mapping[str, Any]) -> bool:
    """Whether the table is one of vLLM's, detailed or not."""
    return {"endpoint_type", "num_prompts", "request_throughput"} <= document.keys()


def result_of(document: Mapping[str, Any]) -> Result:
    """The requests in the table. RecordError for a summary without them, and for lists that do not fit."""
    missing = [name for name in _LISTS if name not in document]
    if missing:
        raise RecordError(f"has no {', '.join(missing)}, so it is a summary alone: {REMEDY}")
    sizes = {name: len(document[name]) if isinstance(document[name], list) else -1 for name in _LISTS}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size if size >= 0 else 'no list'}" for name, size in sizes.items())
        raise RecordError(f"has lists of unequal lengths ({listed}): {REMEDY}")
    count = sizes["ttfts"]
    first_s = numbers(document["ttfts"], "ttfts", remedy=REMEDY)
    gaps = [numbers(own, f"itls[{place}]", remedy=REMEDY) for place, own in enumerate(document["itls"])]
    start_s = numbers(document["start_times"], "start_times", remedy=REMEDY)
    queued_s = _optional(document, "queue_times", count, least=-LAST_S)
    took_s = _optional(document, "latencies", count)
    if took_s is None:  # before 0.32 an answer's end is that of its last piece
        took_s = first_s + np.array([own.sum() for own in gaps])
    if queued_s is not None:
        # A request that failed before it was sent has no start; what it waited then counts from zero.
        start_s = np.where(start_s > 0, start_s, start_s - queued_s)
    errors = ["" if error is None else str(error) for error in document["errors"]]
    ok: Bools = np.array([not error for error in errors], dtype=np.bool_) & (first_s > 0)
    pace, open_loop, waits = _pace(document, start_s, queued_s)
    shift_ns = _shift_ns(document, start_s, took_s)
    known = start_s > 0
    columns: dict[str, Any] = {
        "request_id": [str(place) for place in range(count)],
        "sent_ns": ns_or_null(start_s, known, shift_ns),
        "first_token_ns": ns_or_null(start_s + first_s, known & (first_s > 0), shift_ns),
        "end_ns": ns_or_null(start_s + np.maximum(took_s, first_s), known, shift_ns),
        "status": np.where(ok, "OK", "UNKNOWN"),
        "error": [error[:_LONGEST_ERROR] or None for error in errors],
        "prompt_tokens": numbers(document["input_lens"], "input_lens", remedy=REMEDY, most=MOST_TOKENS).astype(
            np.int32
        ),
        "output_tokens": numbers(document["output_lens"], "output_lens", remedy=REMEDY, most=MOST_TOKENS).astype(
            np.int32
        ),
        "token_ns": times_table(
            [[] if not first else np.cumsum([first, *own]).tolist() for first, own in zip(first_s, gaps, strict=True)]
        ),
    }
    if waits is not None:
        columns["scheduled_ns"] = ns_or_null(start_s - waits, known, shift_ns)
    completed = number(document.get("completed"))
    concurrency = number(document.get("max_concurrency"))
    return Result(
        tool=TOOL,
        requests=requests_table(count, columns),
        pace=pace,
        open_loop=open_loop,
        concurrency=int(concurrency) if concurrency else None,
        sent=count,
        model=text_of(document, "model_id") or None,
        load={key: document[key] for key in _OF_LOAD if document.get(key) is not None},
        problems=()
        if completed is None or completed == ok.sum()
        else (f"says that {counted(completed, 'request')} completed, and {int(ok.sum())} did by its lists",),
    )


def _optional(document: Mapping[str, Any], name: str, count: int, *, least: float = 0.0) -> Floats | None:
    """A list that only some versions write."""
    if document.get(name) is None:
        return None
    values = numbers(document[name], name, remedy=REMEDY, least=least)
    if len(values) != count:
        raise RecordError(f"has lists of unequal lengths ({name} {len(values)}, ttfts {count}): {REMEDY}")
    return values


def _pace(document: Mapping[str, Any], start_s: Floats, queued_s: Floats | None) -> tuple[str, bool, Floats | None]:
    """How requests were sent, whether without waiting for answers, and how long each waited in the client first; None
    where that is not kept."""
    rate, limit = number(document.get("request_rate")), number(document.get("max_concurrency"))
    if rate is None and document.get("ramp_up_strategy") is None:
        if limit is not None:
            how = f"kept {counted(limit, 'request')} under way and sent the next when one ended"
            return f"{TOOL} {how} {CLOSED_LOOP}.", False, None
        issued_s = start_s if queued_s is None else start_s - queued_s
        if np.ptp(issued_s) < _AT_ONCE_SHARE * (number(document.get("duration")) or np.inf):
            how = "sent every request at once (request_rate inf)"
            return f"{TOOL} {how}: they waited for each other, as in no traffic.", False, None
    if queued_s is not None:
        origin = "latency counts from when its client took a request up"
        return f"{TOOL} sent on schedule and keeps none: {origin}.", True, np.maximum(queued_s, 0.0)
    if limit is not None:
        how = f"kept at most {counted(limit, 'request')} under way, and not what others waited for room"
        return f"{TOOL} {how} {CLOSED_LOOP}.", False, None
    return f"{TOOL} sent on schedule and keeps none: latency counts from when a request was sent.", True, None


def _shift_ns(document: Mapping[str, Any], start_s: Floats, took_s: Floats) -> int:
    """What the tool's counter lacks to the epoch, by `date`, the host's local time at the end. Only differences within
    a file are exact."""
    known = start_s > 0
    try:
        ended = datetime.datetime.strptime(text_of(document, "date"), "%Y%m%d-%H%M%S")
    except ValueError:
        return 0
    last_s = float((start_s + took_s).max(where=known, initial=0.0))
    return round(ended.replace(tzinfo=datetime.UTC).timestamp()) * 10**9 - round(last_s * SECOND)
