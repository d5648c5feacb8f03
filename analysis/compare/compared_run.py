"""One of the two runs that `tailgate compare` judges: the figures of each trial, the references of its machine, and the
conditions that a comparison rests on.
"""

from __future__ import annotations

import datetime
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from analysis.compare.machine import typical
from analysis.compare.run_figures import ArmFigures, arm_figures, tells_compiles
from analysis.judging.judgement import judge
from analysis.judging.validity import LENGTH_CHECKS, UNKNOWN_STALLS, Check
from analysis.records.plain_values import mapping, number, table
from analysis.records.run_list import joins_runs
from analysis.records.run_records import read_run, table_files
from analysis.records.schemas import RUN_HOST
from analysis.records.tables import RecordError
from analysis.results.file import name_of, part_of
from analysis.results.run_directory import write_run
from analysis.run.client_stalls import with_lengths
from analysis.run.luck import searches_kernels
from analysis.run.placement import devices_of
from analysis.run.references import references_of
from analysis.run.run import Run
from analysis.run.startup import startup_row
from analysis.run.trials import SECOND
from analysis.run.work import AnswerLengths, answer_lengths
from analysis.settings.compare_limits import CompareLimits

RESULT_ARM = "server"  # what the arm of another tool's result is called

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
class ComparedArm:
    """One arm of a run."""

    figures: ArmFigures
    config: Mapping[str, Any]  # preset, replicas, model, shapes, compile, engine; what an external server is
    references: Mapping[str, float]  # typical speed of its device and host
    cache: Mapping[str, float]  # starts' compiles by state of the compile cache
    doubts: tuple[str, ...] = ()  # checks of its run that leave what it did under the traffic open
    compile_doubts: tuple[str, ...] = ()  # and those that leave its compiles open
    answers: AnswerLengths | None = None  # None where they have no tokens, or the server does not count them

    def start_spread(self, limits: CompareLimits) -> float:
        """The standard deviation of log latency over starts that is taken for granted of the arm."""
        on_cpu = mapping(self.config.get("model")).get("device") == "cpu"
        tuning = limits.tuning_spread if searches_kernels(self.config) and not on_cpu else 0.0
        return math.hypot(limits.restart_spread, tuning)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """What a comparison reads of one run."""

    name: str
    run_id: str
    created_ns: int  # the first request
    trials: int
    conditions: Mapping[str, Any]  # what must be alike: traffic, objectives, pressure
    environment: Mapping[str, Any]  # what may differ, and is said
    arms: Mapping[str, ComparedArm]
    seed: int
    starts_ns: tuple[int, ...]  # when each trial started

    def is_same_run(self, other: ComparedRun) -> bool:
        """Whether both hold a trial of one run, whatever its directory is called."""
        if not self.starts_ns or not other.starts_ns:
            return (self.run_id, self.created_ns) == (other.run_id, other.created_ns)
        return self.seed == other.seed and not set(self.starts_ns).isdisjoint(other.starts_ns)

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


def _numbers(value: Any) -> dict[str, float]:
    known = {str(key): number(item) for key, item in mapping(value).items()}
    return {key: item for key, item in known.items() if item is not None}


# --- Files ------------------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    if not path.is_dir():
        return False
    return (path / "experiment.toml").exists() or any(path.glob("trial-*/")) or bool(table_files(path, "requests"))


def read_compared(path: Path) -> ComparedRun:
    """The run in the directory, or the one whose requests another tool's result file holds. RecordError for others."""
    if joins_runs(path):
        raise RecordError(f"{path} joins runs, which had days of their own: give one of them")
    if is_run(path):
        return compared_run_of(path)
    file, _ = part_of(path)
    if not file.is_file():
        problem = "is no run directory and no result file" if file.exists() else "does not exist"
        raise RecordError(f"{path} {problem}: give a directory that `tailgate run` wrote, or another tool's result")
    return _run_of_result(path)


def _run_of_result(path: Path) -> ComparedRun:
    """The run whose requests another tool wrote into the file: of one arm, called `server`."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / name_of(path)
        write_run(run_dir, [(RESULT_ARM, path)])
        return compared_run_of(run_dir)


def compared_run_of(run_dir: Path) -> ComparedRun:
    """The run in `run_dir`, by its records as they are. RecordError when there is nothing to judge."""
    run = with_lengths(Run.of(read_run(run_dir)))
    checks = judge(run).checks
    doubts = _doubts(checks)
    # A server that died compiled no more: few recompiles are no praise.
    died = {check.arm or run.control for check in checks if check.check == "alive" and not check.ok}
    environment = run.records.environment
    machines = {item.documents.machine for item in run.records.runs}
    return ComparedRun(
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
            arm: ComparedArm(
                figures=arm_figures(run, arm),
                config=_config(run, arm),
                references=_references(run, arm),
                cache=_numbers(startup_row(run, arm)["cache"]),
                doubts=_names(doubts, arm),
                compile_doubts=(*_compile_names(doubts, run, arm), *(("alive",) if arm in died else ())),
                answers=answer_lengths(run, arm),
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
