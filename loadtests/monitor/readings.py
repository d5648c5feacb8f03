"""What the machine monitor is asked, reads, and says to the process that starts it.

Values are read one by one: one that cannot be read is null, and is reported once with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """To sample this host and its `devices`, called as arms do, every `sample_s` into the table at `out`."""

    out: str
    trial: int
    sample_s: float
    devices: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What each device is, and a sample of each before the run starts anything."""

    devices: Mapping[str, Mapping[str, Any]]
    before: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A value that cannot be read, and why. Each is said once."""

    name: str
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """To the monitor: sample the process and its descendants under `name`, until it ends."""

    name: str
    pid: int
    arm: str | None = None


# What is read: a column, or several that come together in their order, by a function that may raise anything.
Probes = Mapping[str | tuple[str, ...], Callable[[], Any]]


class Readings:
    """Reads probes. `report` gets each thing that cannot be read, the first time."""

    def __init__(self, report: Callable[[Unreadable], None]) -> None:
        self._report = report
        self._reported: set[tuple[str, str]] = set()

    def of(self, name: str, probes: Probes) -> dict[str, Any]:
        """Return the columns of `name` that could be read. One that failed is tried again the next time."""
        row: dict[str, Any] = {}
        for key, read in probes.items():
            columns = (key,) if isinstance(key, str) else key
            try:
                row |= zip(columns, [read()] if isinstance(key, str) else read(), strict=True)
            except Exception as error:  # a driver may fail in any way; the other values are still worth having
                for column in columns:
                    self.unreadable(name, column, reason(error))
        return {column: value for column, value in row.items() if value is not None}

    def unreadable(self, name: str, what: str, why: str) -> None:
        """Report, once, that `what` of `name` cannot be read."""
        if (name, what) not in self._reported:
            self._reported.add((name, what))
            self._report(Unreadable(name=name, what=what, why=why))


def reason(error: BaseException) -> str:
    """Return the system's or the library's own words on one line, with the file where there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
