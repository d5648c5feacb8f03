"""A fault: what it does to a run, what promises allow for it, and the situation it is drawn for."""

from __future__ import annotations

import abc
import contextlib
import random
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.fakes.whole_run import FAKE_ARM

Kind = Literal["run", "until-decided", "ramp", "workers", "remote worker", "external"]
Truth = Literal["good", "naive", "slow", "other answers", "dies"]
Family = Literal["safety", "liveness", "none"]
Live = Any  # tests.faults.campaign.LiveRun, which imports this module

CONTROL, CANDIDATE = "control", "candidate"
ARMS = (CONTROL, CANDIDATE)
# As a run shows them on stderr, in their order.
PHASES = (
    "preparing",
    "starting arms",
    "starting the splitter",
    "starting the load",
    "traffic",
    "waiting for the last answers",
    "comparing answers",
    "stopping",
    "judging",
)


@dataclass(slots=True)
class Setup:
    """What a run is started with; `Fault.arrange` may change it.

    `settings` are those of --set, `environment` is added to that of every process. `arm_command` starts an arm
    with `arm_flags`. `disk` is a tests.faults.storage.Disk that holds the results. `closing` is
    closed last. `mark` is in the environment of its processes.
    """

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    settings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    arm_flags: list[str] = field(default_factory=list)
    arm_command: list[str] = field(default_factory=lambda: [sys.executable, str(FAKE_ARM)])
    disk: Any = None
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def scratch(self) -> Path:
        """The folder for temporary files, whose path is short because sockets have short names."""
        return Path(f"/tmp/tgf-{self.mark}")


@dataclass(eq=False, kw_only=True)
class Fault(abc.ABC):
    """Something that goes wrong, and what promises allow for."""

    name: str
    hurts: tuple[str, ...] = ()  # arms that it may slow down, or whose requests it may make fail
    silences: tuple[str, ...] = ()  # arms that answer nothing afterwards
    ends_records: bool = False  # later answers may go unrecorded
    removes_records: bool = False
    silenced_logs: tuple[str, ...] = ()  # prefixes of logs that may hold a traceback
    forbids_pass: bool = False  # for any candidate
    is_watched: bool = False  # the run monitors its machines
    extra_s: float = 0.0  # that the run may take longer

    def arrange(self, setup: Setup) -> None:  # noqa: B027  (most need nothing)
        """Change what the run is started with."""

    @abc.abstractmethod
    def inject(self, live: Live) -> str:
        """Inject the fault and return what it hit; empty where there was nothing to hit."""

    def lift(self, live: Live) -> None:  # noqa: B027  (most are not lifted)
        """Undo the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Inject the fault `after_s` after the run has shown `phase`, and lift it after `lasts_s` (None: never)."""

    phase: str
    after_s: float
    fault: Fault
    lasts_s: float | None = None

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f", for {self.lasts_s:g} s"
        return f"{self.fault.name} {self.after_s:g} s into {self.phase!r}{lasts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a moment is drawn for.

    `liveness`: the fault is lifted, or hits what the run can do without, so that the run must end as usual. `quick`:
    nothing lasts longer than two seconds.
    """

    kind: Kind
    truth: Truth
    duration_s: float
    liveness: bool
    quick: bool


# Draws a moment; None where the family has no fault for the situation.
Draw = Callable[[random.Random, Situation], Moment | None]


def some_instant(
    rng: random.Random, situation: Situation, first: str = PHASES[0], last: str = PHASES[-1]
) -> tuple[str, float]:
    """Draw a phase between `first` and `last`, each as likely as another, and seconds into it."""
    phase = rng.choice(PHASES[PHASES.index(first) : PHASES.index(last) + 1])
    within = situation.duration_s if phase == "traffic" else 0.6  # others may end soon
    return phase, round(rng.uniform(0.0, within), 2)
