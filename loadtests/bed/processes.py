"""The processes of a run: each by its name, with all its descendants, and who belongs to the run at all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.bed.family import GONE, PROC, TICKS_PER_S, Stat, family_of, stat_of, threads_of
from loadtests.bed.readings import Readings, Seldom, reason

_SWITCHES = re.compile(rb"voluntary_ctxt_switches:\s+(\d+)")  # the second count is of nonvoluntary ones

_IDLE_TURNS = 8  # samples until an idle process is read again


@dataclass(slots=True)
class _Member:
    """A process as last read. One that had no processor time from one search to the next is idle."""

    stat: Stat
    searched_ticks: int
    idle: bool = False


@dataclass(slots=True)
class _Family:
    """A named process and its descendants, as last seen."""

    name: str
    arm: str | None
    pid: int
    members: dict[int, _Member] = field(default_factory=dict)
    cpu_ticks: int = 0
    lost_ticks: int = 0  # of members that ended without a parent that waited for them


class Processes:
    """What is sampled of the processes named with `watch`. `root` is the process of which the whole run descends.

    Descendants are searched for so seldom that it costs 0.05 % of a processor. The time of one that started since
    counts when the next search finds it, or when its parent has waited for its end. An idle one is read in every
    eighth sample: a compiled arm has tens of compile workers that wait for the whole of the traffic. Open files, and
    the switches of all threads, are read in the same search; between two searches they are null.
    """

    def __init__(self, readings: Readings, *, root: int, proc: Path = PROC) -> None:
        self._readings = readings
        self._proc = proc
        self._families: dict[str, _Family] = {}
        self._names: dict[int, str] = {root: ""}  # of every process that was ever seen in the run; "" without a name
        self._search = Seldom(share=0.0005, least_s=2.0)
        self._turn = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def watch(self, name: str, *, pid: int, arm: str | None = None) -> None:
        """The process `pid` and its descendants are called `name` from now on."""
        self._families[name] = _Family(name=name, arm=arm, pid=pid)
        self._names[pid] = name
        self._search.hurry()

    def forget(self, name: str) -> None:
        """Nothing is called `name` any more."""
        self._families.pop(name, None)

    def sample(self, device_bytes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """A row of each named process that lives. `device_bytes` is what each process holds of all devices."""
        self._turn += 1
        searched: dict[str, dict[str, int]] = {}
        if self._search.due:
            with self._search.spending():
                for family in self._families.values():
                    self._find_members(family)
                    searched[family.name] = self._switches(family) | self._files(family)
        rows = (self._row(family, device_bytes) for family in self._families.values())
        return [row | searched.get(row["name"], {}) for row in rows if row is not None]

    def is_of_run(self, pid: int) -> bool | None:
        """Whether a process descends from the run's own; None where its ancestors cannot be read."""
        line: list[int] = []
        while pid not in self._names:
            if pid <= 1:
                return False
            line.append(pid)
            try:
                pid = stat_of(pid, self._proc).parent
            except (OSError, ValueError, IndexError):
                return None
        self._names.update(dict.fromkeys(line, self._names[pid]))
        return True

    def _row(self, family: _Family, device_bytes: Mapping[int, int | None]) -> dict[str, Any] | None:
        """None where the process has ended, or cannot be read."""
        ticks = pages = threads = 0
        for pid, member in list(family.members.items()):
            try:
                skipped = member.idle and (self._turn + pid) % _IDLE_TURNS and os.access(f"{self._proc}/{pid}", os.F_OK)
                stat = member.stat if skipped else stat_of(pid, self._proc)
            except GONE:
                del family.members[pid]
                continue
            except (OSError, ValueError, IndexError) as error:
                self._readings.unreadable(family.name, "cpu_s", reason(error))
                return None
            if stat.started != member.stat.started:
                del family.members[pid]  # another process has its number now
                continue
            member.idle = member.idle and stat.cpu_ticks == member.stat.cpu_ticks
            member.stat = stat
            ticks += stat.cpu_ticks
            pages += stat.pages
            threads += stat.threads
        if family.pid not in family.members:
            return None
        family.lost_ticks += max(0, family.cpu_ticks - ticks)
        family.cpu_ticks = ticks
        held = [size for pid, size in device_bytes.items() if self._names.get(pid) == family.name]
        return {
            "kind": "process",
            "name": family.name,
            "arm": family.arm,
            "pid": family.pid,
            "cpu_s": (ticks + family.lost_ticks) / TICKS_PER_S,
            "memory_bytes": pages * self._page_bytes,
            "threads": threads,
            "device_memory_bytes": sum(size or 0 for size in held) if held and None not in held else None,
        }

    def _find_members(self, family: _Family) -> None:
        members: dict[int, _Member] = {}
        try:
            for pid, stat in family_of(family.pid, self._proc):
                before = family.members.get(pid)
                is_new = before is None or before.stat.started != stat.started
                used = None if before is None or is_new else stat.cpu_ticks - before.searched_ticks
                members[pid] = _Member(stat, stat.cpu_ticks, idle=used == 0 and pid != family.pid)
        except (OSError, ValueError, IndexError) as error:
            self._readings.unreadable(family.name, "cpu_s", reason(error))
        family.members = members
        self._names.update(dict.fromkeys(members, family.name))

    def _switches(self, family: _Family) -> dict[str, int]:
        voluntary = involuntary = 0
        for thread in (thread for pid in family.members for thread in threads_of(pid, self._proc)):
            with contextlib.suppress(OSError):  # it has ended
                counts = _SWITCHES.findall((thread / "status").read_bytes())
                if len(counts) != 2:
                    self._readings.unreadable(family.name, "voluntary_switches", "the kernel does not count them")
                    return {}
                voluntary += int(counts[0])
                involuntary += int(counts[1])
        return {"voluntary_switches": voluntary, "involuntary_switches": involuntary}

    def _files(self, family: _Family) -> dict[str, int]:
        files = 0
        for pid in family.members:
            try:
                files += sum(1 for _ in (self._proc / str(pid) / "fd").iterdir())
            except GONE:
                continue
            except OSError as error:
                self._readings.unreadable(family.name, "files", reason(error))
                return {}
        return {"files": files}
