"""How the machines of a run behaved: what was sampled of them during the traffic, and their measured speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.plain_values import mapping, number, rows_of, text_of
from tailgate.analysis.records.plain_values import seconds as seconds_of
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.trials import SECOND, Trial, described, devices_of, identity_of

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

LEAST_SAMPLED = 0.95  # of a trial's traffic, to say how a machine behaved
_NEEDED = ("throttle", "sm_mhz", "foreign_processes")  # columns, to say that nothing disturbed a device
_MUCH_BYTES = 2 << 30  # more than a driver keeps of an idle card, or a desktop takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device during the traffic of one trial."""

    trial: int
    name: str  # cuda:0
    card: str  # what identifies it in all trials
    arms: tuple[str, ...]  # those that it served
    seconds: float  # of the traffic that were sampled
    known: bool  # whether what must be known of it was sampled almost throughout
    mean_mhz: float | None  # the SM clock, while the device worked
    free_mhz: float | None  # the highest at a time when the device worked and nothing held it back
    power_limit_w: float | None  # the lowest: it may change while a trial runs
    throttled_s: Mapping[str, float] | None  # by reason; None where the card does not report it
    throttle_s: float | None  # with a reason other than the power cap
    foreign_s: float | None  # with processes of others; None where that is unknown
    foreign_processes: int | None  # the most at once
    foreign_bytes: float | None
    held_before: bool  # whether others held it before the arms started


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host during the traffic of one trial. Shares of the time of all its processors, but for waiting."""

    trial: int
    known: bool  # whether it was sampled almost throughout
    steal: float | None
    foreign: float | None  # busy with other work; None where the run's own processes are not known
    pressure_memory: float | None  # share of time in which some task waited for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecords:
    """All that was recorded of the machines of a run; empty where they were not monitored."""

    placed: Mapping[int, Mapping[str, str]]  # the device of each managed arm, of every trial
    devices: tuple[Device, ...]
    hosts: tuple[Host, ...]
    speeds: tuple[Speed, ...]
    errors: tuple[str, ...]  # why a speed was not measured

    @classmethod
    def of(cls, run: Run) -> MachineRecords:
        """Read the records of the run's machines."""
        samples = run.records.machines
        references = [row for trial in run.trials for row in rows_of(trial.info.get("references"))]
        failed = [row for row in references if isinstance(row.get("error"), str) and row["error"]]
        return cls(
            placed={trial.number: devices_of(trial) for trial in run.trials},
            devices=tuple(
                _device(trial, rows) for trial in run.trials for rows in samples_of(samples, "device", trial)
            ),
            hosts=tuple(host for trial in run.trials for host in _hosts(trial, samples)),
            speeds=speeds_of(run.trials),
            errors=tuple(dict.fromkeys(f"{text_of(row, 'device')}: {row['error']}" for row in failed)),
        )

    @property
    def monitored(self) -> bool:
        """Whether anything was recorded of any machine."""
        return bool(self.devices or self.hosts or self.speeds or self.errors)

    @property
    def used(self) -> list[Device]:
        """The devices that served an arm; those of trials that do not say which did, all."""
        return [device for device in self.devices if device.arms or not self.placed.get(device.trial)]

    def arms_on(self, trial: int, device: str) -> tuple[str, ...]:
        """Return the arms that were on the device in the trial."""
        return tuple(arm for arm, name in self.placed.get(trial, {}).items() if name == device)

    def pairs(self, arm: str, control: str) -> dict[int, tuple[Device, Device]]:
        """Return the devices of the arm and of the control, by trial, if they differ."""
        found = {}
        for trial in self.placed:
            of = {name: device for device in self.used if device.trial == trial for name in device.arms}
            if arm in of and control in of and of[arm] is not of[control]:
                found[trial] = of[arm], of[control]
        return found


def _device(trial: Trial, rows: Rows) -> Device:
    facts, weights = described(trial, rows.name), rows.weight_s[rows.inside]
    held = [names and [name for name in names if name in THROTTLES] for names in rows.reasons()]
    reported = any(names is not None for names in held)
    throttled: dict[str, float] = {}
    for names, weight in zip(held, weights.tolist(), strict=True):
        for name in names or ():
            throttled[name] = throttled.get(name, 0.0) + weight
    by_more = np.array([bool(set(names or ()) - {POWER_CAP}) for names in held], dtype=np.bool_)
    clocks = rows.column("sm_mhz")
    working = np.isfinite(clocks) & ~(rows.column("utilisation_pct") <= 0)
    free = clocks[working & np.array([not names for names in held], dtype=np.bool_)]
    foreign = rows.column("foreign_processes")
    before = [row for row in rows_of(mapping(trial.info.get("monitor")).get("before")) if row.get("name") == rows.name]
    most = rows.level("foreign_processes", np.max)
    limit = rows.level("power_limit_w", np.min)
    sampled = rows.seconds >= LEAST_SAMPLED * trial.seconds
    return Device(
        trial=rows.trial,
        name=rows.name,
        card=identity_of(trial, rows.name),
        arms=tuple(arm for arm, name in devices_of(trial).items() if name == rows.name),
        seconds=rows.seconds,
        known=sampled and all(rows.reported(name) >= LEAST_SAMPLED for name in _NEEDED),
        mean_mhz=float(clocks[working].mean()) if working.any() else None,
        free_mhz=float(free.max()) if free.size else None,
        power_limit_w=number(facts.get("power_limit_w")) if limit is None else limit,
        throttled_s=throttled if reported else None,
        throttle_s=float(weights[by_more].sum()) if reported else None,
        foreign_s=None if most is None else float(weights[foreign > 0].sum()),
        foreign_processes=None if most is None else int(most),
        foreign_bytes=rows.level("foreign_memory_bytes", np.max),
        held_before=any(
            number(row.get("foreign_processes")) or (number(row.get("memory_bytes")) or 0.0) > _MUCH_BYTES
            for row in before
        ),
    )


def _hosts(trial: Trial, samples: pa.Table | None) -> Iterator[Host]:
    unread = rows_of(mapping(trial.info.get("monitor")).get("unreadable"))
    blind = any(row.get("what") == "cpu_s" for row in unread)  # to the time of one of the run's own processes
    for rows in samples_of(samples, "host", trial):
        cpus = rows.level("cpus", np.median) or 0.0
        cores = rows.rate("cpu_s")
        own = None if blind else _cores(samples_of(samples, "process", trial))
        foreign = None if cores is None or own is None else max(0.0, cores - own)
        steal, other = (None if rate is None or cpus <= 0 else rate / cpus for rate in (rows.rate("steal_s"), foreign))
        yield Host(
            trial=rows.trial,
            known=rows.seconds >= LEAST_SAMPLED * trial.seconds,
            steal=steal,
            foreign=other,
            pressure_memory=rows.rate("pressure_memory_s"),
        )


def _cores(processes: Iterable[Rows]) -> float | None:
    """Return how many processors the run's own processes kept busy; None unless known of all."""
    # What was sampled once or twice and then ended has no rate, and little time.
    rates = [rate for item in processes if (rate := item.rate("cpu_s")) is not None or item.inside.sum() >= 3]
    return sum(filter(None, rates)) if rates and None not in rates else None


_LONGEST_GAP = 3.0  # sampling intervals; what lies between samples farther apart was not sampled


def samples_of(table: pa.Table | None, kind: str, trial: Trial) -> Iterator[Rows]:
    """Yield the samples of the host, or of each device, process or allocator (`kind`), in the trial, by name."""
    if table is None:
        return
    table = table.filter(
        (pc.field("kind") == kind)
        & (pc.coalesce(pc.field("trial"), trial.number) == trial.number)
        & pc.field("name").is_valid()
        & pc.field("at_ns").is_valid()
    ).sort_by("at_ns")
    for name in sorted(set(table.column("name").to_pylist())):
        yield Rows(table.filter(pc.field("name") == name), trial, name)


class Rows:
    """The samples of the host, a device or a process in one trial, in order of time."""

    def __init__(self, table: pa.Table, trial: Trial, name: str) -> None:
        self._table = table
        self.trial, self.name = trial.number, name
        arms = table.column("arm").drop_null()
        self.arm: str | None = str(arms[0]) if len(arms) else None  # of a replica
        self.at_ns: Ints = table.column("at_ns").to_numpy()
        self.inside: Bools = (self.at_ns > trial.start_ns) & (self.at_ns <= trial.end_ns)
        interval_s = seconds_of(mapping(trial.info.get("monitor")).get("interval_s")) or 1.0
        # A sample stands for the time since the one before it, unless that is too long ago.
        since = np.diff(self.at_ns, prepend=self.at_ns[:1] - int(interval_s * SECOND)) / 1e9
        longest_s = _LONGEST_GAP * max(interval_s, 1e-3)
        self.weight_s: Floats = np.where(since > longest_s, interval_s, since)

    @property
    def seconds(self) -> float:
        """Seconds of the traffic that the samples stand for."""
        return float(self.weight_s[self.inside].sum())

    def whole(self, name: str) -> Floats:
        """Return the column over all samples, NaN for null."""
        return np.asarray(self._table.column(name).cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def column(self, name: str) -> Floats:
        """Return the column over the samples during the traffic, NaN for null."""
        return self.whole(name)[self.inside]

    def known(self, name: str, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
        """Return (at_ns, values) of the column's known values from `start_ns` to `end_ns`."""
        values = self.whole(name)
        keep: Bools = (self.at_ns >= start_ns) & (self.at_ns <= end_ns) & np.isfinite(values)
        return self.at_ns[keep], values[keep]

    def reported(self, name: str) -> float:
        """Return the share of the samples during the traffic that have the column."""
        column = self._table.column(name).filter(pa.array(self.inside))
        return 1.0 - float(column.null_count) / max(1, len(column))

    def level(self, name: str, of: Callable[[Floats], np.float64]) -> float | None:
        """Return `of` (np.min, np.median, np.max) of the column during the traffic; None if it is unknown."""
        values = self.column(name)
        known = values[np.isfinite(values)]
        return float(of(known)) if known.size else None

    def rate(self, name: str) -> float | None:
        """Return how much a counter rose per second of the traffic; None without two values. An interval in which it
        fell is left out: what it counted started again."""
        values, at_ns = self.column(name), self.at_ns[self.inside]
        known = np.isfinite(values)
        values, at_ns = values[known], at_ns[known]
        rise, took = np.diff(values), np.diff(at_ns) / 1e9
        kept = (rise >= 0) & (took > 0)
        return float(rise[kept].sum() / took[kept].sum()) if kept.any() else None

    def reasons(self) -> list[list[str] | None]:
        """Return the throttle reasons of each sample during the traffic; None if unknown."""
        reasons: list[list[str] | None] = self._table.column("throttle").filter(pa.array(self.inside)).to_pylist()
        return reasons


# A matrix product, a read of memory, small launches and plain Python before and after each trial show how fast the card
# and the host were, whatever the servers did.
PYTHON = "python_ms"
WORK = {
    "matmul_tflops": "matrix-product speed",
    "read_gb_per_s": "memory-read speed",
    "launch_us": "kernel-launch speed",
    PYTHON: "Python speed",
}
FIGURES = tuple(WORK)
CARD_FIGURES, HOST_FIGURES = FIGURES[:2], FIGURES[2:]  # of the card, and of its host, of which less is better

# The keys of a reference that say how large the work behind each figure was.
_SIZES = {
    "matmul_tflops": ("matrix", "dtype", "rest_ms"),
    "read_gb_per_s": ("read_bytes",),
    "launch_us": ("launches", "processors"),
    PYTHON: ("processors",),
}
_LEAST, _MOST = 1e-9, 1e12  # no machine is so slow or so fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One figure of a device, or of its host, before and after a trial. None was not measured."""

    trial: int
    device: str
    card: str  # what identifies the device in all trials
    figure: str
    size: str  # of the work
    before: float | None
    after: float | None

    @property
    def logs(self) -> list[float]:
        """The logarithms of what is known of before and after: more is faster."""
        sign = -1.0 if self.figure in HOST_FIGURES else 1.0
        return [sign * math.log(value) for value in (self.before, self.after) if value is not None]

    @property
    def mean(self) -> float:
        """The speed in the trial, as a logarithm."""
        return fmean(self.logs)


def speeds_of(trials: Iterable[Trial]) -> tuple[Speed, ...]:
    """Return all measured speeds, in the order of trials and devices.

    Only figures of work of one size compare: a card whose memory is partly in use gets a smaller read. Python ran on
    all processors of the host whichever device was measured, so its time is the geometric mean over devices.
    """
    python: dict[tuple[int, str], list[float]] = {}
    known: dict[tuple[int, str, str, str, str], dict[str, float]] = {}
    for trial, row in ((one, row) for one in trials for row in rows_of(one.info.get("references"))):
        device, when = text_of(row, "device"), text_of(row, "when")
        for figure, keys in _SIZES.items():
            value = number(row.get(figure))
            if value is None or not _LEAST < value < _MOST or when not in ("before", "after"):
                continue
            size = ", ".join(f"{key} {row.get(key)}" for key in keys)
            place = (trial.number, device, identity_of(trial, device), figure, size)
            known.setdefault(place, {})[when] = value
            if figure == PYTHON:
                python.setdefault((trial.number, when), []).append(math.log(value))
    speeds = []
    for (number_of, device, card, figure, size), values in known.items():
        both = {
            when: math.exp(fmean(python[number_of, when])) if figure == PYTHON and when in values else values.get(when)
            for when in ("before", "after")
        }
        speeds.append(Speed(trial=number_of, device=device, card=card, figure=figure, size=size, **both))
    return tuple(speeds)
