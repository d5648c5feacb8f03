"""A host as the kernel shows it: processors, steal, load, pressure, frequency, memory.

Processors are those that the run may use, and those that share a core with one of them: what others do on the rest is
not in its way.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from loadtests.bed.readings import Probe, probe
from servers.host_memory import host_memory

_TICKS_PER_S = 100.0  # USER_HZ, which Linux shows to programs on every machine
_FREQUENCIES = 4  # each may cost the kernel a call to that processor
_PROC, _SYS = Path("/proc"), Path("/sys")


def siblings(cpu: int, sys: Path = _SYS) -> frozenset[int]:
    """The processors that share a core with `cpu`, itself among them; it alone where the kernel does not say."""
    try:
        text = (sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
        ends = [part.split("-") for part in text.strip().split(",")]
        return frozenset(item for part in ends for item in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return frozenset({cpu})


class Host:
    """This host. `proc` and `sys` are where the kernel's files lie; `allowed` are the processors that the run may use,
    by default those of this process."""

    def __init__(self, proc: Path = _PROC, sys: Path = _SYS, allowed: Set[int] | None = None) -> None:
        self._proc = proc
        self._allowed = os.sched_getaffinity(0) if allowed is None else allowed
        self._sys = sys
        self._watched = {cpu for own in self._allowed for cpu in siblings(own, sys)}
        found = sorted(sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._frequencies = found[:: max(1, len(found) // _FREQUENCIES)][:_FREQUENCIES]
        self.probes = (
            Probe(("cpu_s", "steal_s", "cpus"), self._processors),
            probe("load1", self._load),
            Probe(("memory_bytes", "memory_limit_bytes"), self._memory),
            probe("frequency_mhz", self._frequency),
            *(probe(f"pressure_{what}_s", lambda what=what: self._pressure(what)) for what in ("cpu", "memory", "io")),  # type: ignore[misc]
        )

    def facts(self) -> dict[str, Any]:
        """Of the machine: cpu, cpus, those that the run may use (null where it may use all), kernel, virtual (what it
        runs in, null where nothing shows that it does)."""
        lines = self._text("cpuinfo").splitlines() if (self._proc / "cpuinfo").exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        hypervisor = any("hypervisor" in line.split() for line in lines if line.startswith("flags"))
        cpus = len([line for line in lines if line.startswith("processor")])
        return {
            "cpu": models[0] if models else platform.processor() or platform.machine(),
            "cpus": cpus or None,
            "cpus_allowed": len(self._allowed) if len(self._allowed) < cpus else None,
            "kernel": platform.release(),
            "virtual": self._vendor() or "hypervisor" if hypervisor else None,
        }

    def _vendor(self) -> str:
        try:
            return (self._sys / "class/dmi/id/sys_vendor").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _text(self, name: str) -> str:
        return (self._proc / name).read_text(encoding="utf-8")

    def _processors(self) -> Sequence[Any]:
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in user
        own, _ = self._stat()
        rows = [[int(field) for field in line.split()[1:9]] for line in own]
        busy = sum(user + nice + system + irq + softirq for user, nice, system, _, _, irq, softirq, _ in rows)
        return busy / _TICKS_PER_S, sum(row[-1] for row in rows) / _TICKS_PER_S, len(rows)

    def _stat(self) -> tuple[list[str], list[str]]:
        """The kernel's lines of the processors that are watched, and of all."""
        lines = [line for line in self._text("stat").splitlines() if line.startswith("cpu") and line[3].isdigit()]
        own = [line for line in lines if int(line[3:].split()[0]) in self._watched]
        return own or lines, lines

    def _load(self) -> float:
        own, all_lines = self._stat()
        if len(own) < len(all_lines):
            raise OSError(f"the load is of all {len(all_lines)} processors, and {len(own)} are the run's")
        return float(self._text("loadavg").split()[0])

    def _memory(self) -> Sequence[int]:
        total, available = host_memory(self._proc)
        return total - available, total

    def _pressure(self, what: str) -> float:
        # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds>
        return int(self._text(f"pressure/{what}").split()[4].removeprefix("total=")) / 1e6

    def _frequency(self) -> float:
        if not self._frequencies:
            raise OSError("the kernel shows no frequency (no cpufreq), as in most virtual machines")
        return sum(int(path.read_text()) for path in self._frequencies) / len(self._frequencies) / 1000
