"""What the programs of servers print for the process that starts them, one JSON line each (`servers.processes.say`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A replica listens. `tailgate serve` prints the same fields as its JSON line."""

    port: int
    pid: int
    metrics_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The reference is loaded and waits for a line on its stdin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the reference measured, or why it did not."""

    at_ns: int
    values: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How far a measurement of parity is."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a measurement of parity has loaded."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a measurement of parity cannot be made."""

    why: str
