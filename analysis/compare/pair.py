"""Two runs as one run with two arms: the earlier run's arm as the control, and the later run's as its treatment.

Each trial has one of the two arms, so they are judged as arms of separate runs are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.imports.file import name_of
from analysis.imports.run_directory import DESIGN, write_run
from analysis.records.joining import RecordedRun, flat, joins_runs, settings_of, shown
from analysis.records.plain_values import mapping, rows_of, table
from analysis.records.run_records import RunRecords, read_together, table_files
from analysis.records.tables import RecordError
from analysis.run.arm_account import replica_names
from analysis.run.client_stalls import with_lengths
from analysis.run.run import Run
from analysis.run.trials import takes_part

BASELINE, CANDIDATE = "baseline", "candidate"
_RESULT_ARM = "server"  # the arm of another tool's result file
_MOST_LISTED = 12

# Settings that must be alike. Below them, how the traffic is sent and not what is sent.
_ALIKE = ("traffic", "slo", "goodput", "trials.compile_cache", "loop", "arm.model", "arm.kind", "replicas")
_OF_SENDING = tuple(f"traffic.{key}" for key in ("workers", "remote_workers", "master_bind", "block_s"))
_FILES = tuple(f"traffic.{key}" for key in ("trace", "conversations", "tokenizer"))
_OF_NEITHER = (
    "name",
    "seed",
    "control",
    "arms",
    "bed",
    "rollout",
    "trials.count",
    "block_s",
    "stalling_kinds",
    "model",
)
_OF_MACHINE = ("machine", "cpu.model", "cpu.usable", "gpus", "platform", "python", "git_commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs that may be compared. `machines` are their identities, `differs` is what may be the cause."""

    run: Run
    machines: tuple[str, str]
    differs: tuple[str, ...]


def made_run(path: Path, folder: Path) -> Path:
    """The run directory at `path`, or one made in `folder` of another tool's result file."""
    if joins_runs(path):
        raise RecordError(f"{path} joins runs of several days: give one of them")
    if path.is_dir():
        trials = any(path.glob("trial-*/")) or table_files(path, "requests")
        if not (path / "experiment.toml").exists() and not trials:
            raise RecordError(f"{path} is no run directory: give one that `tailgate run` wrote")
        return path
    if not path.is_file():
        problem = "is no run directory and no result file" if path.exists() else "does not exist"
        raise RecordError(f"{path} {problem}: give a directory that `tailgate run` wrote, or another tool's result")
    made = folder / name_of(path)
    write_run(made, [(_RESULT_ARM, path)])
    return made


def read_pair(baseline: Path, candidate: Path, *, arm: str = "", gates: Mapping[str, Any] | None = None) -> Pair:
    """The run of both directories. `arm` is a name, or BASELINE=CANDIDATE; `gates` replace those of the candidate.

    RecordError where the two are one run, have no such arm, or differ in what a comparison rests on.
    """
    if baseline.resolve() == candidate.resolve():
        raise RecordError(f"{candidate.name} is the baseline and the candidate: give two runs")
    records = read_together((baseline, candidate))
    joined = {run.directory: run for run in records.runs}
    runs = joined[baseline], joined[candidate]
    _check_two_runs(*runs)
    arms = chosen_arms(arm, *runs)
    one, two = (_conditions(run, name) for run, name in zip(runs, arms, strict=True))
    differing = [key for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)]
    texts = {key: f"{key} {_text(one.get(key))} → {_text(two.get(key))}" for key in differing}
    if wrong := [texts[key] for key in differing if _is_among(key, _ALIKE)]:
        rest = f" and {len(wrong) - _MOST_LISTED} more" if len(wrong) > _MOST_LISTED else ""
        raise RecordError(
            f"{baseline.name} and {candidate.name} cannot be compared, since they differ in "
            f"{'; '.join(wrong[:_MOST_LISTED])}{rest}: run both with one experiment"
        )
    if one.get("traffic.arrivals") == "saturation":
        raise RecordError(f"{candidate.name} searched for the load that its arms hold: give runs of `tailgate run`")
    sides = [(run, own, name) for run, own, name in zip(runs, arms, (BASELINE, CANDIDATE), strict=True)]
    return Pair(
        run=with_lengths(Run.of(_of_two_arms(records, sides, gates))),
        machines=(runs[0].machine, runs[1].machine),
        differs=tuple(texts.values()),
    )


def _check_two_runs(baseline: RecordedRun, candidate: RecordedRun) -> None:
    """The runs share no trial, whose identity is its seed and start."""
    both = set(baseline.starts_ns.values()) & set(candidate.starts_ns.values())
    if both and baseline.seed == candidate.seed:
        raise RecordError(
            f"{baseline.name} and {candidate.name} hold the same trial, of one start and seed: give two runs"
        )


def chosen_arms(text: str, baseline: RecordedRun, candidate: RecordedRun) -> tuple[str, str]:
    """The arm of each run that `text` names; without it the only one that both have and neither has as its control.

    RecordError where that is not one arm, or a run has no such arm.
    """
    known = [_arms(documents) for documents in (baseline, candidate)]
    name, mapped, other = text.partition("=")
    if not text:
        shared = [arm for arm in known[0] if arm in known[1]]
        judged = [arm for arm in shared if not (known[0][arm] or known[1][arm])] or shared
        if not judged:
            raise RecordError(
                f"the runs share no arm: {', '.join(known[0])} in the baseline, {', '.join(known[1])} in the "
                "candidate: map them with --arm BASELINE=CANDIDATE"
            )
        if len(judged) > 1:
            raise RecordError(f"the runs share {', '.join(judged)}: choose one with --arm NAME")
        return judged[0], judged[0]
    pair = (name, other if mapped else name)
    for arm, side, own in zip(pair, (BASELINE, CANDIDATE), known, strict=True):
        if arm not in own:
            raise RecordError(f'the {side} has no arm "{arm}": use {", ".join(own)}')
    return pair


def _arms(documents: RecordedRun) -> dict[str, bool]:
    """The arms of the run, each with whether it is its control."""
    rows = [*rows_of(documents.experiment.get("arms"))]
    rows += [row for info in documents.infos for row in rows_of(mapping(info).get("arms"))]
    arms: dict[str, bool] = {}
    for row in rows:
        arms.setdefault(str(row.get("name")), row.get("control") is True)
    return arms


# --- Conditions -------------------------------------------------------------------------------------------------------


def _conditions(documents: RecordedRun, arm: str) -> dict[str, Any]:
    """What the run measured `arm` under, by key: its own settings as "arm.…", without the other arms'."""
    settings = settings_of(documents)
    found = {key: value for key, value in settings.items() if not _is_among(key, (*_OF_NEITHER, *_OF_SENDING))}
    found |= {
        f"arm.{key.removeprefix(f'arms.{arm}.')}": value
        for key, value in settings.items()
        if key.startswith(f"arms.{arm}.")
    }
    found = {key: value for key, value in found.items() if key not in ("arm.model.seed", "arm.weight")}
    found |= {key: PurePath(str(found[key])).name for key in _FILES if key in found}
    infos = [mapping(info) for info in documents.infos]
    rows = [row for info in infos for row in rows_of(info.get("arms")) if row.get("name") == arm]
    found["arm.model_name"] = next((mapping(row.get("external")).get("model_name") for row in rows), None)
    found["replicas"] = len(replica_names(infos, arm)) or None
    environment = dict(flat(documents.environment))
    return found | {key: environment.get(key) for key in _OF_MACHINE}


def _is_among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _text(value: Any) -> str:
    return "none" if value is None or value == [] else shown(value)


# --- Records ----------------------------------------------------------------------------------------------------------

_Side = tuple[RecordedRun, str, str]  # the run, its arm, and what the arm is called here


def _of_two_arms(records: RunRecords, sides: Sequence[_Side], gates: Mapping[str, Any] | None) -> RunRecords:
    """The records of one arm of each run."""
    candidate = sides[1][0].experiment
    experiment = {
        **candidate,
        "name": " → ".join(run.name for run, _, _ in sides),
        "compare_models": True,
        "arms": [{**_row(run, arm), "name": name, "control": name == BASELINE} for run, arm, name in sides],
        "traffic": {**table(candidate, "traffic"), "design": DESIGN},
        "trials": {**table(candidate, "trials"), "count": sum(len(run.trials) for run, _, _ in sides)},
        "gates": {**(table(candidate, "gates") if gates is None else gates), "sequential": False},
        "parity": {},
    }
    environment = {**records.environment, **sides[1][0].environment}
    infos = []
    absent = []  # trials that the arm was not part of
    for info in records.trials:
        arm, name = _side_of(sides, int(info["trial"]))
        if takes_part(info, arm):
            infos.append(_info(info, arm, name))
        else:
            absent.append(int(info["trial"]))
    return replace(
        records,
        experiment=experiment,
        environment=environment,
        trials=tuple(infos),
        requests=_rows(records.requests, sides, absent),
        events=None if records.events is None else _rows(records.events, sides, absent),
        steps=None if records.steps is None else _rows(records.steps, sides, absent),
        bed=None if records.bed is None else _rows(records.bed, sides, absent, others=True),
        server_load=None if records.server_load is None else _rows(records.server_load, sides, absent),
        parity=None,
        answers=(),
        search=None,
        weights=(),
        runs=(),
    )


def _row(run: RecordedRun, arm: str) -> Mapping[str, Any]:
    return next((row for row in rows_of(run.experiment.get("arms")) if row.get("name") == arm), {})


def _side_of(sides: Sequence[_Side], trial: int) -> tuple[str, str]:
    return next((arm, name) for run, arm, name in sides if trial in run.trials.values())


def _rows(rows: pa.Table, sides: Sequence[_Side], absent: Sequence[int], *, others: bool = False) -> pa.Table:
    """The rows of the two arms under their new names; with `others` also those of no arm, or of another."""
    place = rows.schema.get_field_index("arm")
    kept = []
    taken = pa.repeat(pa.scalar(False), rows.num_rows)
    for run, arm, name in sides:
        trials = pa.array([trial for trial in run.trials.values() if trial not in absent], pa.int32())
        of_run = pc.is_in(rows.column("trial"), value_set=trials)
        own = pc.fill_null(pc.and_(of_run, pc.equal(rows.column("arm"), arm)), False)
        taken = pc.or_(taken, own)
        part = rows.filter(own)
        field = rows.schema.field(place)
        kept.append(part.set_column(place, field, pa.repeat(pa.scalar(name, field.type), part.num_rows)))
    return pa.concat_tables([*kept, *([rows.filter(pc.invert(taken))] if others else [])])


def _info(info: Mapping[str, Any], arm: str, name: str) -> dict[str, Any]:
    """trial.json of a trial as one of `arm` alone, called `name`."""

    kept = {key: value for key, value in info.items() if key not in ("answers", "asked", "control")}
    for key, column in (("arms", "name"), ("deaths", "arm")):
        if key in kept:
            kept[key] = [{**row, column: name} for row in rows_of(kept[key]) if row.get(column) == arm]
    for key in ("startup", "planned", "weights", "ended_arms"):
        if key in kept:
            kept[key] = _renamed({own: value for own, value in mapping(kept[key]).items() if own == arm}, arm, name)
    # Other arms keep their devices, which they may have shared with it.
    if "devices" in kept:
        kept["devices"] = _renamed(mapping(kept["devices"]), arm, name)
    if "bed" in kept:
        bed = mapping(kept["bed"])
        kept["bed"] = {**bed, "arms": _renamed(mapping(bed.get("arms")), arm, name)}
    return {**kept, "design": DESIGN}


def _renamed(values: Mapping[str, Any], arm: str, name: str) -> dict[str, Any]:
    return {name if own == arm else own: value for own, value in values.items()}
