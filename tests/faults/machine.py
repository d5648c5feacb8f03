"""The machine: its wall clock steps, a worker's clocks are fast, processors and memory are taken away."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import clocks
from tests.faults.clocks import why_no_clocks
from tests.faults.fault import CANDIDATE, CONTROL, Fault, Live, Moment, Setup, Situation, some_instant

ARMS = frozenset({CONTROL, CANDIDATE})
_BURNERS = 2
_ROOM = 1 << 20


@dataclass(frozen=True)
class Clock(Fault):
    """The wall clock of every process of the run steps by so many seconds; monotonic clocks go on, as they do."""

    seconds: int

    @property
    def name(self) -> str:
        """Such as "the wall clock steps by +3600 s"."""
        return f"the wall clock steps by {self.seconds:+d} s"

    def arrange(self, setup: Setup) -> None:
        """Processes ask a library for the time, which asks a file."""
        setup.environment |= clocks.environment(setup.folder)

    def inject(self, live: Live) -> str:
        """The clock has stepped."""
        clocks.step(live.setup.folder, self.seconds)
        return "all processes"

    def lift(self, live: Live) -> None:
        """It has stepped back."""
        clocks.step(live.setup.folder, 0)


@dataclass(frozen=True)
class WorkerClock(Clock):
    """The wall clock of the worker elsewhere steps alone."""

    @property
    def name(self) -> str:
        """Such as "the worker's wall clock steps by +3600 s"."""
        return f"the worker's wall clock steps by {self.seconds:+d} s"

    def arrange(self, setup: Setup) -> None:
        """The worker asks a library for the time; how fast its clocks are is another fault."""
        setup.worker_environment |= clocks.environment(setup.folder) | setup.worker_environment

    def inject(self, live: Live) -> str:
        """Its clock has stepped, if it is there."""
        super().inject(live)
        return "the remote worker" if live.pids("remote worker") else ""


@dataclass(frozen=True)
class Skew(Fault):
    """All clocks of the worker elsewhere are fast from its start on."""

    rate: float

    @property
    def name(self) -> str:
        """Such as "the worker's clocks run at 1.002"."""
        return f"the worker's clocks run at {self.rate:g}"

    def arrange(self, setup: Setup) -> None:
        """The worker asks a library for the time."""
        setup.worker_environment |= clocks.environment(setup.folder, rate=self.rate)

    def inject(self, live: Live) -> str:
        """They are fast already."""
        return "the remote worker" if live.pids("remote worker") else ""


@dataclass(frozen=True)
class Processors(Fault):
    """Every process of the run shares one processor with others that compute."""

    _burners: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        """One for all."""
        return "one processor for all, and two that compute on it"

    @property
    def hurts(self) -> frozenset[str]:
        """Both."""
        return ARMS

    def inject(self, live: Live) -> str:
        """All threads are on one processor."""
        one = {min(os.sched_getaffinity(0))}
        for _ in range(_BURNERS):
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"], env={}, process_group=0)
            os.sched_setaffinity(burner.pid, one)
            self._burners.append(burner)
        live.setup.closing.callback(self._end)
        return f"{_pin(live, one)} threads"

    def lift(self, live: Live) -> None:
        """They may run where they could before."""
        self._end()
        _pin(live, os.sched_getaffinity(0))

    def _end(self) -> None:
        while self._burners:
            burner = self._burners.pop()
            burner.kill()
            burner.wait()


@dataclass(frozen=True)
class Memory(Fault):
    """A process gets no more memory than it has, and a little."""

    role: str

    @property
    def name(self) -> str:
        """Such as "no more memory for load"."""
        return f"no more memory for {self.role}"

    @property
    def hurts(self) -> frozenset[str]:
        """The arm, or both where it is what they share."""
        return frozenset({self.role}) if self.role in ARMS else ARMS if self.role == "envoy" else frozenset()

    @property
    def ends_records(self) -> bool:
        """Whoever records may not be able to."""
        return self.role not in (*ARMS, "envoy")

    @property
    def silenced_logs(self) -> tuple[str, ...]:
        """Python, grpcio and Locust print where they were when there was no memory."""
        return {CONTROL: ("eager-",), CANDIDATE: ("compiled-",), "load": ("locust",)}.get(self.role, ())

    @property
    def extra_s(self) -> float:
        """A load that does not end is waited for."""
        return 130.0 if self.role in ("load", "worker") else 0.0

    def inject(self, live: Live) -> str:
        """It has what it has."""
        pids = live.pids(self.role)
        for pid in pids:
            with suppress(OSError, ValueError):
                size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(pid, resource.RLIMIT_AS, (size + _ROOM, resource.RLIM_INFINITY))
        return f"{len(pids)} of {self.role}" if pids else ""

    def lift(self, live: Live) -> None:
        """It gets what it asks for."""
        for pid in live.pids(self.role):
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _pin(live: Live, processors: set[int]) -> int:
    count = 0
    for pid in live.every_pid():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                os.sched_setaffinity(int(task.name), processors)
                count += 1
    return count


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """Something of the machine is not as it should be."""
    lasts_s: float | None = round(rng.uniform(0.3, 2.0), 1)
    if not situation.liveness and rng.random() < 0.5:
        lasts_s = None
    phase, after_s = some_instant(rng, situation)
    match rng.choice(("clock", "skew", "processors", "memory")):
        case "clock" if not why_no_clocks() and situation.kind != "users' ramp":
            steps = WorkerClock if situation.kind == "remote worker" and rng.random() < 0.5 else Clock
            fault: Fault = steps(rng.choice((-3600, -30, 30, 3600)))
        case "skew" if not why_no_clocks() and situation.kind == "remote worker":
            fault, phase, after_s, lasts_s = Skew(rng.choice((0.998, 1.0002, 1.002))), "starting arms", 0.0, None
        case "processors":
            fault = Processors()
        case "memory" if not situation.liveness and situation.kind not in ("users' ramp", "engine"):
            roles = ["orchestrator", "load", CONTROL, "page"]
            fault = Memory(rng.choice([*roles, *([] if situation.kind == "external" else ["envoy", CANDIDATE])]))
        case _:
            return None
    return Moment(phase=phase, after_s=after_s, fault=fault, lasts_s=lasts_s)
