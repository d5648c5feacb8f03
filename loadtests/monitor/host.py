"""The host: which machine it is, its processor time, steal and memory.

Processors are those that the run may use, and those that share a core with one of them. Work on the rest does not
disturb the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import psutil

from tailgate.loadtests.generator.clock_offsets import host_identity
from tailgate.loadtests.monitor.readings import Probes

_MACHINE_ID = Path("/etc/machine-id")


def machine_identity(uuids: Iterable[str], machine_id: Path = _MACHINE_ID) -> str | None:
    """Return a hash of the GPUs' UUIDs, else of the system's machine id, else of its last start; None without any."""
    text = " ".join(sorted(uuids))
    if not text:
        with contextlib.suppress(OSError, ValueError):
            text = machine_id.read_text(encoding="ascii").strip()
    text = text or host_identity()
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else None


def cpu_model() -> str:
    """Return the processor's name, as the kernel has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_PROC, _SYS = Path("/proc"), Path("/sys")


def siblings(cpu: int, sys: Path = _SYS) -> frozenset[int]:
    """Return the processors that share a core with `cpu`, with itself; only itself where the kernel does not say."""
    try:
        text = (sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
        ends = [part.split("-") for part in text.strip().split(",")]
        return frozenset(item for part in ends for item in range(int(part[0]), int(part[-1]) + 1))
    except (OSError, ValueError):
        return frozenset({cpu})


class Host:
    """This host. `allowed` are the processors that the run may use, by default those of this process."""

    def __init__(self, proc: Path = _PROC, sys: Path = _SYS, allowed: Set[int] | None = None) -> None:
        self._proc = proc
        allowed = os.sched_getaffinity(0) if allowed is None else allowed
        self._watched = {cpu for own in allowed for cpu in siblings(own, sys)}
        self.probes: Probes = {
            ("cpu_s", "steal_s", "cpus"): self._processors,
            ("memory_bytes", "memory_limit_bytes"): self._memory,
            "pressure_memory_s": self._memory_pressure,
        }

    def _processors(self) -> Sequence[Any]:
        every = psutil.cpu_times(percpu=True)
        own = [times for cpu, times in enumerate(every) if cpu in self._watched] or every
        # The kernel counts guests in user time too.
        busy = sum(times.user + times.nice + times.system + times.irq + times.softirq for times in own)
        return busy, sum(times.steal for times in own), len(own)

    def _memory(self) -> Sequence[int]:
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.total

    def _memory_pressure(self) -> float:
        # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds>
        line = (self._proc / "pressure/memory").read_text(encoding="utf-8")
        return int(line.split()[4].removeprefix("total=")) / 1e6
