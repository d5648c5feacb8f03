"""A run as it is judged: its records cut into arms, trials and blocks, and what they say of themselves.

Nothing is decided here. What the records leave out stays unknown: None, empty, or a default that is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.columns import parts
from analysis.records.placing import Unplaced, misplaced_requests, place_events
from analysis.records.requests import Codes, RecordError, Requests, RunRecords, may_serve, requests_of
from analysis.run.backlog import with_backlog
from analysis.run.slo import parse_goodput
from analysis.run.spikes import Attribution, CompileEvent, attribute, compile_events, stall_windows, windows_of
from analysis.settings.gate_limits import GateLimits
from analysis.settings.slo_targets import SloTarget, parse_cold, parse_slo
from analysis.statistics.quantiles import quantile

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SECOND = 1_000_000_000
_LAST_NS = np.iinfo(np.int64).max
_LONGEST_S = 1e9  # thirty years
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial's place in time. `seconds` is how long it really lasted, not what was planned."""

    number: int
    info: Mapping[str, Any]  # trial.json; empty where there is none
    start_ns: int
    first_ns: int  # the first request
    seconds: float
    blocks: int
    first_block: int  # its blocks are numbered from here, unique over trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records cut into arms, trials and blocks."""

    records: RunRecords
    seed: int
    limits: GateLimits
    targets: tuple[SloTarget, ...]
    cold_targets: tuple[SloTarget, ...]  # for the first traffic after ready alone
    goodput_targets: tuple[SloTarget, ...]  # what each request must meet to be good; the SLO's limits by default
    attainment: float | None  # the share of requests that must be good; None where none is asked for
    design: str
    block_s: float
    control: str
    arms: tuple[str, ...]  # the control first
    requests: Requests
    events: tuple[CompileEvent, ...]
    unplaced_events: tuple[Unplaced, ...]  # compile events that belong nowhere, and are not in `events`
    unplaced_requests: tuple[Unplaced, ...]
    attribution: Attribution
    trials: tuple[Trial, ...]
    block: Codes  # of each request, unique over trials
    cold: Bools
    usable: Bools  # measured and with times in order

    @classmethod
    def of(cls, records: RunRecords, seed: int | None = None) -> Run:
        """The run that `records` tell of, with the experiment's own seed unless one is given.

        Raises RecordError when no arm can be the control, or when a setting to judge by cannot be used.
        """
        experiment = records.experiment
        limits = GateLimits.from_table(_table(experiment, "gates"))
        infos = records.trials
        design = str(_first_of(infos, "design") or _table(experiment, "traffic").get("design") or "mirrored")
        block_s = _seconds(_first_of(infos, "block_s")) or _seconds(_table(experiment, "trials").get("block_s"))
        block_s = block_s if block_s and block_s > 0 else limits.block_s
        timeout_s = number(_table(experiment, "traffic").get("timeout_s"))
        told_arms = _told_arms(records)
        unplaced_requests = misplaced_requests(
            records.requests, arms=told_arms, trials={int(info["trial"]) for info in infos}
        )
        # What is judged of the table will be in `requests`: memory need not hold it twice.
        table = [records.requests]
        records = replace(records, requests=records.requests.select([]))
        requests = requests_of(
            table.pop(),
            deadline_ms=timeout_s * 1e3 if timeout_s else None,
            ends_ns=_planned_ends(infos),
            cut_short={int(info["trial"]) for info in infos if not info.get("complete")},
            queues=may_serve(records.events),
        )
        control, arms = _arms(records, requests)
        placed, unplaced_events = place_events(
            records.events,
            requests,
            arms=arms,
            trials={*(int(info["trial"]) for info in infos), *np.unique(requests.trial).tolist()},
            replicas={arm: names for arm in arms if (names := _replica_names(infos, arm))},
        )
        events = compile_events(placed, requests, stalling=_stalling_kinds(infos))
        # Arms that take turns meet only in a block that holds a turn of each.
        width_s = block_s * len(arms) if design == "switchback" else block_s
        trials = _trials(requests, infos, width_s)
        block = block_numbers(trials, width_s, requests.trial, requests.start_ns)
        cold = np.zeros(len(requests), dtype=np.bool_)
        for trial in trials:
            cold |= (requests.trial == trial.number) & (
                requests.start_ns < trial.first_ns + int(limits.cold_s * SECOND)
            )
        targets = parse_slo(_table(experiment, "slo"))
        goodput, attainment = parse_goodput(_table(experiment, "goodput"))
        if seed is None:
            given = experiment.get("seed")
            seed = given if isinstance(given, int) else 0
        return cls(
            records=records,
            seed=abs(seed),
            limits=limits,
            targets=targets,
            cold_targets=parse_cold(_table(experiment, "slo")),
            goodput_targets=goodput or targets,
            attainment=attainment,
            design=design,
            block_s=width_s,
            control=control,
            arms=arms,
            requests=requests,
            events=events,
            unplaced_events=unplaced_events,
            unplaced_requests=unplaced_requests,
            attribution=with_backlog(requests, events, attribute(requests, events)),
            trials=trials,
            block=block,
            cold=cold,
            usable=requests.measured & ~requests.broken,
        )

    def rng(self, *place: int) -> np.random.Generator:
        """A generator of its own for each place, so that one arm more does not change the others' numbers."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=place))

    # --- The whole ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The experiment's name, else the directory's."""
        return str(self.records.experiment.get("name") or self.run_id)

    @property
    def run_id(self) -> str:
        """The name of the run directory."""
        return self.records.directory.resolve().name

    @property
    def treatments(self) -> tuple[str, ...]:
        """The arms that are judged against the control."""
        return self.arms[1:]

    @property
    def seconds(self) -> float:
        """How long all trials lasted together."""
        return sum(trial.seconds for trial in self.trials)

    @property
    def planned_trials(self) -> int:
        """How many trials the experiment asks for; 0 where it does not say."""
        count = _table(self.records.experiment, "trials").get("count")
        return count if isinstance(count, int) else 0

    @property
    def blocks(self) -> int:
        """Time blocks of all trials together."""
        return sum(trial.blocks for trial in self.trials)

    @property
    def infos(self) -> list[Mapping[str, Any]]:
        """What each trial's trial.json says, empty where there is none."""
        return [trial.info for trial in self.trials]

    @property
    def told_open_loop(self) -> bool | None:
        """Whether the load did not wait for the servers, as the first trial that knows says."""
        told = _first_of(self.infos, "open_loop")
        return told if isinstance(told, bool) else None

    @property
    def concurrency(self) -> int | None:
        """Requests that a closed loop or a limit kept under way to each arm; None where there was no such number."""
        told = number(_first_of(self.infos, "concurrency")) or number(_first_of(self.infos, "max_concurrency"))
        return int(told) if told else None

    @property
    def planned(self) -> dict[str, int]:
        """Requests that the schedule held for each arm ("*": for whichever arm the splitter chose), over all trials."""
        total: dict[str, int] = {}
        for trial in self.trials:
            for name, count in mapping(trial.info.get("planned")).items():
                known = number(count)
                if known is not None:
                    total[str(name)] = total.get(str(name), 0) + int(known)
        return total

    @property
    def weights(self) -> dict[str, float]:
        """The splitter's weight of each arm, as trials say, else as the experiment does."""
        told = mapping(_first_of(self.infos, "weights"))
        weights = {str(name): number(value) or 0.0 for name, value in told.items()}
        for row in _rows(self.records.experiment.get("arms")):
            if "name" in row and str(row["name"]) not in weights:
                weights[str(row["name"])] = number(row.get("weight")) or 0.0
        return weights

    @property
    def generator_lag_ms(self) -> float | None:
        """The largest p99 lag that a generator or the records report."""
        lags = [number(mapping(row.get("lag_ms")).get("p99")) for row in self.records.generators]
        known = [lag for lag in lags if lag is not None]
        from_records = quantile(self.requests.lag_ms(~self.requests.broken), 0.99)
        if not math.isnan(from_records):
            known.append(from_records)
        return max(known, default=None)

    def rate(self, count: int) -> float:
        """`count` over the run, per second."""
        return count / self.seconds if self.seconds > 0 else 0.0

    def offset_s(self, trial: int, at_ns: int) -> float | None:
        """Seconds from the start of the trial to `at_ns`."""
        start = next((item.start_ns for item in self.trials if item.number == trial), 0)
        return (at_ns - start) / 1e9 if start else None

    # --- Requests -----------------------------------------------------------------------------------------------------

    def of_arm(self, name: str) -> Bools:
        """Which requests went to the arm."""
        if name not in self.requests.arms:
            return np.zeros(len(self.requests), dtype=np.bool_)
        return np.asarray(self.requests.arm == self.requests.arms.index(name))

    def steady(self, mask: Bools, arms: Sequence[str]) -> Ints:
        """The rows in `mask` past the cold start that no compile held up, nor met one of `arms` compiling."""
        rows = np.flatnonzero(mask & ~self.cold & ~self.attribution.hit)
        for trial in self.trials:
            stalls = [stall_windows(self.events, arm=arm, trial=trial.number) for arm in arms]
            for windows in (windows for windows in stalls if windows.start_ns.size):
                met = windows.touch(self.requests.start_ns[rows], self.requests.end_ns[rows])
                rows = rows[~met | (self.requests.trial[rows] != trial.number)]
        return rows

    def sessions(self, arm: str) -> int:
        """Sessions that the arm got, since the splitter places sessions; a request without one counts by itself."""
        own = self.of_arm(arm)
        names = self.requests.session_ids.filter(pa.array(own))
        sessions = pa.table({"trial": self.requests.trial[own], "session": names})
        known = sessions.filter(names.is_valid())
        return int(known.group_by(["trial", "session"]).aggregate([]).num_rows + names.null_count)

    # --- Arms ---------------------------------------------------------------------------------------------------------

    def config(self, arm: str) -> Mapping[str, Any]:
        """The arm's resolved configuration from the first trial that has it, else what the experiment says of it."""
        for row in self._told_of(arm):
            if isinstance(row.get("config"), Mapping):
                return mapping(row["config"])
        return next((row for row in _rows(self.records.experiment.get("arms")) if row.get("name") == arm), {})

    def external(self, arm: str) -> Mapping[str, Any]:
        """What is known of an arm that tailgate did not start: kind, address, model_name; empty for its own arms."""
        rows = [*self._told_of(arm), *_rows(self.records.experiment.get("arms"))]
        row = next((row for row in rows if row.get("name") == arm and row.get("kind")), {})
        kind = row.get("kind")
        return {} if kind in (None, "tailgate") else {**row, **mapping(row.get("external")), "kind": kind}

    def times_per_answer(self, arm: str) -> tuple[int, int]:
        """(times recorded, tokens answered) over the completed answers: fewer times than tokens come in chunks."""
        own = np.flatnonzero(self.of_arm(arm) & self.usable & self.requests.ok)
        return int(self.requests.token_times[own].sum()), int(self.requests.output_tokens[own].sum())

    def length_ladder(self, arm: str) -> tuple[int, ...]:
        """The prompt lengths at which the arm's shapes change, as its trials say; empty where each length is its own,
        or nothing is said."""
        told = next((row["length_ladder"] for row in self._told_of(arm) if row.get("length_ladder")), None)
        told = told or self.external(arm).get("length_ladder")
        steps = [number(step) for step in told] if isinstance(told, (list, tuple)) else []
        return tuple(sorted({int(step) for step in steps if step is not None and step >= 1}))

    def counts_tokens(self, arm: str) -> bool:
        """Whether the arm's server tells how many tokens it answered, so that `output_tokens` is no count of pieces."""
        return all(probe.get("tokens") is not None for probe in self.probes(arm))

    def probes(self, arm: str) -> list[Mapping[str, Any]]:
        """What each replica of an external arm showed in its first short answer, trial by trial."""
        return [probe for row in self._told_of(arm) for probe in _rows(row.get("probe"))]

    def compiles(self, arm: str) -> bool:
        """Whether the arm asks for compiling."""
        return bool(mapping(self.config(arm).get("compile")).get("enabled"))

    def replicas(self, arm: str) -> int:
        """How many server processes the arm had, as trials say, else as the requests do; at least 1."""
        for row in self._told_of(arm):
            if isinstance(row.get("replicas"), list):
                return max(1, len(row["replicas"]))
        own = np.unique(self.requests.replica[self.of_arm(arm)])
        return max(1, int((own >= 0).sum()))

    def replica_names(self, arm: str, trial: Trial) -> tuple[str, ...]:
        """The names of the arm's server processes in the trial, as trial.json has them; empty where it does not."""
        return _replica_names([trial.info], arm)

    def deaths(self, arm: str) -> list[Mapping[str, Any]]:
        """The replicas of the arm that died under load."""
        return [row for info in self.infos for row in _rows(info.get("deaths")) if row.get("arm") == arm]

    def silent(self, arm: str) -> list[str]:
        """The replicas of the arm that did not die and yet gave no last word after the traffic of a trial that ended.

        Only of trials that tell last words at all.
        """
        dead = {row.get("replica") for row in self.deaths(arm)}
        found = []
        for info in self.infos:
            if not info.get("complete") or not isinstance(info.get("final"), Mapping):
                continue
            for row in (row for row in _rows(info.get("arms")) if row.get("name") == arm and not self.external(arm)):
                replicas = row.get("replicas")
                for name in replicas if isinstance(replicas, list) else []:
                    if str(name) not in info["final"] and name not in dead:
                        found.append(str(name))
        return found

    def startups(self, arm: str) -> list[Mapping[str, Any]]:
        """What each trial says of the arm's start-up, empty where it says nothing."""
        return [mapping(mapping(info.get("startup")).get(arm)) for info in self.infos]

    def differences(self, arm: str) -> list[str]:
        """The keys of model and engine in which the arm differs from the control."""
        own, base = self.config(arm), self.config(self.control)
        different = []
        for part in ("model", "engine"):
            mine, theirs = mapping(own.get(part)), mapping(base.get(part))
            if mine and theirs:
                keys = sorted({*mine, *theirs})
                different += [f"{part}.{key}" for key in keys if not _alike(key, mine.get(key), theirs.get(key))]
        return different

    def parity(self, arm: str) -> Mapping[str, Any]:
        """What was measured of the arm's parity with the control before the first trial; empty if nothing was."""
        rows = _rows(mapping(self.records.parity).get("arms"))
        return next((row for row in rows if row.get("name") == arm), {})

    def answers(self, arm: str) -> list[Mapping[str, Any]]:
        """What each replica of the arm answered to the prompts that every arm got after the traffic, trial by trial,
        with the `dtype` that it was asked in; empty where none was asked. A trial that ended without answers that the
        experiment asks for has a row with an error."""
        experiment = self.records.experiment
        served = mapping(experiment.get("parity")).get("served") is True and not experiment.get("compare_models")
        found: list[Mapping[str, Any]] = []
        for info in self.infos:
            told = mapping(info.get("answers"))
            mine = [row for row in _rows(told.get("replicas")) if row.get("arm") == arm]
            if served and info.get("complete") and not mine:
                mine = [{"arm": arm, "replica": arm, "error": f"trial {info.get('trial')} holds no answers of it"}]
            counts = [{key: int(number(row.get(key)) or 0) for key in ("same", "of")} for row in mine]
            prompts = told.get("prompts")
            asked = {"dtype": told.get("dtype"), "prompts": prompts if isinstance(prompts, list) else []}
            names = [{"replica": name if isinstance(name := row.get("replica"), str) else None} for row in mine]
            found += [{**row, **name, **count, **asked} for row, name, count in zip(mine, names, counts, strict=True)]
        return found

    def serving_events(self, arm: str) -> list[CompileEvent]:
        """The arm's compile events while it served."""
        return [event for event in self.events if event.arm == arm and event.serving]

    def stall_s(self, arm: str) -> float:
        """Seconds that compiles held a replica of the arm, summed over replicas and trials."""
        total = 0.0
        events = self.serving_events(arm)
        for trial in self.trials:
            for replica in sorted({event.replica or "" for event in events if event.trial == trial.number}):
                total += windows_of(
                    (event.start_ns, event.end_ns)
                    for event in events
                    if event.trial == trial.number and (event.replica or "") == replica and event.stalls
                ).seconds
        return total

    def steps(self, arm: str) -> pa.Table | None:
        """The engine steps of the arm after the first request of their trial; None when none are recorded."""
        if self.records.steps is None:
            return None
        steps = self.records.steps.filter(pc.equal(self.records.steps.column("arm"), arm))
        first = {trial.number: trial.first_ns for trial in self.trials}
        starts = np.asarray(pc.fill_null(steps.column("start_ns"), 0).to_numpy(), dtype=np.int64)
        numbers = np.asarray(pc.fill_null(steps.column("trial"), 1).to_numpy(), dtype=np.int64)
        keep = np.zeros(steps.num_rows, dtype=np.bool_)
        for trial in np.unique(numbers).tolist():
            keep |= (numbers == trial) & (starts >= first.get(trial, 0))
        return steps.filter(pa.array(keep))

    def _told_of(self, arm: str) -> list[Mapping[str, Any]]:
        return [row for info in self.infos for row in _rows(info.get("arms")) if row.get("name") == arm]


# --- Cutting ----------------------------------------------------------------------------------------------------------


def _arms(records: RunRecords, requests: Requests) -> tuple[str, tuple[str, ...]]:
    """The control and all arms, control first, then in the order that the experiment names them."""
    told = _rows(records.experiment.get("arms"))
    names = [str(row["name"]) for row in told if "name" in row]
    for info in records.trials:
        names += [str(row["name"]) for row in _rows(info.get("arms")) if "name" in row]
    names = list(dict.fromkeys([*names, *requests.arms]))
    if not names:
        raise RecordError("the records name no arm and hold no request: give a run with requests")
    control = next((str(row["name"]) for row in told if row.get("control") is True and "name" in row), None)
    control = control or _first_of(records.trials, "control")
    control = control or next((name for name in ("control", "eager") if name in names), None)
    if control is None:
        raise RecordError(
            f"none of the arms {', '.join(names)} is the control: "
            "add [[arms]] with name and control = true to experiment.toml, or name one arm control"
        )
    return str(control), (str(control), *(name for name in names if name != control))


def _stalling_kinds(infos: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """The kinds of compile events that hold the device, as the first trial that knows says; None where none does."""
    told = _first_of(infos, "stalling_kinds")
    return frozenset(kind for kind in told if isinstance(kind, str)) if isinstance(told, list) else None


def _told_arms(records: RunRecords) -> set[str]:
    """The arms that the experiment or a trial names; empty where none does, so that the requests alone name them."""
    tables = [records.experiment.get("arms"), *(info.get("arms") for info in records.trials)]
    return {str(row["name"]) for table in tables for row in _rows(table) if "name" in row}


def _replica_names(infos: Iterable[Mapping[str, Any]], arm: str) -> tuple[str, ...]:
    rows = [row for info in infos for row in _rows(info.get("arms")) if row.get("name") == arm]
    names = [name for row in rows if isinstance(row.get("replicas"), list) for name in row["replicas"]]
    return tuple(dict.fromkeys(str(name) for name in names))


def _planned_ends(infos: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    ends = {}
    for info in infos:
        start, duration = number(info.get("start_ns")), _seconds(info.get("duration_s"))
        if start is not None and duration is not None:
            ends[int(info["trial"])] = int(info["start_ns"]) + int(duration * SECOND)
    return ends


def _trials(requests: Requests, infos: Sequence[Mapping[str, Any]], block_s: float) -> tuple[Trial, ...]:
    by_number = {int(info["trial"]): info for info in infos}
    trials: list[Trial] = []
    first_block = 0
    for trial in sorted({*by_number, *np.unique(requests.trial).tolist()}):
        info = by_number.get(trial, {})
        own = (requests.trial == trial) & ~requests.broken
        first, last = _range(requests.start_ns, own) if own.any() else (0, 0)
        told = number(info.get("start_ns"))
        start = int(info["start_ns"]) if told is not None and 0 < told <= first else first
        seen = (last - start) / 1e9 if own.any() else 0.0
        duration = _seconds(info.get("duration_s"))
        if duration is None:
            seconds = max(seen, 1e-9)
        else:
            seconds = duration if info.get("complete") else max(min(duration, seen), 1e-9)
            if own.any() and (info.get("loop") == "closed" or number(info.get("num_prompts"))):
                # It ends with its last answer, however long it was given.
                seconds = max(min(seconds, (_range(requests.end_ns, own)[1] - start) / 1e9), 1e-9)
        # A last block shorter than half a block joins the one before it.
        blocks = max(1, math.floor(seconds / block_s + 0.5))
        trials.append(
            Trial(
                number=trial,
                info=info,
                start_ns=start,
                first_ns=first,
                seconds=seconds,
                blocks=blocks,
                first_block=first_block,
            )
        )
        first_block += blocks
    return tuple(trials)


def _range(values: Ints, own: Bools) -> tuple[int, int]:
    """The least and the largest of one's own values, which are there."""
    return int(values.min(where=own, initial=_LAST_NS)), int(values.max(where=own, initial=-_LAST_NS))


def block_numbers(trials: Sequence[Trial], block_s: float, trial: Codes, at_ns: Ints) -> Codes:
    """The block of each moment of a trial; what lies past the trial's end is in its last block. Unknown trials: 0."""
    block = np.zeros(len(at_ns), dtype=np.int32)
    for part in parts(len(at_ns)):
        for item in trials:
            own = trial[part] == item.number
            since = at_ns[part][own] - item.start_ns
            since //= int(block_s * SECOND)
            block[part][own] = item.first_block + np.clip(since, 0, item.blocks - 1)
    return block


def _alike(key: str, one: Any, other: Any) -> bool:
    """Whether a setting is the same for two arms: cuda:0 and cuda:1 are devices of one kind, cpu and cuda are not."""
    if key == "device" and isinstance(one, str) and isinstance(other, str):
        return one.partition(":")[0] == other.partition(":")[0]
    return bool(one == other)


# --- Values that others wrote -----------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """The value where it is a finite number, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    # A whole number can be too large for any other kind.
    return float(value) if abs(value) < _LARGEST and math.isfinite(value) else None


def _seconds(value: Any) -> float | None:
    """The value where it is a time above 0 that a run could last, else None."""
    known = number(value)
    return known if known is not None and 0 < known < _LONGEST_S else None


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a table, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _table(experiment: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = experiment.get(key, {})
    if not isinstance(value, Mapping):
        raise RecordError(f"experiment.toml: {key} is {value!r}: give a table")
    return value


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _first_of(infos: Iterable[Mapping[str, Any]], key: str) -> Any:
    return next((info[key] for info in infos if info.get(key) is not None), None)
