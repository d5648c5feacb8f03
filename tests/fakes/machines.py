"""Made-up machines: the samples and references of quiet ones, and of ones in trouble. Samples come once a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailgate.analysis.records.schemas import MACHINES
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.run.machine_records import HOST_FIGURES
from tests.fakes.request_rows import append_rows

SECOND = 1_000_000_000
LIMIT_W = 700.0
TOP_MHZ = 1980
FIGURES = {"matmul_tflops": 790.0, "read_gb_per_s": 4200.0, "launch_us": 4.6, "python_ms": 11.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A fault of one card, or of the host ("host"), in some trials and for a share of their time.

    `what`: foreign | held (before the arms, in GiB) | throttle | power_limit | clock | steal | busy | memory_pressure |
    slow | slow_after | unreadable.
    `size`: processes; a share of time; a factor of a limit, a clock or a speed.
    """

    what: str
    place: str = "cuda:1"
    size: float = 1.0
    reason: str = "hw_thermal_slowdown"  # of a throttle
    column: str = ""  # that is unreadable
    trials: Sequence[int] = ()  # empty: all
    share: float = 1.0  # of the traffic, from its middle on

    def touches(self, what: str, place: str, trial: int) -> bool:
        return (self.what, self.place) == (what, place) and (not self.trials or trial in self.trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMachines:
    """The machines of a run: `cards` of one kind, on which arms sit and change places from trial to trial."""

    cards: int = 2
    swap: bool = True
    locked: bool = True
    sampled: bool = True
    referenced: bool = True
    figures: Mapping[str, float] = field(default_factory=lambda: dict(FIGURES), hash=False)  # of a reference
    card_noise: float = 0.004  # standard deviation of the logarithm of a reference's figure
    host_noise: float = 0.008
    troubles: Sequence[Trouble] = ()

    def placed(self, arms: Sequence[str], trial: int) -> dict[str, str]:
        """The device of each arm in the trial."""
        if not self.cards:
            return dict.fromkeys(arms, "cpu")
        turn = trial - 1 if self.swap else 0
        return {arm: f"cuda:{(place + turn) % self.cards}" for place, arm in enumerate(arms)}

    def facts(self, arms: Sequence[str], trial: int, rng: np.random.Generator) -> dict[str, Any]:
        devices = {f"cuda:{index}": index for index in range(self.cards)}
        monitor = {
            "interval_s": 1.0,
            "devices": {
                name: {
                    "name": "NVIDIA H200",
                    "uuid": f"GPU-{index}",
                    "power_limit_w": LIMIT_W * self._size("power_limit", name, trial),
                }
                for name, index in devices.items()
            },
            "unreadable": [
                {"name": item.place, "what": item.column, "why": "Not Supported"}
                for item in self.troubles
                if item.what == "unreadable"
            ],
            "before": [
                {"kind": "device", "name": name}
                | {"foreign_processes": int(self._size("foreign", name, trial, otherwise=0.0) > 0)}
                | {"memory_bytes": int(self._size("held", name, trial, otherwise=0.5) * (1 << 30))}
                for name in devices
            ],
        }
        references = [
            {
                "device": name,
                "when": when,
                "seconds": 2.0,
                **{
                    figure: value / self._speed("host", when, trial, rng, self.host_noise)
                    if figure in HOST_FIGURES
                    else value * self._speed(name, when, trial, rng, self.card_noise)
                    for figure, value in self.figures.items()
                },
                "error": None,
            }
            for when in ("before", "after")
            for name in devices or ["cpu"]
        ]
        return {
            "devices": self.placed(arms, trial),
            **({"monitor": monitor} if self.sampled else {}),
            "references": references if self.referenced else [],
        }

    def _speed(self, place: str, when: str, trial: int, rng: np.random.Generator, noise: float) -> float:
        factor = self._size("slow", place, trial) * self._size("clock", place, trial) ** 0.9
        factor *= self._size("slow_after", place, trial) if when == "after" else 1.0
        return float(factor * np.exp(noise * rng.standard_normal()))

    def _size(self, what: str, place: str, trial: int, otherwise: float = 1.0) -> float:
        sizes = (item.size for item in self.troubles if item.touches(what, place, trial))
        return next(sizes, otherwise)

    def _now(self, what: str, place: str, trial: int, progress: float) -> Trouble | None:
        """The trouble at this share of the traffic: troubles that last for a part of it begin in the middle."""
        rows = (item for item in self.troubles if item.touches(what, place, trial))
        return next((item for item in rows if item.share >= 1.0 or 0.5 <= progress < 0.5 + item.share), None)

    def write(
        self, folder: Path, arms: Sequence[str], trial: int, start_ns: int, seconds: float, rng: np.random.Generator
    ) -> None:
        """Write machines.arrow of the trial into `folder`: ten seconds of idleness, then the traffic."""
        if not self.sampled:
            return
        arm_on = {device: arm for arm, device in self.placed(arms, trial).items()}
        counters = dict.fromkeys(("cpu_s", "steal_s", "pressure_memory_s"), 100.0)
        spent = dict.fromkeys((*(f"{arm}-0" for arm in arms), "splitter", "load"), 3.0)
        with RecordWriter(folder / "machines.arrow", MACHINES) as writer:
            for step in range(int(seconds + 10.0) + 2):
                since = step - 10.0
                place = {"trial": trial, "at_ns": start_ns + int(since * SECOND)}
                busy, own = 0.0 <= since <= seconds, 0.0
                for name in spent:
                    cores = (1.1 if name.endswith("-0") else 0.3) * busy * (1 + 0.05 * rng.standard_normal())
                    spent[name] += max(0.0, cores)
                    own += max(0.0, cores)
                    arm = name.removesuffix("-0") if name.endswith("-0") else None
                    writer.append(place | self._process(name, arm, spent[name]))
                writer.append(place | self._host(trial, since / seconds, busy, own, counters))
                for name in (f"cuda:{index}" for index in range(self.cards)):
                    row = self._device(name, trial, since / seconds, busy and name in arm_on, rng)
                    writer.append(place | row)

    def _process(self, name: str, arm: str | None, cpu_s: float) -> dict[str, Any]:
        row = {"kind": "process", "name": name, "arm": arm, "pid": 100, "cpu_s": cpu_s, "memory_bytes": 3 << 30}
        return row | {"device_memory_bytes": (20 << 30) if arm and self.cards else None}

    def _host(self, trial: int, progress: float, busy: bool, own: float, counters: dict[str, float]) -> dict[str, Any]:
        def share(what: str) -> float:
            trouble = self._now(what, "host", trial, progress)
            return trouble.size if busy and trouble else 0.0

        cpus = 16
        counters["cpu_s"] += own + 0.05 + cpus * share("busy")
        counters["steal_s"] += cpus * share("steal")
        counters["pressure_memory_s"] += share("memory_pressure")
        row: dict[str, Any] = {"kind": "host", "name": "run", "cpus": cpus, **counters}
        row |= {"memory_bytes": 60 << 30, "memory_limit_bytes": 256 << 30}
        return row | self._unread("host")

    def _device(self, name: str, trial: int, progress: float, busy: bool, rng: np.random.Generator) -> dict[str, Any]:
        limit = LIMIT_W * self._size("power_limit", name, trial)
        top = round(TOP_MHZ * self._size("clock", name, trial))
        power = min(limit, 540.0 + 25.0 * rng.standard_normal()) if busy else 120.0 + 2.0 * rng.standard_normal()
        reasons = ["applications_clocks_setting"] if self.locked else ([] if busy else ["gpu_idle"])
        clock = top if busy or self.locked else 345
        if busy and power >= limit:
            reasons, clock = [*reasons, "sw_power_cap"], round(0.8 * top)
        if busy and (held := self._now("throttle", name, trial, progress)):
            reasons, clock = [*reasons, held.reason], round(0.7 * top)
        foreign = self._now("foreign", name, trial, progress)
        row = {
            **{"kind": "device", "name": name, "sm_mhz": clock, "power_w": power},
            **{"power_limit_w": limit, "throttle": reasons},
            "temperature_c": round((58 if busy else 34) + rng.standard_normal()),
            "utilisation_pct": int(np.clip(93 + 3 * rng.standard_normal(), 1, 100)) if busy else 0,
            "memory_bytes": (24 << 30) if busy else (1 << 30),
            "memory_limit_bytes": 140 << 30,
            "foreign_processes": int(foreign.size) if foreign else 0,
            "foreign_memory_bytes": (2 << 30) * int(foreign.size) if foreign else 0,
        }
        return row | self._unread(name)

    def _unread(self, place: str) -> Mapping[str, Any]:
        return {item.column: None for item in self.troubles if item.what == "unreadable" and item.place == place}


def referenced(**figures: float) -> FakeMachines:
    """Return a host without samples, whose references are exactly these figures."""
    return FakeMachines(cards=0, sampled=False, figures=figures, card_noise=0.0, host_noise=0.0)


GIB = 1 << 30

# The value of a column, or values of it by second of the trial (from its start), for a trial's number.
Value = float | Callable[[int, np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def sample(
    directory: Path,
    kind: str,
    name: str,
    columns: Mapping[str, Value],
    *,
    arm: str | None = None,
    last_s: float | None = None,
    trials: tuple[int, ...] = (),
) -> Path:
    """Give each trial of the run in `directory`, or those in `trials`, samples of the thing; return `directory`."""
    for folder in sorted(directory.glob("trial-*")):
        info = json.loads((folder / "trial.json").read_text())
        number = int(info["trial"])
        if trials and number not in trials:
            continue
        at_s = np.arange(-10.0, (info["duration_s"] + 5.0 if last_s is None else last_s), 1.0)
        values = {key: item(number, at_s) if callable(item) else 0.0 * at_s + item for key, item in columns.items()}
        rows = []
        for place, second in enumerate(at_s):
            at_ns = info["start_ns"] + int(second * SECOND)
            row = {"trial": number, "host": "run", "kind": kind, "name": name, "arm": arm, "at_ns": at_ns}
            known = {key: item[place] for key, item in values.items() if not np.isnan(item[place])}
            whole = {key: key.endswith(("_w", "_j", "_s")) for key in known}
            rows.append(row | {key: item if whole[key] else int(item) for key, item in known.items()})
        append_rows(folder / "machines.arrow", MACHINES, rows)
    return directory


def tell(directory: Path, **facts: Any) -> Path:
    """Add `facts` to trial.json of each trial; return `directory`."""
    for path in directory.glob("trial-*/trial.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return directory


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
    refused: dict[str, str] = field(default_factory=dict)


class FakeNvml:
    """Has the functions of pynvml that tailgate calls; any other is an AttributeError."""

    NVMLError = FakeNVMLError
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, cards: Sequence[FakeCard], *, parts: Sequence[FakeCard] = (), missing: str = "") -> None:
        self._missing = missing
        self.nvmlSystemGetDriverVersion = lambda: "580.159.04"
        self.nvmlDeviceGetCount = lambda: len(cards)
        self.nvmlDeviceGetHandleByIndex = cards.__getitem__
        self.nvmlDeviceGetHandleByUUID = {part.uuid: part for part in parts}.__getitem__
        values: dict[str, Callable[..., Any]] = {
            "GetUUID": lambda card: card.uuid,
            "GetName": lambda card: card.name,
            "GetPciInfo": lambda card: SimpleNamespace(domain=0, bus=card.bus, device=0),
            "GetClockInfo": lambda card, kind: {1: card.sm_mhz}[kind],
            "GetPowerUsage": lambda card: 89_036,
            "GetEnforcedPowerLimit": lambda card: 700_000,
            "GetPowerManagementLimit": lambda card: 650_000,
            "GetCurrentClocksThrottleReasons": lambda card: card.throttle,
            "GetCudaComputeCapability": lambda card: [9, 0],
            "GetTemperature": lambda card, sensor: 41,
            "GetUtilizationRates": lambda card: SimpleNamespace(gpu=card.utilisation),
            "GetComputeRunningProcesses": lambda card: [
                SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes.items()
            ],
            "GetGraphicsRunningProcesses": lambda card: [],
        }
        for name, value in values.items():
            setattr(self, f"nvmlDevice{name}", _refusing(f"nvmlDevice{name}", value))

    def nvmlInit(self) -> None:  # noqa: N802
        if self._missing:
            raise FakeNVMLError(self._missing)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        if "nvmlDeviceGetMemoryInfo" in card.refused or (version and "nvmlMemory_v2" in card.refused):
            raise FakeNVMLError(card.refused.get("nvmlDeviceGetMemoryInfo", "Function Not Found"))
        # the first version counts what the driver keeps for itself
        return SimpleNamespace(used=card.used if version else card.used + GIB // 2, total=140 * GIB)


def _refusing(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    def call(card: FakeCard, *arguments: Any) -> Any:
        if name in card.refused:
            raise FakeNVMLError(card.refused[name])
        return value(card, *arguments)

    return call
