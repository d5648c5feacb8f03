"""What a fault is, and what it may take hold of: the words that all families of faults share."""

from __future__ import annotations

import abc
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tests.faults.disks import Disk

Kind = Literal["run", "until-decided", "ramp", "workers", "remote worker", "external", "engine", "users' ramp"]
Truth = Literal["good", "naive", "slow", "other answers", "dies"]
Family = Literal["safety", "liveness", "none"]

CONTROL, CANDIDATE = "control", "candidate"
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
USERS_PHASES = ("preparing", "meeting the arms", "traffic of users", "stopping", "judging")


def phases(kind: Kind) -> tuple[str, ...]:
    """The phases of a run of the kind, in their order."""
    return USERS_PHASES if kind == "users' ramp" else PHASES


@dataclass(slots=True)
class Setup:
    """What a run is started with; a fault may change it before. `settings` are those of --set, `environment` what is
    added to the environment of every process, `arm_flags` those of tests/fakes/arm.py, and `arm_command` what starts an
    arm; empty: the paced fake. `prelude` is Python that the run begins with, `disk` its results lie on, where it
    has one of its own, `worker_environment` is for a worker elsewhere alone; `closing` is closed once all was seen."""

    folder: Path
    settings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    arm_flags: list[str] = field(default_factory=list)
    arm_command: list[str] = field(default_factory=list)
    prelude: str = ""
    disk: Disk | None = None
    worker_environment: dict[str, str] = field(default_factory=dict)
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Live(Protocol):
    """A run that goes on."""

    setup: Setup

    def pids(self, role: str) -> list[int]:
        """The processes that have the role now, such as "envoy" (see tests/faults/processes.py)."""

    def every_pid(self) -> list[int]:
        """All processes of the run."""

    def run_dir(self) -> Path | None:
        """The run directory, once it is there."""

    @property
    def phase(self) -> str:
        """The last phase that the run has shown."""


class Fault(abc.ABC):
    """Something that goes wrong: plain data. Its families override what they need.

    Beside its `name`, a row of the tables, it says what promises allow for.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its row in the tables."""

    @property
    def hurts(self) -> frozenset[str]:
        """The arms (`CONTROL`, `CANDIDATE`) that it may make slower, or whose requests it may make fail."""
        return frozenset()

    @property
    def silences(self) -> frozenset[str]:
        """The arms that answer nothing any more once it is there."""
        return frozenset()

    @property
    def ends_records(self) -> bool:
        """Whether what is answered from then on may go unrecorded."""
        return False

    @property
    def removes_records(self) -> bool:
        """Whether what was recorded is gone."""
        return False

    @property
    def silenced_logs(self) -> tuple[str, ...]:
        """How the logs begin in which a process may leave a traceback, since it had nothing left to say more with."""
        return ()

    @property
    def spares_temporary(self) -> bool:
        """Whether temporary folders may stay, as whatever removes them is gone too."""
        return False

    @property
    def forbids_pass(self) -> bool:
        """Whether no candidate may pass, however good it is."""
        return False

    @property
    def is_watched(self) -> bool:
        """Whether the run watches its machines: whoever else uses them keeps it from a PASS."""
        return False

    @property
    def extra_s(self) -> float:
        """How much longer the run may take, beside the time until it is lifted."""
        return 0.0

    def arrange(self, setup: Setup) -> None:  # noqa: B027  (most need nothing)
        """The run is started so that the fault can come."""

    @abc.abstractmethod
    def inject(self, live: Live) -> str:
        """The fault is there. What it hit, in words; empty where there was nothing to hit."""

    def lift(self, live: Live) -> None:  # noqa: B027  (most are not lifted)
        """The fault is gone again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The fault comes `after_s` after the run has shown `phase`, and is lifted after `lasts_s`; None: never."""

    phase: str
    after_s: float
    fault: Fault
    lasts_s: float | None = None

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f", for {self.lasts_s:g} s"
        return f"{self.fault.name} {self.after_s:g} s into {self.phase!r}{lasts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a moment is drawn for. `liveness`: it is lifted again, or hits what the run can do without, so that the run
    must come to its usual end. `quick`: nothing lasts longer than two seconds."""

    kind: Kind
    truth: Truth
    duration_s: float
    liveness: bool
    quick: bool


# Draws a moment; None where the family has no fault for the situation.
Draw = Callable[[random.Random, Situation], Moment | None]


def some_instant(rng: random.Random, situation: Situation, first: str = "", last: str = "") -> tuple[str, float]:
    """A phase from `first` to `last`, where they are given, and seconds into it: each phase is as likely as another."""
    every = phases(situation.kind)
    begin, end = every.index(first) if first else 0, every.index(last) if last else len(every) - 1
    phase = rng.choice(every[begin : end + 1])
    within = situation.duration_s if phase.startswith("traffic") else 0.6  # others may be over soon
    return phase, round(rng.uniform(0.0, within), 2)
