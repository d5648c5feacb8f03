"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM 0.32 writes it.

One table of JSON: settings of the load, a summary, and lists with one entry a request, in the order in which they were
sent. Times are seconds of Python's performance counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.plain_values import number, text_of
from analysis.records.schemas import REQUESTS
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
        requests=requests,
        origin="when its client took a request up" if document.get("queue_times") else "when a request was sent",
        open_loop=open_loop,
        concurrency=Row(document).count("max_concurrency") or None,
        model=text_of(document, "model_id") or None,
        load={key: document[key] for key in _OF_LOAD if document.get(key) is not None},
        problems=() if completed is None or completed == ok else (contradiction,),
    )


def _columns(place: int, row: Row) -> dict[str, Any]:
    """Return the columns of the request; times are those of the counter."""
    first, pieces, error = row.number("ttfts") or 0.0, row.numbers("itls"), row.content.get("errors")
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


# --- Reading ----------------------------------------------------------------------------------------------------------

SECOND = 1e9
LAST_S = 3e9  # beyond any clock, and any sum of three is still a number of ns

_MOST_TOKENS = 2**31 - 1
_LONGEST_ERROR = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests of one run against one server."""

    requests: pa.Table  # schema REQUESTS; null is what the file does not know, the arm and the trial among it
    origin: str  # where their latency counts from, in words
    open_loop: bool  # whether they were sent without waiting for answers
    concurrency: int | None = None  # that were kept under way, or that there could be at most
    model: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)  # settings in which two files of one comparison must agree
    problems: tuple[str, ...] = ()  # in words that follow the file's name

    @property
    def pace(self) -> str:
        """How the requests were sent, and where their latency counts from, in a sentence."""
        how = "on a schedule (open loop)" if self.open_loop else "as others ended (closed loop), which hides the tail"
        limit = f", with at most {counted(self.concurrency, 'request')} under way" if self.concurrency else ""
        return f"{TOOL} sent requests {how}{limit}; latency counts from {self.origin}."


@dataclass(frozen=True, slots=True)
class Row:
    """A table of a file, such as one request. Raises RecordError for a number of another kind or beyond its limits."""

    content: Mapping[str, Any]

    def number(self, name: str, *, least: float = 0, most: float = LAST_S) -> Any:
        """Return the number, None if there is none."""
        value = self.content.get(name)
        return None if value is None else _checked(name, value, least, most)

    def needed(self, name: str) -> Any:
        """Return the number, which must be there."""
        return _checked(name, self.content.get(name), 0, LAST_S)

    def count(self, name: str) -> int | None:
        """Return the number as a count of tokens or requests, None if there is none."""
        value = self.number(name, most=_MOST_TOKENS)
        return None if value is None else int(value)

    def numbers(self, name: str) -> list[float] | None:
        """Return the list of numbers, None if there is none."""
        values = self.content.get(name)
        if not isinstance(values, list | None):
            raise RecordError(f"{name} is {values!r:.40} and no list: run it again")
        return values and [_checked(f"{name}[{place}]", value, 0, LAST_S) for place, value in enumerate(values)]


def _checked(path: str, value: Any, least: float, most: float) -> Any:
    if type(value) in (int, float) and least <= value <= most:
        return value
    shown = "null" if value is None else f"{value!r:.40}"
    raise RecordError(f"{path} is {shown}, limits {least:g} and {most:.10g}: run it again")


def requests_table(contents: Sequence[Any], columns_of: Callable[[int, Row], Mapping[str, Any]]) -> pa.Table:
    """Return the columns of each request, by its place and content, as a table with the schema REQUESTS.

    Raises RecordError, which names the request.
    """
    rows = []
    for place, content in enumerate(contents):
        try:
            row = columns_of(place, Row(content))
        except RecordError as error:
            raise RecordError(f"request {place + 1}: {error}") from None
        rows.append({**row, "error": (row.get("error") or "")[:_LONGEST_ERROR] or None})
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def ns(seconds: float | None) -> int | None:
    """Return seconds as whole ns; None for none and for 0, which stands for an unknown time."""
    return round(seconds * SECOND) if seconds else None


def offsets_ns(first_s: float | None, gaps_s: Sequence[float] | None) -> list[int] | None:
    """Return the time of each piece of an answer from its send in ns; None if they are not kept."""
    if not first_s or gaps_s is None:
        return None
    times: list[int] = np.rint(np.cumsum([first_s, *gaps_s]) * SECOND).astype(np.int64).tolist()
    return times
