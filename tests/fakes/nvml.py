"""NVML without a driver: an object in place of the module pynvml, with made-up cards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import c_uint
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class FakeNVMLError(Exception):
    """As NVMLError: its text is the library's own."""


@dataclass(slots=True, kw_only=True)
class FakeCard:
    """A GPU. `refused` are functions that fail, by name, and how. `processes` are memory in bytes by pid."""

    uuid: str = "GPU-0000"
    name: str = "NVIDIA H200"
    bus: int = 6
    sm_mhz: int = 1980
    throttle: int = 0
    utilisation: int = 0
    used: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)
    energy_ms: float = 0.0  # of a processor that reading the energy takes
    parent: FakeCard | None = None  # of a part, with MIG
    refused: dict[str, str] = field(default_factory=dict)


class FakeNvml:
    """Has the functions of pynvml that tailgate calls; any other is an AttributeError."""

    NVMLError = FakeNVMLError
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, cards: Sequence[FakeCard], *, parts: Sequence[FakeCard] = (), missing: str = "") -> None:
        self._cards = list(cards)
        self._parts = {part.uuid: part for part in parts}
        self._missing = missing
        values: dict[str, Callable[..., Any]] = {
            "IsMigDeviceHandle": lambda card: c_uint(card.parent is not None),
            "GetDeviceHandleFromMigDeviceHandle": lambda card: card.parent,
            "GetIndex": lambda card: self._cards.index(card),
            "GetUUID": lambda card: card.uuid,
            "GetName": lambda card: card.name,
            "GetPciInfo": lambda card: SimpleNamespace(domain=0, bus=card.bus, device=0),
            "GetClockInfo": lambda card, kind: {1: card.sm_mhz, 2: 3201}[kind],
            "GetMaxClockInfo": lambda card, kind: {1: 1980, 2: 3201}[kind],
            "GetApplicationsClock": lambda card, kind: 1980,
            "GetPowerUsage": lambda card: 89_036,
            "GetEnforcedPowerLimit": lambda card: 700_000,
            "GetPowerManagementLimit": lambda card: 650_000,
            "GetPowerManagementDefaultLimit": lambda card: 700_000,
            "GetTotalEnergyConsumption": _energy,
            "GetCurrentClocksThrottleReasons": lambda card: card.throttle,
            "GetTemperature": lambda card, sensor: 41,
            "GetUtilizationRates": lambda card: SimpleNamespace(gpu=card.utilisation),
            "GetPersistenceMode": lambda card: 1,
            "GetComputeRunningProcesses": lambda card: _listed(card.processes),
            "GetGraphicsRunningProcesses": lambda card: [],
        }
        for name, value in values.items():
            setattr(self, f"nvmlDevice{name}", _refusing(f"nvmlDevice{name}", value))

    def nvmlInit(self) -> None:  # noqa: N802
        if self._missing:
            raise FakeNVMLError(self._missing)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        return self._cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:  # noqa: N802
        return self._parts[uuid]

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        if "nvmlDeviceGetMemoryInfo" in card.refused or (version and "nvmlMemory_v2" in card.refused):
            raise FakeNVMLError(card.refused.get("nvmlDeviceGetMemoryInfo", "Function Not Found"))
        # the first version counts what the driver keeps for itself
        return SimpleNamespace(used=card.used if version else card.used + GIB // 2, total=140 * GIB)


def _energy(card: FakeCard) -> int:
    until_s = time.thread_time() + card.energy_ms / 1000
    while time.thread_time() < until_s:
        pass
    return 2_766_025


def _refusing(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    def call(card: FakeCard, *arguments: Any) -> Any:
        if name in card.refused:
            raise FakeNVMLError(card.refused[name])
        return value(card, *arguments)

    return call


def _listed(processes: dict[int, int | None]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]
