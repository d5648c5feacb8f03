"""The machines of a run and how they behaved: what was sampled of them during the traffic, and their speed beside it.

Nothing is decided here. What was not recorded, or could not be read, is None or empty.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from analysis.records.plain_values import mapping, number, rows_of, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.bed_samples import Rows, Samples, Spread
from analysis.run.cards import Card, cards_of
from analysis.run.placement import devices_of
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
TOLD = ("throttle", "sm_mhz", "foreign_processes")

_STEP_MHZ = 15.0  # a card's clock moves in steps of this


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraffic:
    """One device during the traffic of one trial."""

    trial: int
    card: Card
    arms: tuple[str, ...]  # those that it served
    seconds: float  # of the traffic that were watched
    sm_mhz: Spread | None
    mean_mhz: float | None  # of the clock while the device worked
    free_mhz: float | None  # the highest clock at a time when the device worked and nothing held it back
    memory_mhz: Spread | None
    power_w: Spread | None
    power_limit_w: Spread | None
    temperature_c: Spread | None
    utilisation_pct: Spread | None
    memory_bytes: Spread | None
    throttled_s: Mapping[str, float] | None  # by reason; None where the card does not say
    throttle_s: float | None  # with a reason other than the power cap
    foreign_s: float | None  # with processes of others; None where that cannot be told
    foreign_processes: int | None  # the most at once
    foreign_bytes: float | None
    told: Mapping[str, float]  # the share of its samples that have the column, of TOLD
    locked: bool | None  # the clock is the same under load and idle; None where one of the two was not seen

    @property
    def name(self) -> str:
        """The device as arms name it."""
        return self.card.name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """One host during the traffic of one trial. Shares are of the time of all its processors, but for pressure."""

    trial: int
    host: str
    seconds: float  # of the traffic that were watched
    cpus: float | None
    steal: float | None
    busy: float | None
    foreign: float | None  # busy with what is not of the run; None where the run's own processes are not known
    pressure_cpu: float | None  # shares of time in which some task waited
    pressure_memory: float | None
    pressure_io: float | None
    load_per_cpu: Spread | None
    frequency_mhz: Spread | None
    memory_bytes: Spread | None
    memory_limit_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTraffic:
    """One process of the run with its descendants, during the traffic of one trial."""

    trial: int
    host: str
    name: str
    arm: str | None
    samples: int
    cores: float | None
    threads: float | None
    switches_per_s: float | None
    forced_switches_per_s: float | None
    memory_bytes: Spread | None
    files: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A device before the arms of a trial started: who ran there, and what was held of its memory."""

    processes: tuple[str, ...]
    memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestBed:
    """All that was recorded of the machines of a run."""

    __test__: ClassVar[bool] = False  # no test of pytest's

    trials: tuple[int, ...]
    placed: Mapping[int, Mapping[str, str]]  # by trial, the device of each arm that tailgate started
    cards: Mapping[tuple[int, str, str], Card]  # by trial, host and name
    devices: tuple[DeviceTraffic, ...]
    hosts: tuple[HostTraffic, ...]
    processes: tuple[ProcessTraffic, ...]
    references: tuple[Reference, ...]
    sizes: Mapping[tuple[int, str, str], tuple[Any, ...]]  # of the work behind each speed
    speeds: Mapping[tuple[int, str, str], Sequence[float]]  # of (trial, device of the run's host, figure), as measured
    pressed: frozenset[int]  # trials in which the experiment itself weighed on the machines
    earlier: Mapping[tuple[int, str, str], Earlier]  # by trial, host and device
    unreadable: tuple[tuple[str, str, str, str], ...]  # (host, name, what, why), each once
    seconds: Mapping[int, float]  # how long each trial's traffic lasted
    machines: Mapping[tuple[int, str], Mapping[str, Any]]  # by trial and host

    @classmethod
    def of(cls, run: Run) -> TestBed:
        """The test bed of the run, empty where nobody watched it."""
        samples = Samples(run.records.bed)
        devices: list[DeviceTraffic] = []
        hosts: list[HostTraffic] = []
        processes: list[ProcessTraffic] = []
        earlier: dict[tuple[int, str, str], Earlier] = {}
        unreadable: dict[tuple[str, str, str, str], None] = {}
        machines: dict[tuple[int, str], Mapping[str, Any]] = {}
        placed: dict[int, Mapping[str, str]] = {}
        known_cards: dict[tuple[int, str, str], Card] = {}
        for trial in run.trials:
            bed = mapping(trial.info.get("bed"))
            cards = cards_of(bed)
            known_cards |= {(trial.number, *place): card for place, card in cards.items()}
            placed[trial.number] = devices_of(trial)
            for host, machine in mapping(bed.get("machines")).items():
                machines[trial.number, str(host)] = mapping(machine)
            blind = {text_of(row, "host") for row in rows_of(bed.get("unreadable")) if row.get("what") == "cpu_s"}
            for row in rows_of(bed.get("unreadable")):
                unreadable[text_of(row, "host"), text_of(row, "name"), text_of(row, "what"), text_of(row, "why")] = None
            for row in rows_of(bed.get("before")):
                names = tuple(_process_text(item) for item in rows_of(row.get("processes")))
                place = (trial.number, text_of(row, "host", RUN_HOST), text_of(row, "device"))
                earlier[place] = Earlier(processes=names, memory_bytes=number(row.get("memory_bytes")))
            own = [_process(rows) for rows in samples.of("process", trial)]
            processes += own
            hosts += [_host(rows, own, blind) for rows in samples.of("host", trial)]
            for rows in samples.of("device", trial):
                card = cards.get((rows.host, rows.name)) or Card(
                    **dict.fromkeys(("model", "power_limit_w", "power_limit_default_w", "sm_max_mhz", "lock_command")),
                    host=rows.host,
                    name=rows.name,
                    identity=f"{rows.host} {rows.name}",
                    shared=False,
                )
                arms = placed[trial.number].items() if rows.host == RUN_HOST else ()
                devices.append(_device(card, tuple(arm for arm, device in arms if device == rows.name), rows))
        measured = references_of(run.trials)
        return cls(
            trials=tuple(trial.number for trial in run.trials),
            placed=placed,
            cards=known_cards,
            devices=tuple(devices),
            hosts=tuple(hosts),
            processes=tuple(processes),
            references=measured,
            sizes={
                (row.trial, row.device, figure): row.sizes[figure]
                for row in measured
                if row.host == RUN_HOST
                for figure in row.figures
            },
            speeds=_speeds(measured),
            pressed=frozenset(trial.number for trial in run.trials if rows_of(trial.info.get("pressure"))),
            earlier=earlier,
            unreadable=tuple(unreadable),
            seconds={trial.number: trial.seconds for trial in run.trials},
            machines=machines,
        )

    @property
    def watched(self) -> bool:
        """Whether anything was recorded of any machine."""
        return bool(self.devices or self.hosts or self.references)

    def arms_on(self, trial: int, device: str) -> tuple[str, ...]:
        """The arms that the run's host had on the device in the trial."""
        return tuple(arm for arm, name in self.placed.get(trial, {}).items() if name == device)

    def speed(self, trial: int, device: str, figure: str) -> float | None:
        """How fast a device of the run's host, or the host beside it, was in the trial, as `speed_of` has it: the mean
        of before and after, or the one of them that is known."""
        known = self.speeds.get((trial, device, figure))
        return sum(known) / len(known) if known else None

    def identity(self, trial: int, device: str) -> str:
        """What tells a device of the run's host from others in all trials."""
        card = self.cards.get((trial, RUN_HOST, device))
        rows = (row.card for row in self.references if (row.trial, row.host, row.device) == (trial, RUN_HOST, device))
        return card.identity if card else next(rows, device)


def _process_text(row: Mapping[str, Any]) -> str:
    pid = number(row.get("pid"))
    return text_of(row, "name", "a process") + ("" if pid is None else f", pid {pid:.0f}")


def _speeds(references: Iterable[Reference]) -> dict[tuple[int, str, str], list[float]]:
    speeds: dict[tuple[int, str, str], list[float]] = {}
    for row in references:
        for figure, value in row.figures.items() if row.host == RUN_HOST else ():
            speeds.setdefault((row.trial, row.device, figure), []).append(speed_of(figure, value))
    return speeds


# --- One thing in one trial ------------------------------------------------------------------------------------------


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
    told = np.isfinite(foreign)
    return DeviceTraffic(
        trial=rows.trial,
        card=card,
        arms=arms,
        seconds=rows.seconds,
        **{
            name: rows.spread(name)
            for name in (
                *("sm_mhz", "memory_mhz", "power_w", "power_limit_w", "temperature_c", "utilisation_pct"),
                "memory_bytes",
            )
        },
        mean_mhz=float(clocks[working].mean()) if working.any() else None,
        free_mhz=clock.high if clock else None,
        throttled_s=throttled,
        throttle_s=throttle_s,
        foreign_s=float(weights[told & (foreign > 0)].sum()) if told.any() else None,
        foreign_processes=int(foreign[told].max()) if told.any() else None,
        foreign_bytes=rows.most("foreign_memory_bytes"),
        told={name: rows.told(name) for name in TOLD},
        locked=_locked(rows),
    )


def _locked(rows: Rows) -> bool | None:
    clock, used = rows.whole("sm_mhz"), rows.whole("utilisation_pct")
    spread = Spread.of(clock)
    if spread is None:
        return None
    if spread.high - spread.low > _STEP_MHZ:
        return False
    known = np.isfinite(used)
    return True if (used[known] > 0).any() and (used[known] == 0).any() else None


def _host(rows: Rows, processes: Sequence[ProcessTraffic], blind: Collection[str]) -> HostTraffic:
    """`blind` are hosts on which the time of one of the run's own processes could not be read."""
    cpus = rows.spread("cpus")
    count = cpus.median if cpus and cpus.median > 0 else None
    load = rows.column("load1") / (count or math.nan)
    cores = rows.rate("cpu_s")
    # What was sampled once or twice and then ended has no rate, and little time.
    own = [item.cores for item in processes if item.host == rows.host and not (item.cores is None and item.samples < 3)]
    known = [item for item in own if item is not None]
    sees_all = bool(own) and len(known) == len(own) and rows.host not in blind
    foreign = max(0.0, cores - sum(known)) if cores is not None and sees_all else None
    return HostTraffic(
        trial=rows.trial,
        host=rows.host,
        seconds=rows.seconds,
        cpus=count,
        steal=_share(rows.rate("steal_s"), count),
        busy=_share(cores, count),
        foreign=_share(foreign, count),
        pressure_cpu=rows.rate("pressure_cpu_s"),
        pressure_memory=rows.rate("pressure_memory_s"),
        pressure_io=rows.rate("pressure_io_s"),
        load_per_cpu=Spread.of(load),
        frequency_mhz=rows.spread("frequency_mhz"),
        memory_bytes=rows.spread("memory_bytes"),
        memory_limit_bytes=rows.most("memory_limit_bytes"),
    )


def _share(rate: float | None, cpus: float | None) -> float | None:
    return rate / cpus if rate is not None and cpus else None


def _process(rows: Rows) -> ProcessTraffic:
    switches = [rows.rate(f"{kind}voluntary_switches") for kind in ("", "in")]
    return ProcessTraffic(
        trial=rows.trial,
        host=rows.host,
        name=rows.name,
        arm=rows.arm,
        samples=int(rows.inside.sum()),
        cores=rows.rate("cpu_s"),
        threads=rows.most("threads"),
        switches_per_s=switches[0],
        forced_switches_per_s=switches[1],
        memory_bytes=rows.spread("memory_bytes"),
        files=rows.most("files"),
    )
