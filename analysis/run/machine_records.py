"""The machines of a run and how they behaved: what was sampled of them during the traffic, and their measured speed.

Nothing is decided here. What was not recorded, or could not be read, is None or empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.records.plain_values import mapping, number, rows_of, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.machine_samples import Rows, Samples, Spread
from analysis.run.placement import Card, cards_of, devices_of
from analysis.run.references import Reference, references_of, speed_of
from analysis.run.run import Run

# NVML's reasons why a clock is not higher that hold a busy card back. An idle card, and a clock that was asked for, do
# not: gpu_idle, applications_clocks_setting, display_clock_setting.
THROTTLES = {
    "sw_power_cap": "power cap",
    "hw_slowdown": "slowdown by the hardware",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "heat, by the driver",
    "hw_thermal_slowdown": "heat, by the hardware",
    "hw_power_brake_slowdown": "power brake",
}
POWER_CAP = "sw_power_cap"

# What must be known of a device to call it quiet.
NEEDED = ("throttle", "sm_mhz", "foreign_processes")

Place = tuple[int, str, str]  # trial, host, device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraffic:
    """One device during the traffic of one trial."""

    trial: int
    card: Card
    arms: tuple[str, ...]  # those that it served
    seconds: float  # of the traffic that were sampled
    sm_mhz: Spread | None
    mean_mhz: float | None  # of the clock while the device worked
    free_mhz: float | None  # the highest clock at a time when the device worked and nothing held it back
    power_w: Spread | None
    power_limit_w: Spread | None
    temperature_c: Spread | None
    utilisation_pct: Spread | None
    memory_bytes: Spread | None
    throttled_s: Mapping[str, float] | None  # by reason; None where the card does not report it
    throttle_s: float | None  # with a reason other than the power cap
    foreign_s: float | None  # with processes of others; None where that is unknown
    foreign_processes: int | None  # the most at once
    foreign_bytes: float | None
    reported: Mapping[str, float]  # the share of its samples that have the column, of NEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """One host during the traffic of one trial. Shares are of the time of all its processors, but for pressure."""

    trial: int
    host: str
    seconds: float  # of the traffic that were sampled
    cpus: float | None
    steal: float | None
    busy: float | None
    foreign: float | None  # busy with other work; None where the run's own processes are not known
    pressure_memory: float | None  # share of time in which some task waited for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A device before the arms of a trial started: who ran there, and what was held of its memory."""

    processes: tuple[str, ...]
    memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecords:
    """All that was recorded of the machines of a run; empty where they were not monitored."""

    seconds: Mapping[int, float]  # how long each trial's traffic lasted
    placed: Mapping[int, Mapping[str, str]]  # by trial, the device of each arm that tailgate started
    cards: Mapping[Place, Card]
    devices: tuple[DeviceTraffic, ...]
    hosts: tuple[HostTraffic, ...]
    references: tuple[Reference, ...]
    earlier: Mapping[Place, Earlier]
    facts: Mapping[tuple[int, str], Mapping[str, Any]]  # what each host is, by trial and host

    @classmethod
    def of(cls, run: Run) -> MachineRecords:
        """Read the records of the run's machines."""
        samples = Samples(run.records.bed)
        devices: list[DeviceTraffic] = []
        hosts: list[HostTraffic] = []
        earlier: dict[Place, Earlier] = {}
        facts: dict[tuple[int, str], Mapping[str, Any]] = {}
        cards: dict[Place, Card] = {}
        placed = {trial.number: devices_of(trial) for trial in run.trials}
        for trial in run.trials:
            monitor = mapping(trial.info.get("bed"))
            cards |= {(trial.number, *place): card for place, card in cards_of(monitor).items()}
            for host, row in mapping(monitor.get("machines")).items():
                facts[trial.number, str(host)] = mapping(row)
            for row in rows_of(monitor.get("before")):
                names = tuple(_process_text(item) for item in rows_of(row.get("processes")))
                place = (trial.number, text_of(row, "host", RUN_HOST), text_of(row, "device"))
                earlier[place] = Earlier(processes=names, memory_bytes=number(row.get("memory_bytes")))
            unread = rows_of(monitor.get("unreadable"))
            blind = {text_of(row, "host") for row in unread if row.get("what") == "cpu_s"}
            processes = list(samples.of("process", trial))
            hosts += [_host(rows, processes, blind) for rows in samples.of("host", trial)]
            for rows in samples.of("device", trial):
                card = cards.get((trial.number, rows.host, rows.name)) or Card.unknown(rows.host, rows.name)
                arms = placed[trial.number].items() if rows.host == RUN_HOST else ()
                devices.append(_device(card, tuple(arm for arm, device in arms if device == rows.name), rows))
        return cls(
            seconds={trial.number: trial.seconds for trial in run.trials},
            placed=placed,
            cards=cards,
            devices=tuple(devices),
            hosts=tuple(hosts),
            references=references_of(run.trials),
            earlier=earlier,
            facts=facts,
        )

    @property
    def trials(self) -> tuple[int, ...]:
        """The numbers of the trials."""
        return tuple(self.seconds)

    @property
    def monitored(self) -> bool:
        """Whether anything was recorded of any machine."""
        return bool(self.devices or self.hosts or self.references)

    @property
    def used(self) -> list[DeviceTraffic]:
        """The devices of the run's host that served an arm; those of trials that do not say which did, all."""
        own = (device for device in self.devices if device.card.host == RUN_HOST)
        return [device for device in own if device.arms or not self.placed.get(device.trial)]

    @property
    def measured(self) -> list[tuple[int, str]]:
        """(trial, device) of the run's host that have a reference."""
        return list(dict.fromkeys((row.trial, row.device) for row in self.references if row.host == RUN_HOST))

    def arms_on(self, trial: int, device: str) -> tuple[str, ...]:
        """The arms that the run's host had on the device in the trial."""
        return tuple(arm for arm, name in self.placed.get(trial, {}).items() if name == device)

    def reference(self, trial: int, device: str, figure: str) -> list[Reference]:
        """The references of a device of the run's host that have the figure, before the trial and after it."""
        return [
            row
            for row in self.references
            if (row.trial, row.host, row.device) == (trial, RUN_HOST, device) and figure in row.figures
        ]

    def speed(self, trial: int, device: str, figure: str) -> float | None:
        """How fast a device of the run's host, or the host itself, was in the trial, as `speed_of` has it: the mean of
        before and after, or the one of them that is known."""
        known = [speed_of(figure, row.figures[figure]) for row in self.reference(trial, device, figure)]
        return sum(known) / len(known) if known else None

    def identity(self, trial: int, device: str) -> str:
        """What identifies a device of the run's host in all trials."""
        card = self.cards.get((trial, RUN_HOST, device))
        rows = (row.card for row in self.references if (row.trial, row.host, row.device) == (trial, RUN_HOST, device))
        return card.identity if card else next(rows, device)


def _process_text(row: Mapping[str, Any]) -> str:
    pid = number(row.get("pid"))
    return text_of(row, "name", "a process") + ("" if pid is None else f", pid {pid:.0f}")


# --- One device or host in one trial ----------------------------------------------------------------------------------


def _device(card: Card, arms: tuple[str, ...], rows: Rows) -> DeviceTraffic:
    reasons, weights = rows.reasons(), rows.weight_s[rows.inside]
    throttled: dict[str, float] | None = None
    throttle_s: float | None = None
    if any(names is not None for names in reasons):
        throttled, throttle_s = {}, 0.0
        for names, weight in zip(reasons, weights.tolist(), strict=True):
            held = [name for name in names or () if name in THROTTLES]
            for name in held:
                throttled[name] = throttled.get(name, 0.0) + weight
            throttle_s += weight if set(held) - {POWER_CAP} else 0.0
    free = np.array([not any(name in THROTTLES for name in names or ()) for names in reasons], dtype=np.bool_)
    clocks = rows.column("sm_mhz")
    working = np.isfinite(clocks) & ~(rows.column("utilisation_pct") <= 0)
    clock = Spread.of(clocks[working & free])
    foreign = rows.column("foreign_processes")
    known = np.isfinite(foreign)
    spreads = ("sm_mhz", "power_w", "power_limit_w", "temperature_c", "utilisation_pct", "memory_bytes")
    return DeviceTraffic(
        trial=rows.trial,
        card=card,
        arms=arms,
        seconds=rows.seconds,
        **{name: rows.spread(name) for name in spreads},
        mean_mhz=float(clocks[working].mean()) if working.any() else None,
        free_mhz=clock.high if clock else None,
        throttled_s=throttled,
        throttle_s=throttle_s,
        foreign_s=float(weights[known & (foreign > 0)].sum()) if known.any() else None,
        foreign_processes=int(foreign[known].max()) if known.any() else None,
        foreign_bytes=rows.most("foreign_memory_bytes"),
        reported={name: rows.reported(name) for name in NEEDED},
    )


def _host(rows: Rows, processes: Sequence[Rows], blind: Collection[str]) -> HostTraffic:
    """`blind` are hosts on which the time of one of the run's own processes could not be read."""
    cpus = rows.spread("cpus")
    count = cpus.median if cpus and cpus.median > 0 else None
    cores = rows.rate("cpu_s")
    # What was sampled once or twice and then ended has no rate, and little time.
    own = [item for item in processes if item.host == rows.host]
    rates = [rate for item in own if (rate := item.rate("cpu_s")) is not None or item.inside.sum() >= 3]
    sees_all = bool(rates) and None not in rates and rows.host not in blind
    foreign = max(0.0, cores - sum(rate or 0.0 for rate in rates)) if cores is not None and sees_all else None

    def share(rate: float | None) -> float | None:
        return rate / count if rate is not None and count else None

    return HostTraffic(
        trial=rows.trial,
        host=rows.host,
        seconds=rows.seconds,
        cpus=count,
        steal=share(rows.rate("steal_s")),
        busy=share(cores),
        foreign=share(foreign),
        pressure_memory=rows.rate("pressure_memory_s"),
    )
