"""Several runs of one experiment as one run: which runs a folder joins, whether they may be joined, and new names.

A folder that joins runs holds runs.json, which names them by paths from the folder. Trials are numbered anew in order
of time, with planned trials that are missing included. Ids of compile events get the place of their run in front, such
as "2.1-compiled-0-7".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field, ValidationError

from tailgate.analysis.records.documents import read_document, write_document
from tailgate.analysis.records.plain_values import first_of, mapping, number, rows_of, table, text_of
from tailgate.analysis.records.tables import RecordError

RUN_LIST = "runs.json"

_MOST_PLANNED = 1000  # trials of one run
_LONGEST_SHOWN = 120  # characters of a value
# Settings that change nothing of what is measured, as keys or as tables: where and how often, not what.
_MAY_DIFFER = (
    *("name", "seed", "machines", "trials.count", "trials.ready_timeout_s"),
    *("splitter.port", "splitter.admin_port"),
    *("traffic.workers", "traffic.remote_workers", "traffic.master_bind"),
)
_MUST_AGREE = ("arms", "control", "traffic.design", "loop")  # whatever is accepted
_VERSIONS = ("tailgate", "torch", "transformers", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """The directories of runs, and the keys in which they may differ."""

    directories: tuple[Path, ...]
    accepted: tuple[str, ...] = ()


class _RunListFile(BaseModel):
    runs: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(min_length=1)
    accepted: list[str] = []


def joins_runs(directory: Path) -> bool:
    """Return whether the directory is a folder that joins runs."""
    return (directory / RUN_LIST).exists()


def read_run_list(directory: Path) -> RunList | None:
    """Return the list in `directory`, None if it holds none. Raises RecordError for one that cannot be followed."""
    if not joins_runs(directory):
        return None
    path = directory / RUN_LIST
    content, problem = read_document(path)
    again = f"join the runs again: tailgate analyze RUN RUN --out {directory}"
    if problem:
        raise RecordError(f"{path} {problem}: {again}")
    try:
        listed = _RunListFile.model_validate(content)
    except ValidationError:
        raise RecordError(f"{path} does not name its runs as a list of paths: {again}") from None
    for name in listed.runs:
        if not (directory / name).is_dir() or joins_runs(directory / name):
            raise RecordError(f"{path} names {name[:80]}, which is not the directory of one run: {again}")
    return RunList(directories=tuple(directory / name for name in listed.runs), accepted=tuple(listed.accepted))


def listed_runs(directories: Sequence[Path], accepted: Sequence[str] = ()) -> RunList:
    """Return the runs in `directories`, with those of a folder that joins runs in its place.

    Raises RecordError for what is no directory and for a run that is given twice.
    """
    runs: dict[Path, Path] = {}
    keys = list(accepted)
    for directory in directories:
        if not directory.is_dir():
            raise RecordError(f"{directory} is not a directory: give the directory of a run")
        listed = read_run_list(directory) or RunList(directories=(directory,))
        keys += listed.accepted
        for run in listed.directories:
            if run.resolve() in runs:
                raise RecordError(f"the run {run.resolve().name} is given twice, again by {directory}: give it once")
            runs[run.resolve()] = run
    return RunList(directories=tuple(runs.values()), accepted=tuple(dict.fromkeys(keys)))


def write_run_list(directory: Path, listed: RunList) -> None:
    """Name the runs in `directory`, which is made if it is not there. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory.resolve()
    paths = [Path(os.path.relpath(run.resolve(), folder)).as_posix() for run in listed.directories]
    write_document(directory / RUN_LIST, {"runs": paths, "accepted": list(listed.accepted)}, indent=2)


def names_of(directories: Sequence[Path]) -> list[str]:
    """Return a name for each directory: its own, or its path from the folder that they share if names are equal."""
    paths = [directory.resolve() for directory in directories]
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    return [path.relative_to(os.path.commonpath(paths)).as_posix() for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What the documents of a run say, and what its trials are called among the runs that are judged together."""

    directory: Path
    name: str  # of the directory, with as much of its path as tells it from the others
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    parity: Mapping[str, Any] | None = None
    search: Mapping[str, Any] | None = None
    folders: tuple[Path, ...] = ()  # of its trials
    numbers: tuple[int, ...] = ()  # of each folder's trial
    infos: tuple[Mapping[str, Any] | None, ...] = ()  # of each folder
    place: int = 0  # among the runs in order of time, from 1; 0 for a run that is judged by itself
    trials: Mapping[int, int] = field(default_factory=dict)  # the new number of each trial, with those that are missing
    unknown: int = 0  # the new number of every trial that it does not have

    @property
    def starts_ns(self) -> dict[int, int]:
        """When each trial started, without those that state no start."""
        known = zip(self.numbers, (number(mapping(info).get("start_ns")) for info in self.infos), strict=True)
        return {trial: int(start) for trial, start in known if start is not None and 0 < start < 1 << 63}

    @property
    def order(self) -> tuple[int, str]:
        """What runs are sorted by: their start, then their name."""
        return min(self.starts_ns.values(), default=0), self.name

    @property
    def machine(self) -> str:
        """The identity of the machine that it ran on; empty if it is not recorded."""
        return text_of(self.environment, "machine")

    def with_own_names(self, rows: pa.Table, trial: int) -> pa.Table:
        """Return the rows of a table of `trial`, with its number where they state none. Among several runs, trials have
        their new numbers and compile events ids that no other run has."""
        given = pc.fill_null(rows.column("trial"), trial)
        if not self.place:
            return _replaced(rows, "trial", given)
        if "event_id" in rows.column_names:
            ids = pc.binary_join_element_wise(str(self.place), rows.column("event_id"), ".")
            rows = _replaced(rows, "event_id", ids)
        given = given.to_numpy()
        numbers = np.full(len(given), self.unknown, dtype=np.int32)
        for own in np.unique(given).tolist():
            numbers[given == own] = self.trials.get(own, self.unknown)
        return _replaced(rows, "trial", pa.array(numbers))


def _replaced(rows: pa.Table, name: str, column: Any) -> pa.Table:
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, rows.schema.field(place), column.cast(rows.schema.field(place).type))


def renumbered(runs: Sequence[RecordedRun]) -> tuple[RecordedRun, ...]:
    """Return the runs, which are in order of time, with a number for each trial that they have or planned."""
    moments: list[tuple[int, int, int]] = []
    for place, run in enumerate(runs):
        start = run.order[0]
        planned = table(run.experiment, "trials").get("count")
        was_decided = bool(run.infos and mapping(run.infos[-1]).get("ended"))  # trials after that were left out
        planned = min(planned, _MOST_PLANNED) if isinstance(planned, int) and not was_decided else 0
        for trial in sorted({*run.numbers, *range(1, planned + 1)}):
            start = run.starts_ns.get(trial, start)  # a trial without a start follows the one before it
            moments.append((start, place, trial))
    numbers: list[dict[int, int]] = [{} for _ in runs]
    for joined, (_, place, trial) in enumerate(sorted(moments), start=1):
        numbers[place][trial] = joined
    return tuple(
        replace(run, place=place, trials=own, unknown=len(moments) + place)
        for place, (run, own) in enumerate(zip(runs, numbers, strict=True), start=1)
    )


def check_joinable(runs: Sequence[RecordedRun], accepted: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the differences between the runs that `accepted` allows, in words. Its entries are keys or tables of keys.

    Raises RecordError for other differences, for runs without documents, and for two that hold the same trial.
    """
    seen: dict[int, str] = {}  # no two trials start in one nanosecond
    for run in runs:
        if not run.experiment or not any(run.infos):
            lacks = "trial with a trial.json" if run.experiment else "experiment.toml, so what it ran is unknown"
            raise RecordError(f"{run.name} has no {lacks}: give another run")
        for start in run.starts_ns.values():
            owner = seen.setdefault(start, run.name)
            if owner != run.name:
                raise RecordError(f"{run.name} and {owner} hold the same trial, of one start: leave one out")
    return _differences(runs, accepted)


def _differences(runs: Sequence[RecordedRun], accepted: Sequence[str]) -> tuple[str, ...]:
    """Return how each run differs from the first, in words. Raises RecordError for what is not accepted."""
    first, base = runs[0].name, settings_of(runs[0])
    refused: dict[str, str] = {}
    allowed: list[str] = []
    for run in runs[1:]:
        own = settings_of(run)
        changed = [key for key in sorted({*base, *own}) if base.get(key) != own.get(key)]
        # The trials of a search last as long as it decides. What all arms share is named once.
        free = (*_MAY_DIFFER, *(("traffic.duration_s",) if run.search is not None else ()))
        changed = [key for key in changed if not key.startswith("arms.") or key.split(".", 2)[-1] not in changed]
        for key in (key for key in changed if not is_among(key, free)):
            text = f"{run.name}: {key} {shown(own.get(key))} (in {first} {shown(base.get(key))})"
            if is_among(key, accepted) and key not in _MUST_AGREE:
                allowed.append(text)
            else:
                refused.setdefault(key, text)
    if refused:
        remedy = f"or accept what differs with --allow-different {','.join(refused)}"
        if never := {key: text for key, text in refused.items() if key in _MUST_AGREE}:
            refused, remedy = never, f"{', '.join(never)} must be the same"
        raise RecordError(
            f"the runs cannot be joined, since they differ ({'; '.join(refused.values())}): join runs of one "
            f"experiment on one kind of machine, {remedy}"
        )
    return tuple(allowed)


def settings_of(run: RecordedRun) -> dict[str, Any]:
    """Return everything that decides what the run measured, by key: the settings of its experiment, of each arm with
    those that arms share, and facts of its machine."""
    infos = [info for info in run.infos if info]
    rows = rows_of(run.experiment.get("arms"))
    found = dict(flat({key: value for key, value in run.experiment.items() if key != "arms"}))
    for row in rows:
        own = {key: row[key] for key in row if key not in ("name", "control")}
        if "compile" in own:  # an arm that tailgate starts
            for part in ("model", "engine"):
                own[part] = {**mapping(run.experiment.get(part)), **mapping(row.get(part))}
        found |= flat(own, f"arms.{row.get('name')}")
    versions, gpus = mapping(run.environment.get("versions")), run.environment.get("gpus")
    quantised = any(key.endswith(".quantisation") and value != "none" for key, value in found.items())
    prompts = mapping(first_of(infos, "prompts"))
    facts = {
        "block_s": first_of(infos, "block_s"),
        "arms": sorted(str(row.get("name")) for row in rows),
        "control": [str(row.get("name")) for row in rows if row.get("control") is True],
        "loop": str(first_of(infos, "open_loop")),
        "versions": {name: versions.get(name) for name in (*_VERSIONS, *(("torchao",) if quantised else ()))},
        "gpus": sorted({str(gpu).partition(",")[0] for gpu in gpus}) if isinstance(gpus, list) else None,
        "traffic": {
            **{key: first_of(infos, key) for key in ("design", "duration_s")},
            "trace": mapping(prompts.get("trace")),
        },
    }
    return found | dict(flat(facts))


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of each value in nested tables, with the value as far as it decides what was measured."""
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping):
            yield from flat(item, name)
        elif item is not None:
            yield name, _comparable(str(key), item)


def _comparable(key: str, value: Any) -> Any:
    """Return the value without which of equal cards it names, or where a file lies."""
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if key == "device":
        return value.partition(":")[0]
    return Path(value).name if value.startswith(("/", "./", "../", "~")) else value


def is_among(key: str, names: Sequence[str]) -> bool:
    """Return whether `names` holds the key or a table of it; a setting that arms share includes that of each arm."""
    keys = (key, key.split(".", 2)[-1]) if key.startswith("arms.") else (key,)
    return any(one == name or one.startswith(f"{name}.") for one in keys for name in names)


def shown(value: Any) -> str:
    """Return the value of a setting as text."""
    if value is None:
        return "not given"
    if isinstance(value, list):
        return ", ".join(map(str, value))[:_LONGEST_SHOWN] or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)[:_LONGEST_SHOWN] or "none"


def joined_experiment(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the experiment of the first run, with as many trials as all have or planned."""
    first = runs[0].experiment
    names = dict.fromkeys(str(run.experiment.get("name", "")) for run in runs)
    trials = {**table(first, "trials"), "count": sum(len(run.trials) for run in runs)}
    return {**first, "name": " + ".join(filter(None, names)), "trials": trials}


def joined_parity(documents: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the parity that was measured before each run, of each arm the worst; None if a run measured nothing."""
    measured = sorted(filter(None, documents), key=_parity_rank)
    if len(measured) < len(documents):
        return None
    rows = sorted(
        (row for document in measured for row in rows_of(document.get("arms"))), key=_parity_rank, reverse=True
    )
    return {**measured[0], "arms": list({str(row.get("name")): row for row in rows}.values())}


def _parity_rank(row: Mapping[str, Any]) -> int:
    return {"FAIL": 0, "PASS": 2}.get(str(row.get("verdict")), 1)


def joined_search(searches: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return how the searches of all runs went on, as one; None if a run made none.

    An arm was left out if every search left it out.
    """
    known = [search for search in searches if search is not None]
    if len(known) < len(searches):
        return None
    stops = [str(search.get("stop") or "") for search in known]
    together: dict[str, Any] = {"stop": "; ".join(dict.fromkeys(stops)) if all(stops) else ""}
    for key in ("budget_s", "spent_s"):
        spent = [value for search in known if (value := number(search.get(key))) is not None]
        together |= {key: sum(spent)} if len(spent) == len(known) else {}
    common = set.intersection(*({str(row.get("arm")) for row in rows_of(search.get("left"))} for search in known))
    return together | {"left": [row for row in rows_of(known[0].get("left")) if str(row.get("arm")) in common]}
