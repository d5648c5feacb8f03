"""What there is to know of one run once it is over: plain values that promises are held against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.fault import Moment
from tests.faults.plan import Plan

AMONG_TEMPORARY = "among the temporary files"  # how a folder that stayed is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that came: when, what the run showed then, and what it hit."""

    moment: Moment
    at_ns: int
    phase: str
    hit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that an arm answered to its end, by the arm's own word."""

    request_id: str
    arm: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a command ended. `code` is None where it did not end within `limit_s` and was killed."""

    code: int | None
    stdout: str
    stderr: str
    took_s: float
    limit_s: float

    @property
    def line(self) -> Mapping[str, Any]:
        """The last line of stdout, for programs; empty where there is none."""
        lines = self.stdout.strip().splitlines()
        try:
            line = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return line if isinstance(line, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """`left` are processes, sockets and files that the run left behind, in words, and `gone_after_s` says how long its
    processes took to go; `recorded` has the ids of all recorded requests, and `recorded_before` of those that were on
    the disk when a fault came; `analysis` is `tailgate analyze` afterwards, where the run did not come to its end;
    `leaks` names files and command lines that hold a secret.
    """

    plan: Plan
    run: Command
    run_dir: Path | None
    injected: tuple[Injected, ...] = ()
    analysis: Command | None = None
    summaries: tuple[Mapping[str, Any] | str, ...] = ()
    answered: tuple[Answered, ...] = ()
    recorded: frozenset[str] = frozenset()
    recorded_before: frozenset[str] = frozenset()
    left: tuple[str, ...] = ()
    gone_after_s: float = 0.0
    leaks: tuple[str, ...] = ()
    tracebacks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """What the run said."""
        said = self.run.line.get("verdict")
        return None if said is None else str(said)

    @property
    def was_killed(self) -> bool:
        """Whether whoever writes the verdict was killed or asked to end, or might be killed by the kernel."""
        ends = ("SIGKILL of orchestrator", "SIGTERM of orchestrator", "the kernel holds the memory of orchestrator")
        return any(map(self.hit, ends))

    def hit(self, name: str) -> bool:
        """Whether a fault of the name came."""
        return any(item.moment.fault.name == name and item.hit for item in self.injected)
