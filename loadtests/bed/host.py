"""A host as the kernel shows it: processors, steal, load, pressure, frequency, memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.bed.readings import Probe, probe
from servers.host_memory import host_memory

_TICKS_PER_S = 100.0  # USER_HZ, which Linux shows to programs on every machine
_FREQUENCIES = 4  # each may cost the kernel a call to that processor
_PROC, _SYS = Path("/proc"), Path("/sys")


class Host:
    """This host. `proc` and `sys` are where the kernel's files lie."""

    def __init__(self, proc: Path = _PROC, sys: Path = _SYS) -> None:
        self._proc = proc
        self._sys = sys
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
        """Of the machine: cpu, cpus, kernel, virtual (what it runs in, null where nothing shows that it does)."""
        lines = self._text("cpuinfo").splitlines() if (self._proc / "cpuinfo").exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        hypervisor = any("hypervisor" in line.split() for line in lines if line.startswith("flags"))
        return {
            "cpu": models[0] if models else platform.processor() or platform.machine(),
            "cpus": len([line for line in lines if line.startswith("processor")]) or None,
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
        lines = self._text("stat").splitlines()
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in user
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in lines[0].split()[1:9])
        cpus = sum(line.startswith("cpu") for line in lines) - 1
        return (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S, cpus

    def _load(self) -> float:
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
