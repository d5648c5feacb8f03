"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes it, and that of its
descendant, SGLang's `bench_serving --output-details`.

One table of JSON: settings of the load, a summary, and lists with one entry a request, in the order in which they were
sent. Seconds; starts are of Python's performance counter, whose zero is not known. SGLang writes no starts
(python/sglang/benchmark/serving.py), nor does vLLM for embeddings (vllm/benchmarks/serve.py): these have latencies
alone.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Bools, Floats
from analysis.records.plain_values import mapping, number, seconds, text_of
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
from analysis.wording import counted

TOOL, SGLANG = "vLLM bench serve", "SGLang bench_serving"
REMEDY, SGLANG_REMEDY = "run it again with --save-result --save-detailed", "run it again with --output-details"

_LONGEST_ERROR = 200
_AT_ONCE_SHARE = 0.5  # of the run: starts that lie farther apart were timed by the data set (--self-timed)
_EMBEDS = re.compile("embed|pooling|rerank")
_OF_LOAD = (
    *("backend", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
)


def is_vllm(document: Mapping[str, Any]) -> bool:
    """Whether the table is one of vLLM's or SGLang's, detailed or not."""
    return {"endpoint_type", "num_prompts", "request_throughput"} <= document.keys() or _is_sglang(document)


def _is_sglang(document: Mapping[str, Any]) -> bool:
    return {"dataset_name", "mean_e2e_latency_ms", "request_throughput"} <= document.keys()


def result_of(document: Mapping[str, Any], *, written_s: float | None = None) -> Result:
    """The requests in the table; `written_s` is when the file was, where the table does not say it. RecordError for a
    summary without them, and for lists that do not fit."""
    tool, remedy = (SGLANG, SGLANG_REMEDY) if _is_sglang(document) else (TOOL, REMEDY)
    embeds = bool(_EMBEDS.search(text_of(document, "backend") or text_of(document, "endpoint_type")))
    timed = tool == TOOL and not embeds
    needed = ("input_lens", "errors", *(("latencies",) if embeds else ("output_lens", "ttfts", "itls")))
    needed += ("start_times",) if timed else ()
    missing = [name for name in needed if name not in document]
    if missing == ["latencies"]:
        raise RecordError(
            "has no latencies, which older versions do not keep of embeddings: run it again with a newer one"
        )
    if missing:
        raise RecordError(f"has no {', '.join(missing)}, so it is a summary alone: {remedy}")
    sizes = {name: len(document[name]) if isinstance(document[name], list) else -1 for name in needed}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size if size >= 0 else 'no list'}" for name, size in sizes.items())
        raise RecordError(f"has lists of unequal lengths ({listed}): {remedy}")
    count = sizes["errors"]
    first_s = np.zeros(count) if embeds else numbers(document["ttfts"], "ttfts", remedy=remedy)
    pieces = [] if embeds else document["itls"]
    gaps = [numbers(own, f"itls[{place}]", remedy=remedy) for place, own in enumerate(pieces)]
    queued_s = _optional(document, "queue_times", count, least=-LAST_S)
    took_s = _optional(document, "latencies", count)
    if took_s is None:  # vLLM before 0.32, and SGLang: an answer's end is that of its last piece
        took_s = first_s + np.array([own.sum() for own in gaps])
    if timed:
        start_s = numbers(document["start_times"], "start_times", remedy=remedy)
        if queued_s is not None:
            # A request that failed before it was sent has no start; what it waited then counts from zero.
            start_s = np.where(start_s > 0, start_s, start_s - queued_s)
    else:
        start_s = 1.0 + (np.arange(count) + 0.5) * (seconds(document.get("duration")) or 1.0) / max(1, count)
    errors = ["" if error is None else str(error) for error in document["errors"]]
    ok: Bools = np.array([not error for error in errors], dtype=np.bool_) & ((took_s if embeds else first_s) > 0)
    pace, open_loop, waits = _pace(document, tool, start_s if timed else None, queued_s)
    shift_ns = _shift_ns(document, start_s, took_s, written_s)
    known = start_s > 0
    columns: dict[str, Any] = {
        "request_id": [str(place) for place in range(count)],
        "sent_ns": ns_or_null(start_s, known, shift_ns),
        "first_token_ns": ns_or_null(start_s + first_s, known & (first_s > 0), shift_ns),
        "end_ns": ns_or_null(start_s + np.maximum(took_s, first_s), known, shift_ns),
        "status": np.where(ok, "OK", "UNKNOWN"),
        "error": [error[:_LONGEST_ERROR] or None for error in errors],
        "prompt_tokens": numbers(document["input_lens"], "input_lens", remedy=remedy, most=MOST_TOKENS).astype(
            np.int32
        ),
    }
    if not embeds:
        lengths = numbers(document["output_lens"], "output_lens", remedy=remedy, most=MOST_TOKENS)
        columns["output_tokens"] = lengths.astype(np.int32)
        columns["token_ns"] = times_table(
            [[] if not first else np.cumsum([first, *own]).tolist() for first, own in zip(first_s, gaps, strict=True)]
        )
    if waits is not None:
        columns["scheduled_ns"] = ns_or_null(start_s - waits, known, shift_ns)
    completed = number(document.get("completed"))
    concurrency = number(document.get("max_concurrency"))
    model = text_of(document, "model_id") or text_of(mapping(document.get("server_info")), "model_path")
    return Result(
        tool=tool,
        requests=requests_table(count, columns),
        pace=pace,
        open_loop=open_loop,
        concurrency=int(concurrency) if concurrency else None,
        sent=count,
        model=model or None,
        embeds=embeds,
        timed=timed,
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


def _pace(
    document: Mapping[str, Any], tool: str, start_s: Floats | None, queued_s: Floats | None
) -> tuple[str, bool, Floats | None]:
    """How requests were sent, whether without waiting for answers, and how long each waited in the client first; None
    where that is not kept."""
    rate, limit = number(document.get("request_rate")), number(document.get("max_concurrency"))
    if rate is None and document.get("ramp_up_strategy") is None and document.get("request_rate") != "trace":
        if limit is not None:
            how = f"kept {counted(limit, 'request')} under way and sent the next when one ended"
            return f"{tool} {how} {CLOSED_LOOP}.", False, None
        apart_s = 0.0
        if start_s is not None:
            apart_s = float(np.ptp(start_s if queued_s is None else start_s - queued_s))
        if apart_s < _AT_ONCE_SHARE * (number(document.get("duration")) or np.inf):
            how = "sent every request at once (request_rate inf)"
            return f"{tool} {how}: they waited for each other, as in no traffic.", False, None
    if queued_s is not None:
        origin = "latency counts from when its client took a request up"
        return f"{tool} sent on schedule and keeps none: {origin}.", True, np.maximum(queued_s, 0.0)
    if limit is not None:
        how = f"kept at most {counted(limit, 'request')} under way, and not what others waited for room"
        return f"{tool} {how} {CLOSED_LOOP}.", False, None
    return f"{tool} sent on schedule and keeps none: latency counts from when a request was sent.", True, None


def _shift_ns(document: Mapping[str, Any], start_s: Floats, took_s: Floats, written_s: float | None) -> int:
    """What the tool's counter lacks to the epoch, by `date`, the host's local time at the end, or by when the file was
    written. Only differences within a file are exact."""
    known = start_s > 0
    try:
        ended = datetime.datetime.strptime(text_of(document, "date"), "%Y%m%d-%H%M%S")
        ended_s = ended.replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        if written_s is None:
            return 0
        ended_s = written_s
    last_s = float((start_s + took_s).max(where=known, initial=0.0))
    return round(ended_s) * 10**9 - round(last_s * SECOND)
