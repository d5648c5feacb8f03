"""What a result file of another load tool holds: its requests, and how they were sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordError
from analysis.wording import counted

SECOND = 1e9
LAST_S = 3e9  # beyond any clock, and any sum of three is still a number of ns

_MOST_TOKENS = 2**31 - 1
_LONGEST_ERROR = 200
_PACES = {
    True: "on a schedule (open loop)",
    False: "as others ended (closed loop), which hides the tail",
    None: "in a way that the file does not state",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The requests of one run of a tool against one server."""

    tool: str
    requests: pa.Table  # schema REQUESTS; null is what the tool does not know, the arm and the trial among it
    origin: str  # where their latency counts from, in words
    open_loop: bool | None = None  # whether they were sent without waiting for answers; None if that is unknown
    concurrency: int | None = None  # that were kept under way, or that there could be at most
    sent: int | None = None  # requests, by the tool's own count
    model: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)  # settings in which two files of one comparison must agree
    problems: tuple[str, ...] = ()  # in words that follow the file's name

    @property
    def pace(self) -> str:
        """How the requests were sent, and where their latency counts from, in a sentence."""
        limit = f", with at most {counted(self.concurrency, 'request')} under way" if self.concurrency else ""
        return f"{self.tool} sent requests {_PACES[self.open_loop]}{limit}; latency counts from {self.origin}."


@dataclass(frozen=True, slots=True)
class Row:
    """A table of a file, such as one request: values by dotted paths, of which the first that is not null counts.

    Methods that read numbers raise RecordError for a value of another kind or beyond its limits.
    """

    content: Any

    def value(self, *paths: str) -> Any:
        """Return the value, None if there is none."""
        for path in paths:
            value = self.content
            for key in path.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def text(self, *paths: str) -> str:
        """Return the text, empty if there is none."""
        value = self.value(*paths)
        return value if isinstance(value, str) else ""

    def number(self, *paths: str, least: float = 0, most: float = LAST_S) -> Any:
        """Return the number, None if there is none."""
        known = ((path, self.value(path)) for path in paths)
        return next((_checked(path, value, least, most) for path, value in known if value is not None), None)

    def needed(self, path: str, *, most: float = LAST_S) -> Any:
        """Return the number, which must be there."""
        return _checked(path, self.value(path), 0, most)

    def count(self, *paths: str) -> int | None:
        """Return the number as a count of tokens or requests, None if there is none."""
        value = self.number(*paths, most=_MOST_TOKENS)
        return None if value is None else int(value)

    def numbers(self, path: str) -> list[float] | None:
        """Return the list of numbers, None if there is none."""
        values = self.value(path)
        if not isinstance(values, list | None):
            raise RecordError(f"{path} is {values!r:.40} and no list: run it again")
        return values and [_checked(f"{path}[{place}]", value, 0, LAST_S) for place, value in enumerate(values)]


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
