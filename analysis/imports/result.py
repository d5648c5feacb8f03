"""What a result file of another load tool holds: its requests, and how they were sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError

SECOND = 1e9
LAST_S = 3e9  # beyond any clock, and any sum of three is still a number of ns
CLOSED_LOOP = "(closed loop), which hides the tail"

_AGAIN = "run it again"
_MOST_TOKENS = 2**31 - 1
_LONGEST_ERROR = 200
_LONGEST_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests of one run of a tool against one server."""

    tool: str
    requests: pa.Table  # schema REQUESTS; null is what the tool does not know, the arm and the trial among it
    pace: str  # how they were sent, and where their latency counts from, in a sentence
    open_loop: bool | None = None  # whether they were sent without waiting for answers; None if that is unknown
    concurrency: int | None = None  # that were kept under way, or that there could be at most
    sent: int | None = None  # requests, by the tool's own count
    model: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)  # settings in which two files of one comparison must agree
    problems: tuple[str, ...] = ()  # in words that follow the file's name


class Row:
    """A table of a file, such as one request: values by dotted paths, of which the first that is not null counts.

    Raises RecordError for a value of another kind or beyond its limits.
    """

    def __init__(self, content: Any, name: str = "") -> None:
        self._content = content
        self._name = f"{name}: " if name else ""

    def first(self, *paths: str) -> tuple[str, Any]:
        """Return the first path that has a value, and the value; the last path and None without one."""
        for path in paths:
            value = self._content
            for key in path.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return path, value
        return paths[-1], None

    def text(self, *paths: str) -> str:
        """Return the text, empty if there is none."""
        value = self.first(*paths)[1]
        return value if isinstance(value, str) else ""

    def number(self, *paths: str, least: float = 0, most: float = LAST_S) -> Any:
        """Return the number, whole or not as it is written; None if there is none."""
        path, value = self.first(*paths)
        return None if value is None else self._checked(path, value, least, most)

    def needed(self, path: str, *, most: float = LAST_S) -> Any:
        """Return the number, which must be there."""
        return self._checked(path, self.first(path)[1], 0, most)

    def count(self, *paths: str) -> int | None:
        """Return the number as a count of tokens."""
        value = self.number(*paths, most=_MOST_TOKENS)
        return None if value is None else int(value)

    def numbers(self, path: str) -> list[float] | None:
        """Return the list of numbers, None if there is none."""
        values = self.first(path)[1]
        if values is None:
            return None
        if not isinstance(values, list):
            raise RecordError(f"{self._name}{path} is {_shown(values)} and no list: {_AGAIN}")
        return [self._checked(f"{path}[{place}]", value, 0, LAST_S) for place, value in enumerate(values)]

    def _checked(self, path: str, value: Any, least: float, most: float) -> Any:
        if type(value) in (int, float) and least <= value <= most:
            return value
        limits = f"limits {least:g} and {most:.10g}"
        raise RecordError(f"{self._name}{path} is {_shown(value)}, {limits}: {_AGAIN}")


def rows_in(contents: Sequence[Any]) -> list[Row]:
    """Return a row for each request in a list."""
    return [Row(content, f"request {place}") for place, content in enumerate(contents, 1)]


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def requests_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return requests, each with some of the columns of REQUESTS, as a table; null elsewhere."""
    shortened = [{**row, "error": (row.get("error") or "")[:_LONGEST_ERROR] or None} for row in rows]
    return pa.Table.from_pylist(shortened, schema=REQUESTS)


def ns(seconds: float | None) -> int | None:
    """Return seconds as whole ns; None for none and for 0, which stands for an unknown time."""
    return round(seconds * SECOND) if seconds else None


def offsets_ns(first_s: float | None, gaps_s: Sequence[float] | None) -> list[int] | None:
    """Return the time of each piece of an answer from its send in ns; None if they are not kept."""
    if not first_s or gaps_s is None:
        return None
    times: list[int] = np.rint(np.cumsum([first_s, *gaps_s]) * SECOND).astype(np.int64).tolist()
    return times
