"""A release: what is kept of one run so that later ones can be compared with it.

A few kilobytes of JSON: the figures of each trial, the references of the machine, and the conditions that a comparison
rests on. No request is in it.
"""

from __future__ import annotations

import datetime
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from analysis.judging.judgement import judge
from analysis.judging.validity import LENGTH_CHECKS, UNKNOWN_STALLS, Check
from analysis.records.documents import read_document, write_document
from analysis.records.plain_values import mapping, number, table
from analysis.records.run_list import joins_runs
from analysis.records.run_records import read_run, table_files
from analysis.records.schemas import RUN_HOST
from analysis.records.tables import RecordError
from analysis.releases.machine import typical
from analysis.releases.run_figures import ArmFigures, arm_figures, tells_compiles
from analysis.results.file import name_of, part_of
from analysis.results.run_directory import write_run
from analysis.run.logged_compiles import with_lengths
from analysis.run.luck import searches_kernels
from analysis.run.placement import devices_of
from analysis.run.references import references_of
from analysis.run.run import Run, stalling_kinds
from analysis.run.spikes import RECOMPILE_KINDS
from analysis.run.startup import startup_row
from analysis.run.trials import SECOND
from analysis.run.work import ANSWER_BINS, AnswerLengths, answer_lengths
from analysis.settings.release_limits import ReleaseLimits
from analysis.statistics.unpaired import Luck

RECORD = "tailgate release"
RECORD_SCHEMA = 1
RESULT_ARM = "server"  # what the arm of another tool's result is called
_LAST_NS = 9.2e18  # beyond any clock
_MOST_ANSWERS = 1e9

# Checks that leave the figures of one arm true: they compare arms of one run, or say that load was too much or that the
# arm really stalled.
_BETWEEN_ARMS = frozenset(
    {
        *("interference", "pairs", "lag apart", "equal work", "comparable", "sample ratio", "arms", "control errors"),
        *("block autocorrelation", "alive", "overload", "answers", "step counts", "bed apart"),
        UNKNOWN_STALLS,
    }
)
# Checks on the machine's speed. What changes from trial to trial is in their scatter; what lasts, in the references.
_OF_SPEED = frozenset({"bed drift", "slow bed"})
# The check on what was reported of compiles. Latencies are what clients saw, whatever was reported.
_OF_COMPILES = frozenset({"compile events"})
# Settings of the traffic that say how it is sent, and not what.
_OF_SENDING = frozenset({"workers", "remote_workers", "master_bind", "block_s"})
_FILES = frozenset({"trace", "conversations", "tokenizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseArm:
    """One arm of a release."""

    figures: ArmFigures
    config: Mapping[str, Any]  # preset, replicas, model, shapes, compile, engine; what an external server is
    references: Mapping[str, float]  # typical speed of its device and host
    cache: Mapping[str, float]  # starts' compiles by state of the compile cache
    doubts: tuple[str, ...] = ()  # checks of its run that leave what it did under the traffic open
    compile_doubts: tuple[str, ...] = ()  # and those that leave its compiles open
    answers: AnswerLengths | None = None  # None where they have no tokens, or the server does not count them
    unknown_kinds: tuple[str, ...] = ()  # of compiles, which the version of tailgate that recorded it did not know

    def start_spread(self, limits: ReleaseLimits) -> float:
        """The standard deviation of log latency over starts that is taken for granted of the arm."""
        on_cpu = mapping(self.config.get("model")).get("device") == "cpu"
        tuning = limits.tuning_spread if searches_kernels(self.config) and not on_cpu else 0.0
        return math.hypot(limits.restart_spread, tuning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is kept of one run."""

    name: str
    run_id: str
    created_ns: int  # the first request
    trials: int
    conditions: Mapping[str, Any]  # what must be alike: traffic, objectives, pressure
    environment: Mapping[str, Any]  # what may differ, and is said
    arms: Mapping[str, ReleaseArm]
    seed: int | None = (
        None  # with the moments its trials started at, what tells it from other runs; None in old records
    )
    starts_ns: tuple[int, ...] = ()

    def is_same_run(self, other: Release) -> bool:
        """Whether both hold a trial of one run, whatever its directory is called."""
        if self.seed is None or other.seed is None or not self.starts_ns or not other.starts_ns:
            return (self.run_id, self.created_ns) == (other.run_id, other.created_ns)
        return self.seed == other.seed and not set(self.starts_ns).isdisjoint(other.starts_ns)

    def ran_beside(self, other: Release) -> bool:
        """Whether both ran at one time, on what may be one machine."""
        if not self.starts_ns or not other.starts_ns:
            return False
        apart = self.machine and other.machine and self.machine != other.machine
        return not apart and self.starts_ns[0] <= other._end_ns and other.starts_ns[0] <= self._end_ns

    @property
    def _end_ns(self) -> int:
        """About when the traffic of its last trial ended."""
        listed = self.conditions.get("duration_s")
        seconds = [number(item) or 0.0 for item in listed] if isinstance(listed, list) else []
        return self.starts_ns[-1] + round(max(seconds, default=0.0) * SECOND)

    @property
    def machine(self) -> str | None:
        """The identity of the machine; None where it is unknown."""
        named = self.environment.get("machine")
        return named if isinstance(named, str) and named else None

    @property
    def created(self) -> str | None:
        """When its first request started, in UTC."""
        moment = datetime.datetime.fromtimestamp(self.created_ns // SECOND, tz=datetime.UTC)
        return moment.isoformat() if self.created_ns > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "kind": RECORD,
            "schema": RECORD_SCHEMA,
            "name": self.name,
            "run_id": self.run_id,
            "created_ns": self.created_ns,
            "trials": self.trials,
            "conditions": self.conditions,
            "environment": self.environment,
            "arms": {name: _arm_table(arm) for name, arm in self.arms.items()},
            "seed": self.seed,
            "starts_ns": list(self.starts_ns),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Release:
        """The release that `to_dict` wrote. RecordError for anything else."""
        if content.get("kind") != RECORD:
            raise RecordError("it is no record of a release: give one that `tailgate compare --accept` wrote")
        if content.get("schema") != RECORD_SCHEMA:
            raise RecordError(
                f"it has schema {content.get('schema')}; this tailgate reads {RECORD_SCHEMA}: record the run again"
            )
        starts = content.get("starts_ns")
        created, trials = number(content.get("created_ns")), number(content.get("trials"))
        if created is None or not 0 <= created < _LAST_NS:
            raise RecordError(f"its time {content.get('created_ns')!r} is none: record the run again")
        return cls(
            name=str(content.get("name")),
            run_id=str(content.get("run_id")),
            created_ns=int(created),
            trials=int(trials or 0),
            conditions=mapping(content.get("conditions")),
            environment=mapping(content.get("environment")),
            arms={str(name): _arm_of(mapping(row)) for name, row in mapping(content.get("arms")).items()},
            seed=seed if isinstance(seed := content.get("seed"), int) else None,
            starts_ns=tuple(item for item in starts if isinstance(item, int)) if isinstance(starts, list) else (),
        )


def _arm_table(arm: ReleaseArm) -> dict[str, Any]:
    return {
        "figures": {
            key: [[trial, value, luck.spread, _finite(luck.degrees)] for trial, (value, luck) in trials.items()]
            for key, trials in arm.figures.values.items()
        },
        "sources": dict(arm.figures.sources),
        "config": arm.config,
        "references": dict(arm.references),
        "cache": dict(arm.cache),
        "doubts": list(arm.doubts),
        "compile_doubts": list(arm.compile_doubts),
        "answers": asdict(arm.answers) if arm.answers is not None else None,
        "unknown_kinds": list(arm.unknown_kinds),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _arm_of(row: Mapping[str, Any]) -> ReleaseArm:
    values: dict[str, dict[int, tuple[float, Luck]]] = {}
    for key, trials in mapping(row.get("figures")).items():
        for entry in trials if isinstance(trials, list) else []:
            if not isinstance(entry, list) or len(entry) != 4:
                raise RecordError(f"its figure {key} is damaged: record the run again")
            trial, value, spread, degrees = (number(item) for item in entry)
            if trial is None or value is None or (degrees is not None and degrees <= 0):
                raise RecordError(f"its figure {key} is damaged: record the run again")
            luck = Luck(spread=spread, degrees=math.inf if degrees is None else degrees)
            values.setdefault(str(key), {})[int(trial)] = (value, luck)
    return ReleaseArm(
        figures=ArmFigures(
            values=values, sources={str(key): str(value) for key, value in mapping(row.get("sources")).items()}
        ),
        config=mapping(row.get("config")),
        references=_numbers(row.get("references")),
        cache=_numbers(row.get("cache")),
        doubts=_texts(row.get("doubts")),
        compile_doubts=_texts(row.get("compile_doubts")),
        answers=_answers_of(mapping(row.get("answers"))),
        unknown_kinds=_texts(row.get("unknown_kinds")),
    )


def _answers_of(row: Mapping[str, Any]) -> AnswerLengths | None:
    if not row:
        return None
    count, mean, variance = (number(row.get(key)) for key in ("count", "mean", "variance"))
    up_to, near = (
        tuple(int(number(item) or 0) for item in rows) if isinstance(rows := row.get(key), list) else ()
        for key in ("up_to", "near")
    )
    bins = [(0, *own, count or 0) for own in (up_to, near)]
    whole = all(len(own) == ANSWER_BINS + 2 and list(own) == sorted(own) for own in bins)
    if not whole or not count or count > _MOST_ANSWERS or mean is None or variance is None:
        raise RecordError("its lengths of answers are damaged: record the run again")
    return AnswerLengths(count=int(count), mean=mean, variance=max(0.0, variance), up_to=up_to, near=near)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _numbers(value: Any) -> dict[str, float]:
    known = {str(key): number(item) for key, item in mapping(value).items()}
    return {key: item for key, item in known.items() if item is not None}


# --- Files ------------------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    if not path.is_dir():
        return False
    return (path / "experiment.toml").exists() or any(path.glob("trial-*/")) or bool(table_files(path, "requests"))


def read_release(path: Path) -> Release:
    """The release of the run directory, the record or another tool's result at `path`. RecordError where it is none."""
    if joins_runs(path):
        raise RecordError(f"{path} joins runs, which had days of their own: give one of them")
    if is_run(path):
        return release_of(path)
    file, part = part_of(path)
    if part is not None and file.is_file():
        return _release_of_result(path)
    document = read_document(path) if path.is_file() else None
    if document is not None and not document.stated and (document.content or {}).get("kind") != RECORD:
        return _release_of_result(path)
    if document is None or document.content is None:
        what = f"{path} {document.problem}" if document is not None else f"{path} is no run directory and no record"
        raise RecordError(f"{what}: give a directory that `tailgate run` wrote, or a record of one")
    if not document.stated:
        raise RecordError(f"{path} has no checksum, so tailgate did not write it: record the run again with --accept")
    try:
        return Release.from_dict(document.content)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def _release_of_result(path: Path) -> Release:
    """What is kept of the run whose requests another tool wrote into the file: of one arm, called `server`."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / name_of(path)
        write_run(run_dir, [(RESULT_ARM, path)])
        return release_of(run_dir)


def write_release(release: Release, path: Path) -> None:
    """`path` holds the release with a checksum, whole or not at all."""
    write_document(path, release.to_dict(), indent=1)


def release_of(run_dir: Path) -> Release:
    """What is kept of the run in `run_dir`, by its records as they are. RecordError when there is nothing to judge."""
    run = with_lengths(Run.of(read_run(run_dir)))
    checks = judge(run).checks
    doubts = _doubts(checks)
    # A server that died compiled no more: few recompiles are no praise.
    died = {check.arm or run.control for check in checks if check.check == "alive" and not check.ok}
    environment = run.records.environment
    machines = {item.documents.machine for item in run.records.runs}
    known = stalling_kinds(run.infos)
    unknown = () if known is None else tuple(sorted(RECOMPILE_KINDS - known))
    return Release(
        name=run.name,
        run_id=run.run_id,
        created_ns=min((trial.first_ns for trial in run.trials if trial.first_ns > 0), default=0) // SECOND * SECOND,
        trials=len(run.trials),
        conditions=_conditions(run),
        environment={
            "machine": (machines.pop() or None) if len(machines) == 1 else None,
            "cpu": mapping(environment.get("cpu")).get("model"),
            "cpus": mapping(environment.get("cpu")).get("usable"),
            "gpus": environment.get("gpus"),
            "platform": environment.get("platform"),
            "python": environment.get("python"),
            "git_commit": environment.get("git_commit"),
            "versions": dict(mapping(environment.get("versions"))),
        },
        arms={
            arm: ReleaseArm(
                figures=arm_figures(run, arm),
                config=_config(run, arm),
                references=_references(run, arm),
                cache=_numbers(startup_row(run, arm)["cache"]),
                doubts=_names(doubts, arm),
                compile_doubts=(*_compile_names(doubts, run, arm), *(("alive",) if arm in died else ())),
                answers=answer_lengths(run, arm),
                unknown_kinds=unknown,
            )
            for arm in run.arms
        },
        seed=run.seed,
        starts_ns=tuple(sorted(trial.first_ns for trial in run.trials if trial.first_ns > 0)),
    )


def _doubts(checks: Sequence[Check]) -> list[Check]:
    """The checks of the run that failed and leave figures of one arm open."""
    skipped = LENGTH_CHECKS | _BETWEEN_ARMS | _OF_SPEED
    kinds = {"slo", "noninferiority", "recompile"}
    return [check for check in checks if not check.ok and kinds & set(check.affects) and check.check not in skipped]


def _names(doubts: Sequence[Check], arm: str) -> tuple[str, ...]:
    """What leaves open what the arm did under the traffic."""
    names = [check.check for check in doubts if check.arm in (None, arm)]
    return tuple(dict.fromkeys(name for name in names if name not in _OF_COMPILES))


def _compile_names(doubts: Sequence[Check], run: Run, arm: str) -> tuple[str, ...]:
    """What leaves open how often the arm compiled: also records that are cut off, and trials that tell nothing."""
    own = [check for check in doubts if check.arm in (None, arm)]
    names = [check.check for check in own if check.check in _OF_COMPILES or "recompile" in check.affects]
    told = [tells_compiles(run, arm, trial) for trial in run.trials]
    return tuple(dict.fromkeys((*names, *(("compile events of each trial",) if any(told) and not all(told) else ()))))


def _references(run: Run, arm: str) -> dict[str, float]:
    """The typical references of the device that the arm had in each trial; all of the trial's, where none is named.

    Those of another card say nothing of the arm's. Empty for a server of somebody else: those of the run are of another
    machine.
    """
    if run.account(arm).external:
        return {}
    taken = [row for row in references_of(run.trials) if row.host == RUN_HOST and row.error is None]
    rows: list[Mapping[str, float]] = []
    for trial in run.trials:
        known = [row for row in taken if row.trial == trial.number]
        device = devices_of(trial).get(arm)
        rows += [row.figures for row in known if device is None or row.device == device]
    return typical(rows)


def _conditions(run: Run) -> dict[str, Any]:
    experiment = run.records.experiment
    traffic = {key: value for key, value in table(experiment, "traffic").items() if key not in _OF_SENDING}
    traffic |= {key: PurePath(str(traffic[key])).name for key in _FILES & traffic.keys()}
    traffic.setdefault("design", run.design)
    durations = sorted({seconds for info in run.infos if (seconds := number(info.get("duration_s"))) is not None})
    return {
        "traffic": traffic,
        "duration_s": durations,
        "slo": sorted(target.text for target in run.targets),
        "goodput": _settings(table(experiment, "goodput")),
        "pressure": _settings(table(experiment, "pressure")),
        "compile_cache": table(experiment, "trials").get("compile_cache"),
    }


def _settings(values: Mapping[str, Any]) -> list[str]:
    """The settings that are not off: "ttft = 200"."""
    return sorted(f"{key} = {value}" for key, value in values.items() if value)


def _config(run: Run, arm: str) -> dict[str, Any]:
    account = run.account(arm)
    replicas = run.replicas(arm)
    if account.external:
        return {**{key: account.external.get(key) for key in ("kind", "model_name")}, "replicas": replicas}
    config = account.config
    model = {key: value for key, value in mapping(config.get("model")).items() if key not in ("device", "seed")}
    # A second card of a host is the same kind of device; "auto" is what it was found to be.
    found = next((had[arm] for trial in run.trials if arm in (had := devices_of(trial))), None)
    device = str(found or mapping(config.get("model")).get("device") or "").split(":")[0]
    return {
        "preset": config.get("preset"),
        "replicas": replicas,
        "model": {**model, **({"device": device} if device else {})},
        **{part: dict(mapping(config.get(part))) for part in ("shapes", "compile", "engine")},
    }
