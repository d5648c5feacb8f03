"""The GPUs of a trial's arms, read through NVML, the library behind nvidia-smi, and the processes on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tailgate.loadtests.monitor.processes import Processes
from tailgate.loadtests.monitor.readings import Probes, Readings

_FIRST_NAMESPACE = "pid:[4026531836]"  # of processes, which every Linux starts with
_SM, _TEMPERATURE = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
_BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
MUCH_BYTES = 512 << 20  # more than a driver and a desktop take
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
_CONTAINER = (
    "the processes of other containers are not shown in one: give it the host's process ids (docker run --pid=host)"
)
_NOTHING_LISTED = "the driver lists no process, though memory of the device is in use"


class Card:
    """One GPU, or with MIG a part of one. `nvml` is the module pynvml, opened."""

    def __init__(self, nvml: Any, card: Any) -> None:
        self._nvml, self._card = nvml, card
        self.model = str(nvml.nvmlDeviceGetName(card))  # such as NVIDIA H200
        self.driver = str(nvml.nvmlSystemGetDriverVersion())
        self.capability: tuple[int, int] | None = None  # where the driver says
        with contextlib.suppress(nvml.NVMLError):
            self.capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(card))

        def throttle() -> list[str]:
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
            return [name for bit, name in REASONS.items() if bits & bit]

        self.probes: Probes = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(card, _SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000,
            "throttle": throttle,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(card, _TEMPERATURE),
            "utilisation_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
            ("memory_bytes", "memory_limit_bytes"): self._memory,
        }
        self.facts: Probes = {
            "uuid": lambda: self.uuid,
            "name": lambda: self.model,
            "power_limit_w": lambda: nvml.nvmlDeviceGetPowerManagementLimit(card) / 1000,
        }

    @property
    def uuid(self) -> str:
        """GPU-… or MIG-…"""
        return str(self._nvml.nvmlDeviceGetUUID(self._card))

    def processes(self) -> Mapping[int, int | None]:
        """Return the memory in bytes of each process on it, None where the driver does not say. Raises NVMLError."""
        nvml = self._nvml
        listed = [*nvml.nvmlDeviceGetComputeRunningProcesses(self._card)]
        with contextlib.suppress(nvml.NVMLError):  # not every card draws
            listed += nvml.nvmlDeviceGetGraphicsRunningProcesses(self._card)
        return {int(process.pid): process.usedGpuMemory for process in listed}

    def _memory(self) -> tuple[int, int]:
        nvml = self._nvml
        try:  # without what the driver keeps for itself
            memory = nvml.nvmlDeviceGetMemoryInfo(self._card, nvml.nvmlMemory_v2)
        except nvml.NVMLError:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._card)
        return int(memory.used), int(memory.total)


def visible_cards(nvml: Any, environment: Mapping[str, str]) -> list[Card]:
    """Return the cards as CUDA numbers them for a process with this environment: cuda:N is the one at N.

    `nvml` is the module pynvml. Raises NVMLError without a driver, and ValueError where CUDA's order cannot be known.
    """
    nvml.nvmlInit()
    places = []
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        place = nvml.nvmlDeviceGetPciInfo(handle)
        places.append(((place.domain, place.bus, place.device), handle))
    # In the order of the PCI bus, which NVML does not promise.
    cards = [Card(nvml, handle) for _, handle in sorted(places, key=lambda entry: entry[0])]
    named = environment.get("CUDA_VISIBLE_DEVICES")
    by_number = named is None or re.search(r"(^|,)\s*\d", named)
    models = sorted({card.model for card in cards})
    if by_number and len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError(
            f"{' and '.join(models)}: CUDA puts the fastest first, by its own rule: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    if named is None:
        return cards
    seen: list[Card] = []
    for name in (item.strip() for item in named.split(",")):
        if re.fullmatch(r"\d+", name) and int(name) < len(cards):
            seen.append(cards[int(name)])
        elif name.startswith("MIG-"):
            seen.append(Card(nvml, nvml.nvmlDeviceGetHandleByUUID(name)))
        elif name.startswith("GPU-"):
            seen += [card for card in cards if card.uuid.startswith(name)][:1]
        else:
            break  # CUDA ignores what follows a name that it does not know
    return seen


def shown_cards(environment: Mapping[str, str] = _BY_BUS) -> list[Card]:
    """Return the cards that the driver shows, as CUDA numbers them; none without a driver or where that is not known.

    By default all cards of the machine.
    """
    try:
        import pynvml

        return visible_cards(pynvml, environment)
    except Exception:  # no library, no driver, or a broken one
        return []


def index_of(device: str) -> int | None:
    """Return N of cuda:N, 0 of cuda, None of anything else."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind == "cuda" and (not index or index.isdecimal()) else None


def device_name(device: str) -> str:
    """Return the device as records name it: `cuda` is cuda:0. `auto` stays, as only a process on it can resolve it."""
    index = index_of(device)
    return device if index is None else f"cuda:{index}"


def sees_all_processes() -> bool:
    """Return whether this process is in the first namespace of processes, which shows those of containers too."""
    try:
        return Path("/proc/self/ns/pid").readlink().name == _FIRST_NAMESPACE
    except OSError:
        return False


class Gpus:
    """The `cards` by their names (cuda:N), read together. `processes` says which processes on them are the run's.

    Foreign ones do not descend from it. Where the processes of a container are not shown (`sees_all`), a list without
    foreign ones says nothing.
    """

    def __init__(self, cards: Mapping[str, Card], *, readings: Readings, processes: Processes, sees_all: bool) -> None:
        self._cards, self._readings, self._processes, self._sees_all = cards, readings, processes, sees_all
        self._unresolved: dict[str, set[int]] = {}

    def sample(self) -> tuple[list[dict[str, Any]], dict[int, int | None]]:
        """Return a row of each GPU, and what each process holds of all GPUs together."""
        rows: list[dict[str, Any]] = []
        held: dict[int, int | None] = {}
        for name, card in self._cards.items():
            row = {"kind": "device", "name": name, **self._readings.of(name, card.probes)}
            listed = self._readings.of(name, {"foreign_processes": card.processes}).get("foreign_processes")
            if listed is not None:
                held |= {pid: _total((held.get(pid, 0), size)) for pid, size in listed.items()}
                foreign = self._foreign(name, listed, row.get("memory_bytes", 0))
                if foreign is not None:
                    row |= {"foreign_processes": len(foreign), "foreign_memory_bytes": _total(foreign.values())}
            rows.append(row)
        return rows, held

    def _foreign(self, name: str, listed: Mapping[int, int | None], used: int) -> dict[int, int | None] | None:
        """Return the foreign processes on the GPU with their memory; None where the list cannot show them."""
        owners = {pid: self._processes.is_of_run(pid) for pid in listed}
        foreign = {pid: listed[pid] for pid, own in owners.items() if own is False}
        if self._sees_all:
            # One whose ancestors cannot be read may just have ended: it counts once it is listed again.
            unresolved = {pid for pid, own in owners.items() if own is None}
            foreign |= {pid: listed[pid] for pid in unresolved & self._unresolved.get(name, set())}
            self._unresolved[name] = unresolved
        why = "" if foreign or self._sees_all else _CONTAINER
        if self._sees_all and not listed and used > MUCH_BYTES:
            why = _NOTHING_LISTED
        if why:
            self._readings.unreadable(name, "foreign_processes", why)
        return None if why else foreign


def _total(sizes: Collection[int | None]) -> int | None:
    """Return the sum, None where one of them is."""
    return None if None in sizes else sum(size or 0 for size in sizes)
