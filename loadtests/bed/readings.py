"""Values that are read one by one: what cannot be read is null, and is said once with the reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Probe(NamedTuple):
    """Reads some columns at once, in their order. It may raise anything."""

    columns: tuple[str, ...]
    read: Callable[[], Sequence[Any]]


def probe(column: str, read: Callable[[], Any]) -> Probe:
    """A probe of one column."""
    return Probe((column,), lambda: (read(),))


class Readings:
    """Reads probes of one host. `say` is given each thing that cannot be read, the first time."""

    def __init__(self, host: str, say: Callable[[dict[str, str]], None]) -> None:
        self.host = host
        self._say = say
        self._said: set[tuple[str, str]] = set()

    def of(self, name: str, probes: Iterable[Probe]) -> dict[str, Any]:
        """The columns of `name` that could be read. One that failed is tried again the next time."""
        row: dict[str, Any] = {}
        for columns, read in probes:
            try:
                row.update(zip(columns, read(), strict=True))
            except Exception as error:  # a driver may fail in any way; the other values are still worth having
                for column in columns:
                    self.unreadable(name, column, reason(error))
        return {column: value for column, value in row.items() if value is not None}

    def unreadable(self, name: str, what: str, why: str) -> None:
        """It was said that `what` of `name` cannot be read."""
        if (name, what) not in self._said:
            self._said.add((name, what))
            self._say({"host": self.host, "name": name, "what": what, "why": why})


class Seldom:
    """When to do what costs much: so seldom that it takes at most `share` of a processor, `least_s` apart or more."""

    def __init__(self, *, share: float, least_s: float = 0.0) -> None:
        self._share = share
        self._least_s = least_s
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._next_s

    def hurry(self) -> None:
        """It is time."""
        self._next_s = 0.0

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """What is done inside says when the next time is."""
        began_s = time.thread_time()
        yield
        self._next_s = time.monotonic() + max(self._least_s, (time.thread_time() - began_s) / self._share)


def reason(error: BaseException) -> str:
    """One line: the system's or the library's own words, with the file where there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
