"""The evidence in a run directory, read on from where the last question left it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from analysis.judging.alarms import Alarm, ServedCompile, burst_alarms, compile_alarms, death_alarms
from analysis.records.documents import content_of, read_toml
from analysis.records.plain_values import mapping, number, rows_of, table, text_of
from analysis.records.tables import RecordError
from analysis.records.weight_journal import WeightChange, read_weights
from analysis.settings.gate_limits import GateLimits
from analysis.settings.ramp_limits import RampLimits
from loadtests.page.tails import LinesTail, TableTail
from loadtests.provider.counts import COLUMNS, Counts
from loadtests.provider.judgement import Evidence
from loadtests.provider.question import Question
from servers.clock import now_ns
from servers.fields import ConfigError

_SECOND = 1_000_000_000
_SILENT_S = 15.0  # status.json is written each second
_LOOKS_MISSED = 4  # blocks without a look after which the last one says nothing of now
_LEAST_STALE_S = 60.0
_EVENT_COLUMNS = {"event_id", "trial", "arm", "replica", "kind", "start_ns", "end_ns", "shape", "phase"}
_MOST_NAMED = 20


class Observed:
    """The run in `folder`, or the newest of the runs in it, whose names begin with their time.

    A look older than `stale_s` is none; without it, one older than four blocks, and a minute. Not for several threads
    at once.
    """

    def __init__(self, folder: Path, *, stale_s: float | None = None, clock: Callable[[], int] = now_ns) -> None:
        self._folder = folder
        self._stale_s = stale_s
        self._clock = clock
        self._run: _Run | None = None

    def evidence(self, question: Question) -> Evidence:
        """What is known now of the arm that is asked about. ConfigError for an arm or a gate that the run has not."""
        run_dir = newest_run(self._folder)
        if run_dir is None:
            return Evidence(
                run="", arm=question.arm, limits=RampLimits(), unwatched=f"there is no run in {self._folder.name} yet"
            )
        if self._run is None or self._run.folder != run_dir:
            self._run = _Run(run_dir)
        return self._run.evidence(question, now_ns=self._clock(), stale_s=self._stale_s)


def newest_run(folder: Path) -> Path | None:
    """`folder` itself where it is a run directory, else the newest one in it; None where there is none."""
    if (folder / "experiment.toml").is_file():
        return folder
    with suppress(OSError):
        return max((path.parent for path in folder.glob("*/experiment.toml")), key=lambda path: path.name, default=None)
    return None


class _Run:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._experiment: Mapping[str, Any] = {}
        self._looks = LinesTail(folder / "interim.jsonl")
        self._look: Mapping[str, Any] | None = None
        self._tables: dict[Path, TableTail] = {}
        self._counts = Counts()
        self._status: Mapping[str, Any] = {}
        self._compiles: dict[tuple[str, int], dict[str, ServedCompile]] = defaultdict(dict)  # by arm and trial, and id

    def evidence(self, question: Question, *, now_ns: int, stale_s: float | None) -> Evidence:
        self._refresh(now_ns)
        try:
            limits = RampLimits.recorded(table(self._experiment, "ramp"))
            gates = GateLimits.recorded(table(self._experiment, "gates"))
        except RecordError as error:
            return Evidence(run=self.folder.name, arm=question.arm, limits=RampLimits(), unwatched=str(error))
        arm = self._arm(question, limits)
        self._check_gate(question, arm)
        weights = read_weights(self.folder)
        return Evidence(
            run=self.folder.name,
            arm=arm,
            limits=limits,
            unwatched=self._unwatched(now_ns),
            stale=self._stale(
                now_ns, max(_LEAST_STALE_S, _LOOKS_MISSED * gates.block_s) if stale_s is None else stale_s
            ),
            look=self._look,
            rolled_back=weights[-1].why if weights and weights[-1].action == "rollback" else "",
            alarms=self._alarms(arm, limits, gates, weights, question, now_ns),
            requests=self._counts.since(arm, now_ns - int(question.window_s * _SECOND))[0],
            ever=self._counts.ever(arm),
        )

    def _refresh(self, now_ns: int) -> None:
        if not self._experiment:
            with suppress(OSError, ValueError):
                self._experiment, _ = read_toml(self.folder / "experiment.toml")
        while rows := list(self._looks.new()):
            self._look = rows[-1]
        for tail in self._grown("requests*.arrow", COLUMNS):
            for batch in tail.batches():
                self._counts.add(batch)
        self._counts.forget(now_ns)
        for tail in self._grown("compile_events*.arrow", _EVENT_COLUMNS):
            for row in tail.new():
                self._compiled(row)
        self._status = content_of(self.folder / "status.json")
        for replica, state in mapping(self._status.get("replicas")).items():
            self._compiling(replica, mapping(mapping(state).get("compiling")))

    def _grown(self, pattern: str, columns: Any) -> Iterator[TableTail]:
        for path in sorted(self.folder.glob(f"trial-[0-9]*/{pattern}")):
            yield self._tables.setdefault(path, TableTail(path, columns))

    def _compiled(self, row: Mapping[str, Any]) -> None:
        start, end = number(row.get("start_ns")), number(row.get("end_ns"))
        if row.get("phase") != "serving" or start is None or end is None:
            return
        arm, trial = text_of(row, "arm"), int(number(row.get("trial")) or 1)
        event = ServedCompile(
            arm=arm,
            replica=text_of(row, "replica"),
            kind=text_of(row, "kind"),
            seconds=(row["end_ns"] - row["start_ns"]) / _SECOND,
            end_ns=row["end_ns"],
            shape=text_of(row, "shape"),
        )
        known = self._compiles[arm, trial]
        # A stream of telemetry that resumed repeats events.
        known.setdefault(text_of(row, "event_id", f"event {len(known)}"), event)

    def _compiling(self, replica: str, row: Mapping[str, Any]) -> None:
        """A compile under way, as far as status.json knows. It stays known until its event is in the files."""
        start_ns, at_ns = number(row.get("start_ns")), number(self._status.get("at_ns"))
        if start_ns is None or at_ns is None:
            return
        arm, trial = text_of(row, "arm"), int(number(self._status.get("trial")) or 1)
        self._compiles[arm, trial][f"{replica} {start_ns}"] = ServedCompile(
            arm=arm,
            replica=replica,
            kind=text_of(row, "kind"),
            seconds=(at_ns - start_ns) / _SECOND,
            end_ns=int(at_ns),
            shape=text_of(row, "shape"),
            over=False,
        )

    def _alarms(
        self,
        arm: str,
        limits: RampLimits,
        gates: GateLimits,
        weights: tuple[WeightChange, ...],
        question: Question,
        now_ns: int,
    ) -> list[Alarm]:
        found: list[Alarm] = []
        for (name, _), events in list(self._compiles.items()):
            if name == arm:
                found += compile_alarms(
                    arm,
                    sorted(events.values(), key=lambda event: event.end_ns),
                    stall_limit_s=limits.stall_limit_s,
                    max_recompiles=gates.max_recompiles,
                )
        for path in sorted(self.folder.glob("trial-[0-9]*/trial.json")):
            found += death_alarms(arm, rows_of(content_of(path).get("deaths")), now_ns=now_ns)
        since_ns = max(now_ns - int(question.window_s * _SECOND), weights[-1].at_ns if weights else 0)
        finished, failed = self._counts.since(arm, since_ns)
        ago_s = max(0.0, (now_ns - since_ns) / _SECOND)
        found += burst_alarms(
            arm, failed=failed, finished=finished, now_ns=now_ns, meanwhile=f"in the last {ago_s:.0f} s"
        )
        return sorted(found)

    def _unwatched(self, now_ns: int) -> str:
        status = self._status
        if status.get("ended") is not None or (self.folder / "summary.json").exists():
            return f"run {self.folder.name} has ended: nobody watches any more"
        at_ns = number(status.get("at_ns"))
        if at_ns is None:
            return f"run {self.folder.name} has no status.json: nothing shows that it goes on"
        silent_s = (now_ns - at_ns) / _SECOND
        return f"run {self.folder.name} has said nothing for {silent_s:.0f} s" if silent_s > _SILENT_S else ""

    def _stale(self, now_ns: int, limit_s: float) -> str:
        at_ns = number(mapping(self._look).get("at_ns"))
        if at_ns is None:
            return "there was no look at it yet: the first comes after a block (traffic.block_s) of requests"
        age_s = (now_ns - at_ns) / _SECOND
        return f"the last look is {age_s:.0f} s old, and counts for {limit_s:g} s" if age_s > limit_s else ""

    def _arm(self, question: Question, limits: RampLimits) -> str:
        names = [text_of(row, "name") for row in rows_of(self._experiment.get("arms")) if not row.get("control")]
        if question.arm:
            if question.arm not in names:
                raise ConfigError(f'arm "{question.arm}" is no candidate of {self.folder.name}: give {_listed(names)}')
            return question.arm
        if limits.candidate in names:
            return limits.candidate
        if len(names) != 1:
            raise ConfigError(f"{self.folder.name} has {len(names)} candidates: give arm={_listed(names)}")
        return names[0]

    def _check_gate(self, question: Question, arm: str) -> None:
        rows = rows_of(mapping(self._look).get("gates"))
        names = [text_of(row, "gate") for row in rows if row.get("arm") == arm]
        if question.gate and names and question.gate not in names:
            raise ConfigError(f'gate "{question.gate}" is not in the last look: give {_listed(names)}')


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) or "one once the experiment has some"
