"""NVIDIA's GPUs through NVML, the library behind nvidia-smi."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loadtests.bed.readings import Probe, probe

REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_TEMPERATURE_GPU = 0


class Nvml:
    """The library, opened. `nvml` is the module pynvml, or one like it. Raises its error where there is no driver."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()

    def cards(self) -> list[NvmlCard]:
        """Every GPU of the host in the order of the PCI bus, which NVML does not promise."""
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [NvmlCard(nvml, handle) for handle in sorted(handles, key=partial(_pci_place, nvml))]

    def card(self, identity: str) -> NvmlCard:
        """The GPU whose UUID begins so, or the part of a GPU with this UUID (MIG-…)."""
        if identity.startswith("MIG-"):
            return NvmlCard(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID(identity))
        for card in self.cards():
            if card.uuid.startswith(identity):
                return card
        raise ValueError(f"no GPU is called {identity}")


class NvmlCard:
    """One GPU, or with MIG a part of one: memory and processes are the part's, clocks and power the whole card's."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._part = handle
        self._whole = handle
        self._mig = False
        with contextlib.suppress(nvml.NVMLError):  # a driver from before MIG
            self._mig = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
        if self._mig:
            self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        card = self._whole
        self.probes: Sequence[Probe] = (
            probe("sm_mhz", lambda: nvml.nvmlDeviceGetClockInfo(card, _SM)),
            probe("memory_mhz", lambda: nvml.nvmlDeviceGetClockInfo(card, _MEMORY)),
            probe("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            probe("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000),
            probe("throttle", self._throttle),
            probe("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(card, _TEMPERATURE_GPU)),
            probe("utilisation_pct", lambda: nvml.nvmlDeviceGetUtilizationRates(self._part).gpu),
            Probe(("memory_bytes", "memory_limit_bytes"), self._memory),
        )
        # Takes 3 to 14 ms of a processor on an H200, all others together half a millisecond.
        self.costly: Sequence[Probe] = (
            probe("energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000),
        )
        self.facts: Sequence[Probe] = (
            probe("index", lambda: self.index),
            probe("uuid", lambda: self.uuid),
            probe("name", lambda: nvml.nvmlDeviceGetName(self._part)),
            probe("driver", nvml.nvmlSystemGetDriverVersion),
            probe("memory_bytes", lambda: self._memory()[1]),
            probe("power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(card) / 1000),
            probe("power_limit_default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(card) / 1000),
            probe("sm_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(card, _SM)),
            probe("memory_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(card, _MEMORY)),
            probe("sm_application_mhz", lambda: nvml.nvmlDeviceGetApplicationsClock(card, _SM)),
            probe("mig", lambda: self._mig),
            probe("persistence", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(card))),
            probe("lock_command", self._lock_command),
        )

    @property
    def index(self) -> int:
        """NVML's own number of the card, as nvidia-smi -i takes it."""
        return int(self._nvml.nvmlDeviceGetIndex(self._whole))

    @property
    def model(self) -> str:
        """Such as NVIDIA H200."""
        return str(self._nvml.nvmlDeviceGetName(self._whole))

    @property
    def uuid(self) -> str:
        """GPU-… or MIG-…"""
        return str(self._nvml.nvmlDeviceGetUUID(self._part))

    def processes(self) -> Mapping[int, int | None]:
        """Memory in bytes of each process that computes or draws on it; None where the driver does not say."""
        nvml = self._nvml
        listed = [*nvml.nvmlDeviceGetComputeRunningProcesses(self._part)]
        with contextlib.suppress(nvml.NVMLError):  # not every card draws
            listed += nvml.nvmlDeviceGetGraphicsRunningProcesses(self._part)
        return {int(process.pid): process.usedGpuMemory for process in listed}

    def _memory(self) -> tuple[int, int]:
        nvml = self._nvml
        try:  # without what the driver keeps for itself
            memory = nvml.nvmlDeviceGetMemoryInfo(self._part, nvml.nvmlMemory_v2)
        except nvml.NVMLError:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._part)
        return int(memory.used), int(memory.total)

    def _throttle(self) -> list[str]:
        bits = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole))
        return [name for bit, name in REASONS.items() if bits & bit]

    def _lock_command(self) -> str:
        clock = self._nvml.nvmlDeviceGetMaxClockInfo(self._whole, _SM)
        return f"sudo nvidia-smi -i {self.index} -lgc {clock},{clock}"


def _pci_place(nvml: Any, handle: Any) -> tuple[int, int, int]:
    place = nvml.nvmlDeviceGetPciInfo(handle)
    return place.domain, place.bus, place.device
