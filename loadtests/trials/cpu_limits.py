"""How many processors a running process and its descendants may use: a quota of cgroup v2 where this user may make a
group, otherwise a set of processors to which every thread is bound."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.bed.family import family_of, threads_of

_PERIOD_US = 100_000
_GROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


@dataclass(slots=True)
class CpuLimit:
    """The limit of one process tree. `lift` ends it."""

    method: str  # cgroup | affinity
    processors: tuple[int, ...] | None = None  # that it is bound to
    _group: Path | None = None
    _home: Path | None = None  # the group of before
    _threads: dict[int, set[int]] = field(default_factory=dict)  # processors of before, by thread
    _pid: int = 0

    def lift(self) -> None:
        """Every thread of it may run where it might before."""
        if self._group is not None and self._home is not None:
            for pid in _lines(self._group / "cgroup.procs"):
                _write(self._home / "cgroup.procs", pid)
            with contextlib.suppress(OSError):
                self._group.rmdir()
            return
        before = set().union(*self._threads.values())
        with contextlib.suppress(OSError):
            for thread in _threads_of(self._pid):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread, self._threads.get(thread, before))

    def facts(self) -> dict[str, Any]:
        """As trial.json keeps it."""
        return {"method": self.method} | ({"processors": list(self.processors)} if self.processors else {})


def limit_all(pids: Sequence[int], cpus: float, *, groups: Path = _GROUPS, proc: Path = _PROC) -> list[CpuLimit | None]:
    """Each process of `pids`, with its descendants, may use `cpus` processors, all by the same method.

    None stands at the place of a process that has ended. Bound processes get processors of their own where there are
    enough of them, and otherwise all the same ones: none gets more than another. A fraction of a processor rounds up.
    Raises OSError where neither is allowed; then none is limited.
    """
    processors = _processors(len(pids), math.ceil(cpus))
    try:
        return _each(pids, lambda pid: _grouped(pid, cpus, groups, proc))
    except OSError:
        return _each(pids, lambda pid: _bound(pid, processors[pids.index(pid)]))


def _each(pids: Sequence[int], limited: Callable[[int], CpuLimit]) -> list[CpuLimit | None]:
    """Every process that lives is limited, or, where OSError is raised, none."""
    limits: list[CpuLimit | None] = []
    try:
        for pid in pids:
            try:
                limits.append(limited(pid) if _lives(pid) else None)
            except OSError:
                if _lives(pid):
                    raise
                limits.append(None)
    except OSError:
        for limit in limits:
            if limit is not None:
                limit.lift()
        raise
    return limits


def _grouped(pid: int, cpus: float, groups: Path, proc: Path) -> CpuLimit:
    """The process is in a group of its own with the quota. Raises OSError where this user may not do that.

    The group is made beside the others in the process's own group, or beside that group: one that holds processes
    itself, as a login session does, cannot hand out processors to groups inside it.
    """
    own = next((line[3:] for line in _lines(proc / str(pid) / "cgroup") if line.startswith("0::")), None)
    if own is None or not (groups / "cgroup.controllers").exists():
        raise OSError("no cgroup v2 here")
    home = groups / own.strip("/")
    error = OSError("no group could be made")
    for place in dict.fromkeys((home, home.parent if home != groups else home)):
        group = place / f"tailgate-{pid}"
        try:
            group.mkdir(exist_ok=True)  # one of its name is of an earlier limit that was cut off
        except OSError as failed:
            error = failed
            continue
        try:
            (group / "cpu.max").write_text(f"{round(cpus * _PERIOD_US)} {_PERIOD_US}", encoding="ascii")
            for member, _ in family_of(pid):
                (group / "cgroup.procs").write_text(str(member), encoding="ascii")
            return CpuLimit(method="cgroup", _group=group, _home=home, _pid=pid)
        except OSError as failed:
            error = failed
            CpuLimit(method="cgroup", _group=group, _home=home, _pid=pid).lift()
    raise error


def _processors(count: int, each: int) -> list[tuple[int, ...]]:
    """The processors of each of `count` processes."""
    usable = sorted(os.sched_getaffinity(0))
    apart = count * each <= len(usable)
    firsts = [index * each if apart else 0 for index in range(count)]
    return [tuple(usable[first : first + each]) for first in firsts]


def _bound(pid: int, processors: tuple[int, ...]) -> CpuLimit:
    """Every thread of the process is bound to `processors`. Raises OSError where one cannot be, and then none is."""
    limit = CpuLimit(method="affinity", processors=processors, _pid=pid)
    threads = limit._threads
    try:
        # A thread that starts meanwhile may inherit from one that is not bound yet.
        while new := [thread for thread in _threads_of(pid) if thread not in threads]:
            for thread in new:
                threads[thread] = os.sched_getaffinity(0)
                with contextlib.suppress(ProcessLookupError):
                    threads[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, processors)
        if not threads:
            raise OSError(f"the threads of process {pid} cannot be seen")
    except OSError:
        limit.lift()
        raise
    return limit


def _lives(pid: int) -> bool:
    return next(family_of(pid), None) is not None


def _threads_of(pid: int) -> Iterator[int]:
    """Every thread of the process and of its descendants. Each is bound by itself; new ones inherit."""
    for member, _ in family_of(pid):
        with contextlib.suppress(OSError):
            yield from (int(path.name) for path in threads_of(member))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="ascii")
