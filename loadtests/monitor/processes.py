"""The processes of a run, by name and with all descendants, and which processes belong to the run at all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tailgate.loadtests.monitor.readings import Readings, Watch, reason

_SEARCH_SHARE = 0.0005  # of a processor, for the search for descendants
_SEARCH_EVERY_S = 2.0  # at least


@dataclass(slots=True, kw_only=True)
class _Family:
    """A named process and its descendants, as last seen."""

    arm: str | None
    process: psutil.Process
    members: dict[int, psutil.Process] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the members at the last sample
    lost_s: float = 0.0  # of members that ended without a parent that waited for them


class Processes:
    """Samples the processes that it takes. `root` is the process from which the whole run descends.

    The search for descendants costs more than a sample, so it runs seldom. The time of one that started since then
    counts when the next search finds it, or when its parent has waited for its end.
    """

    def __init__(self, readings: Readings, *, root: int) -> None:
        self._readings = readings
        self._families: dict[str, _Family] = {}
        self._names: dict[int, str] = {root: ""}  # of every process that was ever seen in the run; "" without a name
        self._search_s = 0.0

    def take(self, watch: Watch) -> None:
        """Sample the process, unless it has ended, and its descendants under the name from now on."""
        with suppress(psutil.NoSuchProcess):
            self._families[watch.name] = _Family(arm=watch.arm, process=psutil.Process(watch.pid))
            self._names[watch.pid] = watch.name
            self._search_s = 0.0

    def sample(self, device_bytes: Mapping[int, int | None]) -> list[dict[str, Any]]:
        """Return a row of each named process that lives. `device_bytes` is what each process holds of all devices."""
        if time.monotonic() >= self._search_s:
            began_s = time.thread_time()
            for name, family in self._families.items():
                self._find_members(name, family)
            cost_s = time.thread_time() - began_s
            self._search_s = time.monotonic() + max(_SEARCH_EVERY_S, cost_s / _SEARCH_SHARE)
        rows = (self._row(name, family, device_bytes) for name, family in self._families.items())
        return [row for row in rows if row is not None]

    def is_of_run(self, pid: int) -> bool | None:
        """Return whether the process descends from the run's own; None where its ancestors cannot be read."""
        if pid in self._names:
            return True
        try:
            line = psutil.Process(pid).parents()
        except psutil.Error:
            return None
        name = next((self._names[parent.pid] for parent in line if parent.pid in self._names), None)
        if name is not None:
            self._names[pid] = name
        return name is not None

    def _row(self, name: str, family: _Family, device_bytes: Mapping[int, int | None]) -> dict[str, Any] | None:
        """Return None where the process has ended or cannot be read."""
        cpu_s, memory = 0.0, 0
        for pid, process in list(family.members.items()):
            try:
                with process.oneshot():
                    cpu_s += sum(process.cpu_times()[:4])  # its own, and of children that it waited for
                    memory += process.memory_info().rss
            except psutil.NoSuchProcess:
                del family.members[pid]
            except (psutil.Error, OSError) as error:
                self._readings.unreadable(name, "cpu_s", reason(error))
                return None
        if family.process.pid not in family.members:
            return None
        family.lost_s += max(0.0, family.cpu_s - cpu_s)
        family.cpu_s = cpu_s
        held = [size for pid, size in device_bytes.items() if self._names.get(pid) == name]
        return {
            "kind": "process",
            "name": name,
            "arm": family.arm,
            "pid": family.process.pid,
            "cpu_s": cpu_s + family.lost_s,
            "memory_bytes": memory,
            "device_memory_bytes": sum(size or 0 for size in held) if held and None not in held else None,
        }

    def _find_members(self, name: str, family: _Family) -> None:
        family.members = {}
        with suppress(psutil.NoSuchProcess):
            own = (family.process, *family.process.children(recursive=True))
            family.members = {member.pid: member for member in own}
        self._names.update(dict.fromkeys(family.members, name))
