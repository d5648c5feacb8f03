"""The processes of a run: each by its name, with all its descendants, and who belongs to the run at all."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtests.bed.readings import Readings, reason

_SEARCH_SHARE = 0.001  # of a processor
_SEARCH_LEAST_S = 2.0
_PROC = Path("/proc")
_SWITCHES = re.compile(rb"voluntary_ctxt_switches:\s+(\d+)")  # the second count is of nonvoluntary ones


@dataclass(slots=True)
class _Family:
    """A named process and its descendants, as last seen."""

    name: str
    arm: str | None
    pid: int
    members: dict[int, psutil.Process] = field(default_factory=dict)
    cpu_s: float = 0.0
    lost_s: float = 0.0  # CPU time of members that ended without a parent that waited for them


class Processes:
    """What is sampled of the processes named with `watch`. `root` is the process of which the whole run descends.

    Descendants are searched for so seldom that it costs a thousandth of a processor. The time of one that started since
    counts when the next search finds it, or when its parent has waited for its end. Switches are those of all threads
    and are read in the same search; between two searches they are null.
    """

    def __init__(self, readings: Readings, *, root: int, proc: Path = _PROC) -> None:
        self._readings = readings
        self._root = root
        self._proc = proc
        self._families: dict[str, _Family] = {}
        self._names: dict[int, str] = {root: ""}  # of every process that was ever seen in the run; "" without a name
        self._next_search_s = 0.0

    def watch(self, name: str, *, pid: int, arm: str | None = None) -> None:
        """The process `pid` and its descendants are called `name` from now on."""
        self._families[name] = _Family(name=name, arm=arm, pid=pid)
        self._names[pid] = name
        self._next_search_s = 0.0

    def forget(self, name: str) -> None:
        """Nothing is called `name` any more."""
        self._families.pop(name, None)

    def sample(self, device_bytes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """A row of each named process that lives. `device_bytes` is what each process holds of all devices."""
        searched = time.monotonic() >= self._next_search_s
        if searched:
            began_s = time.thread_time()
            for family in self._families.values():
                self._find_members(family)
        rows = [row for family in self._families.values() if (row := self._row(family, device_bytes, searched))]
        if searched:
            cost_s = time.thread_time() - began_s
            self._next_search_s = time.monotonic() + max(_SEARCH_LEAST_S, cost_s / _SEARCH_SHARE)
        return rows

    def is_of_run(self, pid: int) -> bool | None:
        """Whether a process descends from the run's own; None where its ancestors cannot be read."""
        line: list[int] = []
        while pid not in self._names:
            if pid <= 1:
                return False
            line.append(pid)
            try:
                fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
                pid = int(fields[1])
            except (OSError, ValueError, IndexError):
                return None
        self._names.update(dict.fromkeys(line, self._names[pid]))
        return True

    def _row(self, family: _Family, device_bytes: Mapping[int, int | None], searched: bool) -> dict[str, Any] | None:
        """None where the process has ended, or cannot be read."""
        cpu_s, memory, threads, files = 0.0, 0, 0, 0
        for pid, member in list(family.members.items()):
            try:
                with member.oneshot():
                    cpu_s += sum(member.cpu_times()[:4])  # its own, and of children that it waited for
                    memory += member.memory_info().rss
                    threads += member.num_threads()
                files += member.num_fds()
            except psutil.NoSuchProcess:
                del family.members[pid]
            except (psutil.Error, OSError) as error:
                self._readings.unreadable(family.name, "cpu_s", reason(error))
                return None
        if family.pid not in family.members:
            return None
        family.lost_s += max(0.0, family.cpu_s - cpu_s)
        family.cpu_s = cpu_s
        held = [size for pid, size in device_bytes.items() if self._names.get(pid) == family.name]
        return {
            "kind": "process",
            "name": family.name,
            "arm": family.arm,
            "pid": family.pid,
            "cpu_s": cpu_s + family.lost_s,
            "memory_bytes": memory,
            "threads": threads,
            "files": files,
            "device_memory_bytes": sum(size or 0 for size in held) if held and None not in held else None,
            **(self._switches(family) if searched else {}),
        }

    def _find_members(self, family: _Family) -> None:
        members: dict[int, psutil.Process] = {}
        waiting = [family.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                if pid not in members:
                    members[pid] = family.members.get(pid) or psutil.Process(pid)
                    waiting += self._children(pid)
        family.members = members
        self._names.update(dict.fromkeys(members, family.name))

    def _children(self, pid: int) -> list[int]:
        try:
            # Kept by thread. psutil would read every process of the host for each of ours.
            texts = [(thread / "children").read_text() for thread in self._threads(pid)]
        except FileNotFoundError:  # a thread ended just now, or the kernel does not show them
            return [child.pid for child in psutil.Process(pid).children()]
        return [int(child) for text in texts for child in text.split()]

    def _switches(self, family: _Family) -> dict[str, int]:
        voluntary = involuntary = 0
        for thread in (thread for pid in family.members for thread in self._threads(pid)):
            with contextlib.suppress(OSError):  # it has ended
                counts = _SWITCHES.findall((thread / "status").read_bytes())
                if len(counts) != 2:
                    self._readings.unreadable(family.name, "voluntary_switches", "the kernel does not count them")
                    return {}
                voluntary += int(counts[0])
                involuntary += int(counts[1])
        return {"voluntary_switches": voluntary, "involuntary_switches": involuntary}

    def _threads(self, pid: int) -> list[Path]:
        try:
            return list((self._proc / str(pid) / "task").iterdir())
        except OSError:
            return []
