"""Control groups of memory: what the kernel holds a process to, and kills it for (Linux, root)."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fault import CANDIDATE, CONTROL, Live, Moment, Situation, some_instant
from tests.faults.machine import Memory

_ROOT = Path("/sys/fs/cgroup")
_ROOM = 2 << 20  # bytes that a process may take beyond those that it has
_GONE_S = 5.0
_HELD_S = 30.0


class MemoryGroup:
    """A group of this host, in which processes may take so many bytes more than they have."""

    def __init__(self, room: int) -> None:
        first = (_ROOT / "memory").is_dir()  # cgroup v1; in v2 all controllers are in one tree
        self._above = _ROOT / "memory" if first else _ROOT
        self._limit = "memory.limit_in_bytes" if first else "memory.max"
        self._none = "-1" if first else "max"
        self.path = self._above / f"tailgate-faults-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / self._limit).write_text(str(room))

    def take(self, pid: int) -> None:
        """The process is in the group. Memory that it has stays counted where it was."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def lift(self) -> None:
        """Its processes may take what they want."""
        with contextlib.suppress(OSError):
            (self.path / self._limit).write_text(self._none)

    def close(self) -> None:
        """Whoever is left is where it was, and the group is gone."""
        until_s = time.monotonic() + _GONE_S
        while self.path.exists() and time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                for pid in (self.path / "cgroup.procs").read_text().split():
                    (self._above / "cgroup.procs").write_text(pid)
                self.path.rmdir()
            time.sleep(0.05)


@functools.cache
def why_no_groups() -> str:
    """Why no process can be held to a group here; empty where one can."""
    if os.geteuid() != 0:
        return "not root"
    try:
        group = MemoryGroup(_ROOM)
    except OSError as error:
        return str(error)
    # Some kernels count and hold nobody to it.
    takes = f"import sys; sys.stdin.read(); bytearray(b'1') * {16 * _ROOM}"
    process = subprocess.Popen([sys.executable, "-c", takes], stdin=subprocess.PIPE)
    try:
        group.take(process.pid)
        process.communicate(timeout=_HELD_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        process.kill()
        process.communicate()
        return str(error)
    finally:
        group.close()
    return "" if process.returncode == -signal.SIGKILL else "nobody is held to a group"


@dataclass(frozen=True)
class HeldMemory(Memory):
    """The kernel gives a process 2 MiB more and then kills it."""

    _groups: list[MemoryGroup] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Such as "the kernel holds the memory of load"."""
        return f"the kernel holds the memory of {self.role}"

    @property
    def silenced_logs(self) -> tuple[str, ...]:
        """Whoever is killed says nothing at all."""
        return ()

    @property
    def spares_temporary(self) -> bool:
        """What the orchestrator starts is in its group, also what would remove its folders."""
        return self.role == "orchestrator"

    def inject(self, live: Live) -> str:
        """It is in a group of its own."""
        pids = live.pids(self.role)
        if not pids:
            return ""
        group = MemoryGroup(_ROOM)
        live.setup.closing.callback(group.close)
        self._groups.append(group)
        for pid in pids:
            with contextlib.suppress(OSError):
                group.take(pid)
        return f"{len(pids)} of {self.role}"

    def lift(self, live: Live) -> None:
        """It gets what it asks for, if it is still there."""
        for group in self._groups:
            group.lift()


def draw(rng: random.Random, situation: Situation) -> Moment | None:
    """The kernel holds a process to what it has. Whoever was killed does not come back: those are of safety."""
    roles = ("orchestrator", "load", CONTROL, "page", "envoy", CANDIDATE)
    role = rng.choice(roles)
    phase, after_s = some_instant(rng, situation)
    lasts_s = round(rng.uniform(0.3, 2.0), 1) if rng.random() < 0.5 else None
    if situation.liveness or situation.kind in ("users' ramp", "external") or why_no_groups():
        return None
    return Moment(phase=phase, after_s=after_s, fault=HeldMemory(role), lasts_s=lasts_s)
