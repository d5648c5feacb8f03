"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes it, and that of its
descendant, SGLang's `bench_serving --output-details`.

One table of JSON: settings of the load, a summary, and lists with one entry a request, in the order in which they were
sent. Times are seconds of Python's performance counter. SGLang writes no starts
(python/sglang/benchmark/serving.py), nor does vLLM for embeddings (vllm/benchmarks/serve.py).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.imports.result import (
    CLOSED_LOOP,
    LAST_S,
    MOST_TOKENS,
    SECOND,
    Result,
    Row,
    ns,
    offsets_ns,
    requests_table,
)
from analysis.records.plain_values import mapping, number, seconds, text_of
from analysis.records.tables import RecordError
from analysis.wording import counted

TOOL, SGLANG = "vLLM bench serve", "SGLang bench_serving"

_AT_ONCE_SHARE = 0.5  # of the run: starts that lie farther apart were timed by the data set (--self-timed)
_EMBEDS = re.compile("embed|pooling|rerank")
_OF_LOAD = (
    *("backend", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
)


def is_vllm(document: Mapping[str, Any]) -> bool:
    """Return whether the table is one of vLLM or SGLang, detailed or not."""
    return {"endpoint_type", "num_prompts", "request_throughput"} <= document.keys() or _is_sglang(document)


def _is_sglang(document: Mapping[str, Any]) -> bool:
    return {"dataset_name", "mean_e2e_latency_ms", "request_throughput"} <= document.keys()


def result_of(document: Mapping[str, Any], *, written_s: float | None = None) -> Result:
    """Return the requests in the table; `written_s` is when the file was written. Raises RecordError."""
    sglang = _is_sglang(document)
    tool = SGLANG if sglang else TOOL
    remedy = f"run it again with {'--output-details' if sglang else '--save-result --save-detailed'}"
    embeds = bool(_EMBEDS.search(text_of(document, "backend") or text_of(document, "endpoint_type")))
    timed = not sglang and not embeds
    needed = ("latencies",) if embeds else ("output_lens", "ttfts", "itls", *(("start_times",) if timed else ()))
    missing = [name for name in ("input_lens", "errors", *needed) if document.get(name) is None]
    if missing:
        older = ", or with a newer version" if missing == ["latencies"] else ""
        raise RecordError(f"has no {', '.join(missing)}, so it is a summary alone: {remedy}{older}")
    given = {"input_lens", "errors", *needed, "latencies", "queue_times"}
    sizes = {
        name: len(document[name]) if isinstance(document[name], list) else "no list"
        for name in sorted(given)
        if document.get(name) is not None
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise RecordError(f"has lists of unequal lengths ({listed}): {remedy}")
    row = Row(document, remedy=remedy)
    errors = ["" if error is None else str(error) for error in document["errors"]]
    count = len(errors)
    prompts = row.numbers("input_lens", most=MOST_TOKENS) or []
    outputs = None if embeds else row.numbers("output_lens", most=MOST_TOKENS)
    first_s = [0.0] * count if embeds else row.numbers("ttfts") or []
    pieces = [[]] * count if embeds else document["itls"]
    gaps_s = [
        Row({name: own}, remedy=remedy).numbers(name) or []
        for name, own in ((f"itls[{place}]", own) for place, own in enumerate(pieces))
    ]
    queued_s = row.numbers("queue_times", least=-LAST_S)
    # Without latencies (vLLM before 0.32, SGLang) an answer ends with its last piece.
    took_s = row.numbers("latencies") or [first + sum(gaps) for first, gaps in zip(first_s, gaps_s, strict=True)]
    if timed:
        # A request that failed before it was sent has no start; what it waited then counts from zero.
        waits = queued_s or [0.0] * count
        start_s = [start or -wait for start, wait in zip(row.numbers("start_times") or [], waits, strict=True)]
    else:
        step = (seconds(document.get("duration")) or 1.0) / max(1, count)
        start_s = [1.0 + (place + 0.5) * step for place in range(count)]
    pace, open_loop, scheduled = _pace(document, tool, start_s if timed else None, queued_s)
    shift_ns = _shift_ns(document, start_s, took_s, written_s)
    requests: list[dict[str, Any]] = []
    for place, (start, first, took, gaps) in enumerate(zip(start_s, first_s, took_s, gaps_s, strict=True)):
        request: dict[str, Any] = {
            "request_id": str(place),
            "status": "OK" if not errors[place] and (took if embeds else first) > 0 else "UNKNOWN",
            "error": errors[place],
            "prompt_tokens": int(prompts[place]),
            "output_tokens": None if outputs is None else int(outputs[place]),
            "token_ns": None if embeds else offsets_ns(first, gaps),
        }
        if start > 0:
            request["sent_ns"] = ns(start, shift_ns)
            request["first_token_ns"] = ns(start + first, shift_ns) if first else None
            request["end_ns"] = ns(start + max(took, first), shift_ns)
            if scheduled and queued_s is not None:
                request["scheduled_ns"] = ns(start - max(queued_s[place], 0.0), shift_ns)
        requests.append(request)
    ok = sum(request["status"] == "OK" for request in requests)
    completed = number(document.get("completed"))
    concurrency = number(document.get("max_concurrency"))
    contradiction = f"says that {counted(completed or 0, 'request')} completed, and {ok} did by its lists"
    return Result(
        tool=tool,
        requests=requests_table(requests),
        pace=pace,
        open_loop=open_loop,
        concurrency=int(concurrency) if concurrency else None,
        sent=count,
        model=text_of(document, "model_id") or text_of(mapping(document.get("server_info")), "model_path") or None,
        embeds=embeds,
        timed=timed,
        load={key: document[key] for key in _OF_LOAD if document.get(key) is not None},
        problems=() if completed is None or completed == ok else (contradiction,),
    )


def _pace(
    document: Mapping[str, Any], tool: str, start_s: Sequence[float] | None, queued_s: Sequence[float] | None
) -> tuple[str, bool, bool]:
    """Return how requests were sent, whether in an open loop, and whether their waits in the client are a schedule."""
    rate, limit = number(document.get("request_rate")), number(document.get("max_concurrency"))
    if rate is None and document.get("ramp_up_strategy") is None and document.get("request_rate") != "trace":
        if limit is not None:
            how = f"kept {counted(limit, 'request')} under way and sent the next when one ended"
            return f"{tool} {how} {CLOSED_LOOP}.", False, False
        due_s = np.subtract(start_s or [0.0], (queued_s or [0.0]) if start_s else [0.0])
        if np.ptp(due_s) < _AT_ONCE_SHARE * (number(document.get("duration")) or np.inf):
            how = "sent every request at once (request_rate inf)"
            return f"{tool} {how}: they waited for each other, as in no traffic.", False, False
    if queued_s is not None:
        origin = "latency counts from when its client took a request up"
        return f"{tool} sent on schedule and keeps none: {origin}.", True, True
    if limit is not None:
        how = f"kept at most {counted(limit, 'request')} under way, and not what others waited for room"
        return f"{tool} {how} {CLOSED_LOOP}.", False, False
    return f"{tool} sent on schedule and keeps none: latency counts from when a request was sent.", True, False


def _shift_ns(
    document: Mapping[str, Any], start_s: Sequence[float], took_s: Sequence[float], written_s: float | None
) -> int:
    """Return what the tool's counter lacks to the epoch, by `date`, the host's local time at the end, or by when the
    file was written. Only differences within a file are exact."""
    try:
        ended = datetime.datetime.strptime(text_of(document, "date"), "%Y%m%d-%H%M%S")
        ended_s = ended.replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        if written_s is None:
            return 0
        ended_s = written_s
    last_s = max((start + took for start, took in zip(start_s, took_s, strict=True) if start > 0), default=0.0)
    return round(ended_s) * 10**9 - round(last_s * SECOND)
