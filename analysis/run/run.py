"""A run as it is judged: its records cut into arms, trials and blocks, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.arrays import Bools, Ints, by_trial
from tailgate.analysis.records.documents import EDITED
from tailgate.analysis.records.placing import Unplaced, misplaced_requests, place_events
from tailgate.analysis.records.plain_values import first_of, mapping, number, rows_of, table
from tailgate.analysis.records.plain_values import seconds as seconds_of
from tailgate.analysis.records.request_columns import ColumnBuilder, slim
from tailgate.analysis.records.requests import Requests, requests_of
from tailgate.analysis.records.run_records import MIRRORED, RunRecords, design_of
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.run.arm_account import ArmAccount, replica_names
from tailgate.analysis.run.attribution import Attribution, attribute
from tailgate.analysis.run.compile_events import CompileEvent, compile_events, stall_windows
from tailgate.analysis.run.trials import SECOND, Machines, Trial, planned_ends, trials_of
from tailgate.analysis.settings.gate_limits import GateLimits, usual_for
from tailgate.analysis.settings.metrics import EMBED, EMBED_METRICS, JUDGED_METRICS, task_of
from tailgate.analysis.settings.slo_targets import SloTarget, parse_slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records cut into arms, trials and blocks."""

    records: RunRecords
    seed: int
    limits: GateLimits
    targets: tuple[SloTarget, ...]
    design: str
    block_s: float  # of a block as it is judged: with arms that take turns, of one that holds a turn of each
    control: str
    arms: tuple[str, ...]  # the control first
    requests: Requests
    unjudged: Requests | None  # of arms that only show whether their host stalled
    events: tuple[CompileEvent, ...]
    unplaced_events: tuple[Unplaced, ...]  # compile events that belong nowhere, and are not in `events`
    unplaced_requests: tuple[str, ...]  # in words
    attribution: Attribution
    trials: tuple[Trial, ...]
    machines: Machines
    cold: Bools
    usable: Bools  # measured and with times in order

    @classmethod
    def of(cls, records: RunRecords) -> Run:
        """Make the run of `records`.

        Raises RecordError if no arm can be the control, or if a setting of the judgement is unusable.
        """
        experiment = records.experiment
        limits = GateLimits.recorded({**usual_for(task_of(experiment)), **table(experiment, "gates")})
        infos = records.trials
        design = design_of(experiment, infos)
        block_s = seconds_of(first_of(infos, "block_s")) or limits.block_s
        timeout_s = number(table(experiment, "traffic").get("timeout_s"))
        numbers = {int(info["trial"]) for info in infos}
        unplaced_requests = misplaced_requests(records.requests, arms=_named_arms(records), trials=numbers)
        derived = partial(
            requests_of,
            deadline_ms=timeout_s * 1e3 if timeout_s else None,
            ends_ns=planned_ends(infos),
            cut_short={int(info["trial"]) for info in infos if not info.get("complete")},
            tokens=task_of(experiment) != EMBED,
        )
        requests, unjudged = derived(records.requests), derived(records.unjudged) if records.unjudged else None
        # What is judged of the columns is in `requests`: memory need not hold the rest.
        records = replace(records, requests=ColumnBuilder().columns(), unjudged=None)
        control, arms = _arms(records, requests)
        placed, unplaced_events = place_events(
            records.events,
            requests,
            arms=arms,
            trials=numbers.union(np.unique(requests.trial).tolist()),
            replicas={arm: names for arm in arms if (names := replica_names(infos, arm))},
        )
        events = compile_events(placed, requests)
        # Arms that take turns meet only in a block that holds a turn of each.
        width_s = block_s * len(arms) if design == "switchback" else block_s
        trials = trials_of(requests, infos, width_s, whole=limits.sequential)
        cold, first_ns = np.zeros(len(requests), dtype=np.bool_), {trial.number: trial.first_ns for trial in trials}
        for part, trial, own in by_trial(requests.trial):
            cold[part] |= own & (requests.start_ns[part] < first_ns[trial] + int(limits.cold_s * SECOND))
        seed = experiment.get("seed")
        return cls(
            records=records,
            seed=abs(seed) if isinstance(seed, int) else 0,
            limits=limits,
            targets=parse_slo(table(experiment, "slo")),
            design=design,
            block_s=width_s,
            control=control,
            arms=arms,
            requests=requests,
            unjudged=unjudged,
            events=events,
            unplaced_events=unplaced_events,
            unplaced_requests=unplaced_requests,
            attribution=attribute(requests, events),
            trials=trials,
            machines=Machines.of(records.runs),
            cold=slim(cold),
            usable=slim(requests.measured & ~requests.broken),
        )

    def rng(self, *place: int) -> np.random.Generator:
        """Return a separate generator for each place, so that one arm more does not change the others' numbers."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=place))

    @property
    def embeds(self) -> bool:
        """Whether the arms were asked for vectors, so that requests have an end and no tokens."""
        return task_of(self.records.experiment) == EMBED

    @property
    def metrics(self) -> tuple[str, ...]:
        """The latencies that the run's requests have."""
        return EMBED_METRICS if self.embeds else JUDGED_METRICS

    @property
    def treatments(self) -> tuple[str, ...]:
        """The arms that are judged against the control."""
        return self.arms[1:]

    @property
    def seconds(self) -> float:
        """How long all trials lasted together."""
        return sum(trial.seconds for trial in self.trials)

    @property
    def copied(self) -> bool:
        """Whether each request went to every arm at once."""
        return self.design == MIRRORED

    @property
    def separate(self) -> bool:
        """Whether each arm had runs by itself, so that the arms share no time."""
        return self.design == "separate"

    @property
    def blocks(self) -> int:
        """Time blocks of all trials together."""
        return sum(trial.blocks for trial in self.trials)

    @property
    def infos(self) -> list[Mapping[str, Any]]:
        """The trial.json of each trial, empty where there is none."""
        return [trial.info for trial in self.trials]

    @property
    def reported_open_loop(self) -> bool | None:
        """Whether the load did not wait for the servers in any trial, as those that know say."""
        known = [info["open_loop"] for info in self.infos if isinstance(info.get("open_loop"), bool)]
        return all(known) if known else None

    @property
    def is_production(self) -> bool:
        """Whether the requests are production traffic, and none was generated."""
        return table(self.records.experiment, "traffic").get("arrivals") == "users"

    @property
    def pace(self) -> str:
        """How another tool sent its requests and what latency counts from, as trials say; empty for our own load."""
        return " ".join(dict.fromkeys(str(info["pace"]) for info in self.infos if info.get("pace")))

    @property
    def concurrency(self) -> int | None:
        """Requests that a closed loop or a limit kept under way to each arm; None where there was no such number."""
        limit = number(first_of(self.infos, "max_concurrency"))
        return int(limit) if limit else None

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
        """The splitter's weight of each arm in the experiment."""
        rows = rows_of(self.records.experiment.get("arms"))
        return {str(row["name"]): number(row.get("weight")) or 0.0 for row in rows if "name" in row}

    def rate(self, count: int, arm: str | None = None) -> float:
        """Return `count` per second of the run; for an arm, of its own trials."""
        seconds = self.seconds if arm is None else sum(trial.seconds for trial in self.trials_of(arm))
        return count / seconds if seconds > 0 else 0.0

    def offset_s(self, trial: int, at_ns: int) -> float | None:
        """Return the seconds from the start of the trial to `at_ns`."""
        start = next((item.start_ns for item in self.trials if item.number == trial), 0)
        return (at_ns - start) / 1e9 if start else None

    def of_arm(self, name: str) -> Bools:
        """Mask the requests that went to the arm, shape (requests,)."""
        return self.requests.of_arm(name)

    def answered(self, arm: str) -> Bools:
        """Mask the arm's completed answers that are judged, shape (requests,)."""
        return np.asarray(self.of_arm(arm) & self.usable & self.requests.ok)

    def steady(self, mask: Bools, arms: Sequence[str]) -> Bools:
        """Mask the requests in `mask` past the cold start that no compile delayed and that were not in flight while one
        of `arms` compiled, shape (requests,)."""
        kept = mask & ~self.cold & ~self.attribution.hit
        for trial in self.trials:
            stalls = [stall_windows(self.events, arm=arm, trial=trial.number) for arm in arms]
            for windows in (windows for windows in stalls if windows.start_ns.size):
                rows = self.requests.rows(kept, trial.number)
                kept[rows[windows.touch(self.requests.start_ns[rows], self.requests.end_ns[rows])]] = False
        return np.asarray(kept)

    def block_of(self, rows: Ints, at_ns: Ints | None = None, *, segments: int = 1) -> Ints:
        """Return the block of each of `rows`, or its segment of `segments` to a block, unique over trials.

        It is the block in which the request was due, or that of the moment `at_ns`. A moment past the end of its trial
        is in the trial's last block.
        """
        block, trials = np.zeros(len(rows), dtype=np.int32), {trial.number: trial for trial in self.trials}
        for part, place, own in by_trial(self.requests.trial[rows]):
            trial, mine = trials[place], rows[part][own]
            since = (self.requests.start_ns[mine] if at_ns is None else at_ns[part][own]) - trial.start_ns
            since //= int(self.block_s * SECOND / segments)
            block[part][own] = trial.first_block * segments + np.clip(since, 0, trial.blocks * segments - 1)
        return block

    def sessions(self, arm: str, rows: Bools | None = None) -> int:
        """Count the arm's sessions, since the splitter places sessions; a request without one counts as one. With
        `rows`, only those that have a request among them."""
        own = self.of_arm(arm) if rows is None else self.of_arm(arm) & rows
        session, trial = self.requests.session[own], self.requests.trial[own]
        known = session > 0
        found = (np.unique(session[known & (trial == number)]).size for number in np.unique(trial).tolist())
        return sum(found) + int((~known).sum())

    def account(self, arm: str) -> ArmAccount:
        """Return the arm's account in the experiment and the trials."""
        return ArmAccount(
            arm=arm,
            experiment=self.records.experiment,
            infos=self.infos,
            measured_parity=self.records.parity,
            asked={int(row["trial"]): row for row in self.records.answers if row.get("arm") == arm},
            named=self.trial_name,
        )

    def trial_name(self, number: int) -> str:
        """Return what a reader calls the trial: "trial 2"."""
        return self.records.trial_names.get(number, f"trial {number}")

    def trials_of(self, arm: str) -> tuple[Trial, ...]:
        """Return the trials that the arm was part of."""
        return tuple(trial for trial in self.trials if trial.has(arm))

    @property
    def in_turn(self) -> bool:
        """Whether some trial had only some of the arms, so that they did not get the same requests."""
        return any(len(self.trials_of(arm)) < len(self.trials) for arm in self.arms)

    @property
    def ended_arms(self) -> frozenset[str]:
        """The arms that got no more from some instant of a trial on, while others did."""
        return frozenset(str(arm) for info in self.infos for arm in mapping(info.get("ended_arms")))

    def replicas(self, arm: str) -> int:
        """Count the arm's server processes by the trials, else by the requests; at least 1."""
        for row in self.account(arm).rows:
            if isinstance(row.get("replicas"), list):
                return max(1, len(row["replicas"]))
        own = np.unique(self.requests.replica[self.of_arm(arm)])
        return max(1, int((own >= 0).sum()))

    def quantisation_difference(self, arm: str) -> str:
        """Describe a difference in quantisation from the control: "int8-weight-only (control: none)"; else empty."""
        own, base = (
            mapping(self.account(name).config.get("model")).get("quantisation") or "none"
            for name in (arm, self.control)
        )
        return "" if own == base else f"{own} (control: {base})"

    def steps(self, arm: str) -> pa.Table | None:
        """Return the arm's engine steps after the first request of their trial; None if none are recorded."""
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


def _arms(records: RunRecords, requests: Requests) -> tuple[str, tuple[str, ...]]:
    """Return the control and all arms, control first, then in the experiment's order."""
    names = tuple(dict.fromkeys((*_named_arms(records), *requests.arms)))
    if not names:
        raise RecordError("the records name no arm and hold no request: give a run with requests")
    rows = rows_of(records.experiment.get("arms"))
    control = next((str(row["name"]) for row in rows if row.get("control") is True and "name" in row), None)
    control = control or next((name for name in ("control", "eager") if name in names), None)
    if control is None:
        where = "add to experiment.toml"
        if not records.experiment:
            where = f"{records.directory} lacks the file experiment.toml: put it back, or write one with"
        raise RecordError(
            f"none of the arms {', '.join(names)} is the control: {where} the lines [[arms]], "
            f'name = "{names[0]}", control = true, and as the last line {EDITED}'
        )
    return str(control), (str(control), *(name for name in names if name != control))


def _named_arms(records: RunRecords) -> tuple[str, ...]:
    """Return the arms that the experiment and the trials name, in their order."""
    tables = [records.experiment.get("arms"), *(info.get("arms") for info in records.trials)]
    return tuple(dict.fromkeys(str(row["name"]) for table in tables for row in rows_of(table) if "name" in row))
