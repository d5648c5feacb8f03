"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes it.

One table of JSON: settings of the load, a summary, and lists with one entry a request, in the order in which they were
sent. Times are seconds of Python's performance counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.imports.result import LAST_S, SECOND, Result, Row, ns, offsets_ns, requests_table
from analysis.records.plain_values import number, text_of
from analysis.records.tables import RecordError
from analysis.wording import counted

TOOL = "vLLM bench serve"

_AT_ONCE_SHARE = 0.5  # of the run: starts that lie farther apart were timed by the data set (--self-timed)
_AGAIN = "run it again with --save-result --save-detailed"
_NEEDED = ("input_lens", "errors", "output_lens", "ttfts", "itls", "start_times")
_OF_LOAD = (
    *("backend", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
)


def is_vllm(document: Mapping[str, Any]) -> bool:
    """Return whether the table is one of vLLM, detailed or not."""
    return {"endpoint_type", "num_prompts", "request_throughput"} <= document.keys()


def result_of(document: Mapping[str, Any]) -> Result:
    """Return the requests in the table. Raises RecordError."""
    if missing := [name for name in _NEEDED if document.get(name) is None]:
        raise RecordError(f"has no {', '.join(missing)}, so it is a summary alone: {_AGAIN}")
    lists = {name: document.get(name) for name in ("latencies", "queue_times", *_NEEDED)}
    lists = {name: values for name, values in lists.items() if values is not None}
    sizes = {name: len(values) if isinstance(values, list) else "no list" for name, values in lists.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise RecordError(f"has lists of unequal lengths ({listed}): {_AGAIN}")
    contents = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    requests = requests_table(contents, _columns)
    open_loop = _is_open_loop(document, requests)
    if not open_loop:
        place = requests.schema.get_field_index("scheduled_ns")
        requests = requests.set_column(place, requests.schema.field(place), pa.nulls(len(requests), pa.int64()))
    ok = pc.sum(pc.equal(requests.column("status"), "OK")).as_py() or 0
    completed = number(document.get("completed"))
    contradiction = f"says that {counted(completed or 0, 'request')} completed, and {ok} did by its lists"
    return Result(
        tool=TOOL,
        requests=requests,
        origin="when its client took a request up" if document.get("queue_times") else "when a request was sent",
        open_loop=open_loop,
        concurrency=Row(document).count("max_concurrency") or None,
        sent=len(requests),
        model=text_of(document, "model_id") or None,
        load={key: document[key] for key in _OF_LOAD if document.get(key) is not None},
        problems=() if completed is None or completed == ok else (contradiction,),
    )


def _columns(place: int, row: Row) -> dict[str, Any]:
    """Return the columns of the request; times are those of the counter."""
    first, pieces, error = row.number("ttfts") or 0.0, row.numbers("itls"), row.value("errors")
    took = row.number("latencies")
    # Without latencies (vLLM before 0.32) an answer ends with its last piece.
    took = first + sum(pieces or ()) if took is None else max(took, first)
    queued = row.number("queue_times", least=-LAST_S)
    # A request that failed before it was sent has no start; what it waited then counts from zero.
    start = max(0.0, row.needed("start_times") or -(queued or 0.0))
    return {
        "request_id": str(place),
        "scheduled_ns": None if queued is None or not start else ns(start - max(queued, 0.0)),
        "sent_ns": ns(start),
        "first_token_ns": ns(start + first) if start and first else None,
        "end_ns": ns(start + took) if start else None,
        "status": "OK" if not error and (took if pieces is None else first) > 0 else "UNKNOWN",
        "error": str(error or ""),
        "prompt_tokens": row.count("input_lens"),
        "output_tokens": row.count("output_lens"),
        "token_ns": offsets_ns(first, pieces),
    }


def _is_open_loop(document: Mapping[str, Any], requests: pa.Table) -> bool:
    """Return whether requests were sent on a schedule, also one that the data set or a ramp gave."""
    limit = number(document.get("max_concurrency"))
    unpaced = number(document.get("request_rate")) is None and document.get("request_rate") != "trace"
    if unpaced and document.get("ramp_up_strategy") is None:
        due = pc.min_max(pc.coalesce(requests.column("scheduled_ns"), requests.column("sent_ns"))).as_py()
        spread_s = ((due["max"] or 0) - (due["min"] or 0)) / SECOND
        if limit is not None or spread_s < _AT_ONCE_SHARE * (number(document.get("duration")) or math.inf):
            return False
    # A limit delays requests without a trace, unless the file says how long each waited.
    return limit is None or document.get("queue_times") is not None
