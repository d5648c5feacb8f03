"""The folder that joins runs: which, and that it is none of the runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from analysis.records.joining import RecordedRun, RunList, joins_runs, listed_runs, write_run_list
from analysis.records.run_records import check_runs
from servers.complaint import ConfigError


def join_runs(directories: Sequence[Path], *, out: str = "", accepted: Sequence[str] = ()) -> Path:
    """A folder that names the runs in `directories`, which are trials of one experiment but for what is `accepted`.

    It is `out`, or the folder itself where one that joins runs is given alone, or else a new one beside the first of
    `directories`, which the same runs have every time. RecordError for runs that may not be joined, ConfigError for an
    `out` that holds something else.
    """
    listed = listed_runs(directories, accepted)
    documents = check_runs(listed)
    if out:
        folder = Path(out)
    elif len(directories) == 1:
        folder = directories[0]
    else:
        first = directories[0]
        beside = first.parent if first.name not in ("", "..") else first.resolve().parent
        folder = beside / f"joined-{_identity(documents)}"
    _check_free(folder, listed)
    write_run_list(folder, listed)
    return folder


def _identity(documents: Sequence[RecordedRun]) -> str:
    """Eight digits that the same trials have wherever they lie."""
    trials = [
        f"{run.experiment.get('seed')} {run.starts_ns.get(number) or run.name}"
        for run in documents
        for number in run.numbers
    ]
    return hashlib.sha256("\n".join(sorted(trials)).encode()).hexdigest()[:8]


def check_outside(folder: Path, runs: Sequence[Path]) -> None:
    """The folder is none of the runs and in none of them. Otherwise ConfigError."""
    place = folder.resolve()
    for run in runs:
        if place.is_relative_to(run.resolve()):
            raise ConfigError(f'--out "{folder}" lies in the run {run.resolve().name}: give a folder of its own')


def _check_free(folder: Path, listed: RunList) -> None:
    check_outside(folder, listed.directories)
    place = folder.resolve()
    if place.exists() and not place.is_dir():
        raise ConfigError(f'--out "{folder}" is a file: give a folder')
    if place.is_dir() and any(place.iterdir()) and not joins_runs(place):
        raise ConfigError(f'--out "{folder}" holds other files: give a new folder, or one that joins runs')
