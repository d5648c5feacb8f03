"""What the machine monitor and the process that starts it say to each other, one JSON line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is on the machine before the run starts anything: by host, by device, and what each device does."""

    machines: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, Mapping[str, Any]]
    before: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A value that cannot be read, and why. Each is said once."""

    host: str
    name: str
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the sampling cost since its start-up."""

    cpu_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """To the monitor: sample the process and its descendants under `name`; no `pid` ends that."""

    name: str
    pid: int | None = None
    arm: str | None = None
