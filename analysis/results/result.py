"""What one result file of another load tool holds: its requests, and how they were sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.arrays import Bools, Floats
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError
from analysis.wording import counted

T = TypeVar("T")
SECOND = 1e9
LAST_S = 3e9  # beyond any clock, and any sum of three is still a number of ns
MOST_TOKENS = 2**31 - 1
CLOSED_LOOP = "(closed loop), which hides the tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests of one run of a tool against one server."""

    tool: str
    requests: pa.Table  # schema REQUESTS; what the tool does not know is null, the arm and the trial among it
    pace: str  # how they were sent, and where their latency counts from, in a sentence
    open_loop: bool | None = (
        None  # whether they were sent without waiting for answers; None where the file says nothing
    )
    concurrency: int | None = None  # that were kept under way, or that there could be at most
    sent: int | None = None  # requests, by the tool's own count
    model: str | None = None
    embeds: bool = False  # vectors were asked for, so that requests have an end and no tokens
    timed: bool = True  # the file says when each request was sent; else they are spread evenly over the run, in order
    load: Mapping[str, Any] = field(default_factory=dict)  # settings in which two files of one comparison must agree
    problems: tuple[str, ...] = ()  # what is wrong with the file all the same, as what follows its name


def requests_table(count: int, columns: Mapping[str, Any]) -> pa.Table:
    """A table of `count` requests with these columns of REQUESTS, null elsewhere."""
    return pa.table(
        [
            pa.array(columns[item.name], item.type) if item.name in columns else pa.nulls(count, item.type)
            for item in REQUESTS
        ],
        schema=REQUESTS,
    )


def ns_or_null(seconds: Floats, known: Bools, shift_ns: int = 0) -> pa.Array:
    """Seconds as whole ns, later by `shift_ns`; null where they are not `known`."""
    return pa.array(np.rint(np.where(known, seconds, 0.0) * SECOND).astype(np.int64) + shift_ns, mask=~known)


def times_table(lists: list[list[float]]) -> pa.Array:
    """A list of offsets in ns for each list of seconds."""
    ends = np.cumsum([0, *map(len, lists)])
    flat = np.array([item for own in lists for item in own], dtype=np.float64)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.rint(flat * SECOND).astype(np.int64)))


def chosen(results: Sequence[T], part: int | None, loads: Sequence[str]) -> T:
    """The result numbered `part` from 1, or the only one. RecordError, which lists their loads, for none."""
    if part is None and len(results) == 1:
        return results[0]
    if part is None or part > len(results):
        listed = ", ".join(f"#{place} {load}" for place, load in enumerate(loads, 1))
        raise RecordError(f"holds {counted(len(results), 'result')} ({listed}): choose one by its number, as in FILE#1")
    return results[part - 1]


# --- Values that are checked ------------------------------------------------------------------------------------------


def numbers(
    values: Any, what: str, *, remedy: str, least: float = 0.0, most: float = LAST_S
) -> npt.NDArray[np.float64]:
    """The list as numbers from `least` to `most`. RecordError names the first that is none; a NaN reads as null."""
    if not isinstance(values, list):
        raise RecordError(f"{what} is {_shown(values)} and no list: {remedy}")
    known = [is_number(value) and least <= value <= most for value in values]
    if all(known):
        return np.array(values, dtype=np.float64)
    place = known.index(False)
    raise RecordError(f"{what}[{place}] is {_shown(values[place])}, limits {least:g} and {most:.10g}: {remedy}")


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return type(value) in (int, float)


def count_or_none(value: Any) -> int | None:
    """The value where it is a count that a column can hold."""
    return int(value) if is_number(value) and 0 <= value <= MOST_TOKENS else None


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
