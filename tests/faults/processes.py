"""The processes of a run, found by a mark in their environment (Linux); signals that hit them, and arms that lie."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.fakes.arm import LIES, Lie
from tests.faults.fault import ARMS, CANDIDATE, CONTROL, Fault, Kind, Live, Moment, Setup, Situation, some_instant

MARK = "TAILGATE_FAULTS_MARK"
_CONTROL = "eager"  # the control's name in every plan
_MODULES = {
    "-m tailgate.loadtests.monitor": "watcher",
    "-m tailgate.loadtests.commands.main worker": "remote worker",
    "tests.fakes.http_servers": "server",
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that runs or is stopped; `started` is in seconds since the epoch."""

    pid: int
    parent: int
    words: tuple[str, ...]
    started: float

    @property
    def command(self) -> str:
        """Its command line, without the text of programs."""
        return " ".join(word for word in self.words if "\n" not in word)


def marked(mark: str) -> dict[int, Process]:
    """Return every process that was started with the mark in its environment, without zombies."""
    found = {}
    for item in psutil.process_iter(["environ", "ppid", "cmdline", "create_time"]):
        parent, words, started = (item.info[key] for key in ("ppid", "cmdline", "create_time"))
        if (item.info["environ"] or {}).get(MARK) == mark and words:
            found[item.pid] = Process(pid=item.pid, parent=parent, words=tuple(words), started=started)
    return found


def role(process: Process, every: Mapping[int, Process], orchestrator: int) -> str:
    """Return the role of the process in its run; empty where no fault is planned for it."""
    if process.pid == orchestrator:
        return "orchestrator"
    words, command = process.words, process.command
    above = every.get(process.parent)
    parent = role(above, every, orchestrator) if above is not None else ""
    if "--replica" in words:
        arm = words[words.index("--replica") + 1].rpartition("-")[0]
        return CONTROL if arm == _CONTROL else CANDIDATE
    if any(word.rsplit("/", 1)[-1] == "envoy" for word in words[:8]):
        return "envoy"
    if "-m locust" in command:
        return "worker" if parent in ("load", "worker", "remote worker") else "load"
    if "-m tailgate.analysis.interim" in command:
        return "judge"
    return next((name for module, name in _MODULES.items() if module in command), "")


def ancestry(process: Process, every: Mapping[int, Process]) -> set[int]:
    """Return the process and its marked ancestors."""
    above = every.get(process.parent)
    return {process.pid} | (ancestry(above, every) if above is not None else set())


def by_role(mark: str, orchestrator: int) -> dict[str, list[int]]:
    """Return the process ids of each role, oldest first."""
    every = marked(mark)
    found: dict[str, list[int]] = {}
    for process in sorted(every.values(), key=lambda item: (item.started, item.pid)):
        found.setdefault(role(process, every, orchestrator), []).append(process.pid)
    return found


_ALWAYS = ("orchestrator", *ARMS, "envoy", "load")
_MORE: dict[Kind, tuple[str, ...]] = {
    "run": ("watcher",),
    "until-decided": ("judge",),
    "ramp": ("judge",),
    "workers": ("worker", "worker"),
    "remote worker": ("worker", "remote worker"),
    "external": ("server",),
}
# The first and the last phase of a process; others exist from the first phase to the last.
_WHEN = {
    **dict.fromkeys((*ARMS, "watcher"), ("starting arms", "stopping")),
    "envoy": ("starting the splitter", "stopping"),
    **dict.fromkeys(("load", "worker"), ("starting the load", "waiting for the last answers")),
    "judge": ("starting arms", "stopping"),
}
_SPARE = frozenset({"watcher"})  # a run goes on without them
_RECORDERS = frozenset({"load", "worker", "remote worker", "orchestrator"})
_LOAD_S = 130.0  # how long a run waits for a load that does not end (loadtests/trials/load.py)


class Signal(Fault):
    """A signal for every process of the role, or for one of several workers. SIGSTOP is lifted by SIGCONT."""

    def __init__(self, number: signal.Signals, role: str) -> None:
        arm = role if role in ARMS else CANDIDATE if role == "server" else ""
        own = (arm,) if arm else ()
        lasting = number != signal.SIGSTOP
        super().__init__(
            name=f"{number.name} of {role}",
            hurts=own or (ARMS if role == "envoy" else ()),
            silences=own if lasting else (),
            ends_records=lasting and role in _RECORDERS,
            is_watched=role == "watcher",
            extra_s=_LOAD_S if role in ("load", "worker", "remote worker") else 0.0,
        )
        self._number, self._role = number, role
        self._stopped: list[int] = []

    def inject(self, live: Live) -> str:
        pids = live.pids(self._role)
        if self._role == "worker":
            pids = pids[:1]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, self._number)
        if self._number == signal.SIGSTOP:
            self._stopped.extend(pids)
        return f"{len(pids)} of {self._role}" if pids else ""

    def lift(self, live: Live) -> None:
        for pid in self._stopped:
            if pid in live.pids(self._role):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def draw_signal(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a signal at a random instant for a process that exists then."""
    kind = situation.kind
    absent = ("envoy", CANDIDATE) if kind == "external" else ()
    role = rng.choice([role for role in (*_ALWAYS, *_MORE[kind]) if role not in absent])
    phase, after_s = some_instant(rng, situation, *_WHEN.get(role, ()))
    numbers = [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]
    number = rng.choice(numbers if not situation.liveness or role in _SPARE else [signal.SIGSTOP])
    lasts_s = None
    if number == signal.SIGSTOP:
        # In a liveness plan no longer than any request may take; elsewhere 1 to 60 s, the longer the rarer.
        most_s = 2.0 if situation.quick or situation.liveness else 60.0
        lasts_s = round(most_s ** rng.random(), 1) if most_s > 2.0 else round(rng.uniform(0.3, most_s), 1)
    return Moment(phase=phase, after_s=after_s, fault=Signal(number, role), lasts_s=lasts_s)


_COMPILES = tuple(lie for lie in LIES if lie.startswith("compiles"))
_ANSWERS = tuple(lie for lie in LIES if not lie.startswith("compiles"))
# With the others the candidate cannot be judged by what it reports, or does less work than the control.
_MAY_PASS: tuple[Lie, ...] = (
    "no trailers",
    "times that go backwards",
    "steps that go backwards",
    "compiles twice",
    "compiles from the future",
    "compiles of negative length",
)


MANAGED: tuple[Kind, ...] = ("run", "until-decided", "ramp", "workers", "remote worker")  # every arm


class Lying(Fault):
    """An arm lies from its start on. A control that cheats is faster than any candidate, which may then well fail."""

    def __init__(self, lie: Lie, arm: str, truth: str) -> None:
        # A control whose trailers are late is slow, as its clients see: a good candidate passes next to it.
        forbids_pass = lie not in _MAY_PASS and (lie, arm) != ("late trailers", CONTROL)
        super().__init__(name=f"{lie}, says {arm}", hurts=ARMS, forbids_pass=forbids_pass)
        names = {CONTROL: "eager", CANDIDATE: "compiled-naive" if truth == "naive" else "compiled-padded"}
        self._flags = ["--lie", f"{names[arm]}-0={lie}"]

    def arrange(self, setup: Setup) -> None:
        setup.arm_flags += self._flags

    def inject(self, live: Live) -> str:
        return "every word"


def draw_lie(rng: random.Random, situation: Situation) -> Moment | None:
    """Draw a lie of one arm; only the candidate lies about compiles."""
    if situation.kind not in MANAGED:
        return None
    lie, arm = rng.choice(_ANSWERS + _COMPILES), rng.choice((CANDIDATE, CANDIDATE, CONTROL))
    if lie in _COMPILES:
        arm = CANDIDATE
    if situation.liveness and (lie == "another name" or (lie in _COMPILES and situation.truth == "naive")):
        return None  # compiles that cannot be placed are no reason to fail
    return Moment(phase="starting arms", after_s=0.0, fault=Lying(lie, arm, situation.truth))
