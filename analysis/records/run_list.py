"""runs.json: the runs that a folder joins, by paths from the folder, and the differences between them that count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.records.documents import read_document, write_document
from analysis.records.tables import RecordError

RUN_LIST = "runs.json"
_MOST_RUNS = 1000
_LONGEST_PATH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """The directories of runs, each of which was recorded by itself, and the keys in which they may differ."""

    directories: tuple[Path, ...]
    accepted: tuple[str, ...] = ()


def joins_runs(directory: Path) -> bool:
    """Whether the directory is a folder that joins runs."""
    return (directory / RUN_LIST).exists()


def read_run_list(directory: Path) -> RunList | None:
    """The list in `directory`, None where it holds none. RecordError for one that cannot be followed."""
    path = directory / RUN_LIST
    document = read_document(path)
    if document is None:
        return None
    again = f"join the runs again: tailgate analyze RUN RUN --out {directory}"
    if document.content is None:
        raise RecordError(f"{path} {document.problem}: {again}")
    names, accepted = document.content.get("runs"), document.content.get("accepted", [])
    if not _are_texts(names) or not names or not _are_texts(accepted):
        raise RecordError(f"{path} does not name its runs as a list of paths: {again}")
    directories = tuple(directory / name for name in names)
    for name, run in zip(names, directories, strict=True):
        if len(name) > _LONGEST_PATH or not run.is_dir():
            raise RecordError(f"{path} names {name[:80]}, which is not there: put it back, or {again}")
        if joins_runs(run):
            raise RecordError(f"{path} names {name}, which joins runs itself: {again}")
    return RunList(directories=directories, accepted=tuple(accepted))


def listed_runs(directories: Sequence[Path], accepted: Sequence[str] = ()) -> RunList:
    """The runs in `directories`, with those of a folder that joins runs in its place; `accepted` are keys more.

    RecordError for what is no directory, for a run that is there twice, and for too many.
    """
    found: dict[Path, str] = {}  # the way to each run
    runs: list[Path] = []
    keys = list(accepted)
    for directory in directories:
        if not directory.is_dir():
            raise RecordError(f"{directory} is not a directory: give the directory of a run")
        inner = read_run_list(directory)
        keys += inner.accepted if inner is not None else ()
        for run in inner.directories if inner is not None else (directory,):
            way = f"{directory}" if inner is None else f"{directory}, which joins it"
            place = run.resolve()
            if place in found:
                twice = f"once as {found[place]}, once as {way}" if found[place] != way else f"twice as {way}"
                raise RecordError(f"the run {place.name} is given twice ({twice}): give each run once")
            found[place] = way
            runs.append(run)
    if len(runs) > _MOST_RUNS:
        raise RecordError(f"{len(runs)} runs are given; the limit is {_MOST_RUNS}: give fewer")
    return RunList(directories=tuple(runs), accepted=tuple(dict.fromkeys(keys)))


def write_run_list(directory: Path, listed: RunList) -> None:
    """`directory`, which is made where it is not there, names the runs. OSError where it cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    here = directory.resolve()
    paths = [Path(os.path.relpath(run.resolve(), here)).as_posix() for run in listed.directories]
    write_document(directory / RUN_LIST, {"runs": paths, "accepted": list(listed.accepted)}, indent=2)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item and "\0" not in item for item in value)
