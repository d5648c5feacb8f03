"""Made-up machines: the samples and references of quiet ones, and of ones in trouble. Samples come once a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.schemas import BED
from analysis.records.tables import RecordWriter
from analysis.run.references import HOST_FIGURES

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
class FakeBed:
    """The machines of a run: `cards` of one model, on which arms sit and change places from trial to trial."""

    cards: int = 2
    model: str = "NVIDIA H200"
    swap: bool = True
    locked: bool = True
    sampled: bool = True
    referenced: bool = True
    figures: Mapping[str, float] = field(default_factory=lambda: dict(FIGURES), hash=False)  # of a reference
    card_noise: float = 0.004  # standard deviation of the logarithm of a reference's figure
    host_noise: float = 0.008
    troubles: Sequence[Trouble] = ()
    pressure: Sequence[str] = ()  # kinds of it that the experiment puts on its own machines

    def placed(self, arms: Sequence[str], trial: int) -> dict[str, str]:
        """The device of each arm in the trial."""
        if not self.cards:
            return dict.fromkeys(arms, "cpu")
        turn = trial - 1 if self.swap else 0
        return {arm: f"cuda:{(place + turn) % self.cards}" for place, arm in enumerate(arms)}

    def facts(self, arms: Sequence[str], trial: int, rng: np.random.Generator) -> dict[str, Any]:
        devices = {f"cuda:{index}": index for index in range(self.cards)}
        same = {"host": "run", "name": self.model, "driver": "580.65", "memory_bytes": 150_754_820_096, "mig": False}
        same |= {"power_limit_default_w": LIMIT_W, "sm_max_mhz": TOP_MHZ}
        neighbour = {"pid": 4711, "name": "python", "memory_bytes": 2 << 30}
        bed = {
            "interval_s": 1.0,
            "machines": {"run": {"machine": "c0ffee123456", "cpu": "AMD EPYC 9454", "cpus": 16, "kernel": "6.1"}},
            "devices": {
                name: same
                | {
                    "index": index,
                    "uuid": f"GPU-{index}",
                    "power_limit_w": LIMIT_W * self._size("power_limit", name, trial),
                }
                | {"lock_command": f"sudo nvidia-smi -i {index} -lgc {TOP_MHZ},{TOP_MHZ}"}
                for name, index in devices.items()
            },
            "unreadable": [
                {"host": "run", "name": item.place, "what": item.column, "why": "Not Supported"}
                for item in self.troubles
                if item.what == "unreadable"
            ],
            "before": [
                {"host": "run", "device": name}
                | {"processes": [neighbour] if self._size("foreign", name, trial, otherwise=0.0) else []}
                | {"memory_bytes": int(self._size("held", name, trial, otherwise=0.5) * (1 << 30))}
                for name in devices
            ],
            "watcher": {"cpu_s": 0.4, "seconds": 200.0},
        }
        references = [
            {
                "host": "run",
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
            **({"bed": bed} if self.sampled else {}),
            "references": references if self.referenced else [],
            **({"pressure": [{"kind": kind} for kind in self.pressure]} if self.pressure else {}),
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
        """Write bed.arrow of the trial into `folder`: ten seconds of idleness, then the traffic."""
        if not self.sampled:
            return
        arm_on = {device: arm for arm, device in self.placed(arms, trial).items()}
        counters = dict.fromkeys(("cpu_s", "steal_s", "pressure_cpu_s", "pressure_memory_s", "pressure_io_s"), 100.0)
        energy = dict.fromkeys((f"cuda:{index}" for index in range(self.cards)), 5e6)
        spent = dict.fromkeys((*(f"{arm}-0" for arm in arms), "splitter", "load"), 3.0)
        with RecordWriter(folder / "bed.arrow", BED) as writer:
            for step in range(int(seconds + 10.0) + 2):
                since = step - 10.0
                place = {"trial": trial, "host": "run", "at_ns": start_ns + int(since * SECOND)}
                busy, own = 0.0 <= since <= seconds, 0.0
                for name in spent:
                    cores = (1.1 if name.endswith("-0") else 0.3) * busy * (1 + 0.05 * rng.standard_normal())
                    spent[name] += max(0.0, cores)
                    own += max(0.0, cores)
                    arm = name.removesuffix("-0") if name.endswith("-0") else None
                    writer.append(place | self._process(name, arm, spent[name], step))
                writer.append(place | self._host(trial, since / seconds, busy, own, counters))
                for name in energy:
                    row = self._device(name, trial, since / seconds, busy and name in arm_on, rng)
                    energy[name] += row["power_w"] or 0.0
                    writer.append(place | row | {"energy_j": energy[name]})

    def _process(self, name: str, arm: str | None, cpu_s: float, step: int) -> dict[str, Any]:
        row = {"kind": "process", "name": name, "arm": arm, "pid": 100, "cpu_s": cpu_s, "memory_bytes": 3 << 30}
        row |= {"threads": 40, "voluntary_switches": 900 * step, "involuntary_switches": 4 * step, "files": 90}
        return row | {"device_memory_bytes": (20 << 30) if arm and self.cards else None}

    def _host(self, trial: int, progress: float, busy: bool, own: float, counters: dict[str, float]) -> dict[str, Any]:
        def share(what: str) -> float:
            trouble = self._now(what, "host", trial, progress)
            return trouble.size if busy and trouble else 0.0

        cpus = 16
        counters["cpu_s"] += own + 0.05 + cpus * share("busy")
        counters["steal_s"] += cpus * share("steal")
        counters["pressure_cpu_s"] += min(1.0, 0.002 + share("busy"))
        counters["pressure_memory_s"] += share("memory_pressure")
        row: dict[str, Any] = {"kind": "host", "name": "run", "cpus": cpus, **counters}
        row |= {"load1": own + cpus * share("busy"), "memory_bytes": 60 << 30, "memory_limit_bytes": 256 << 30}
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
            **{"kind": "device", "name": name, "sm_mhz": clock, "memory_mhz": 3201, "power_w": power},
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


def referenced(**figures: float) -> FakeBed:
    """Return a host without samples, whose references are exactly these figures."""
    return FakeBed(cards=0, sampled=False, figures=figures, card_noise=0.0, host_noise=0.0)
