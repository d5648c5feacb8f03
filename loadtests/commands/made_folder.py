"""Folders that are judged as one run: one that joins several runs, and one that holds other tools' result files."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from tailgate.analysis.imports.vllm import Named, checksums, write_run
from tailgate.analysis.records.joining import RecordedRun, RunList, joins_runs, listed_runs, write_run_list
from tailgate.analysis.records.run_records import check_runs
from tailgate.loadtests.experiments.files import check_makeable
from tailgate.servers.complaint import ConfigError

_LONGEST_NAME = 60


def join_runs(directories: Sequence[Path], *, out: str = "", accepted: Sequence[str] = ()) -> Path:
    """Make a folder that names the runs in `directories`: trials of one experiment but for what is `accepted`.

    It is `out`, or the folder itself where one that joins runs is given alone, or else a new one next to the first of
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
        parent = first.parent if first.name not in ("", "..") else first.resolve().parent
        folder = parent / f"joined-{_identity(documents)}"
    _check_free(folder, listed)
    write_run_list(folder, listed)
    return folder


def _identity(documents: Sequence[RecordedRun]) -> str:
    """Return eight digits that the same trials have wherever they lie."""
    trials = [
        f"{run.experiment.get('seed')} {run.starts_ns.get(number) or run.name}"
        for run in documents
        for number in run.numbers
    ]
    return hashlib.sha256("\n".join(sorted(trials)).encode()).hexdigest()[:8]


def _check_free(folder: Path, listed: RunList) -> None:
    place = folder.resolve()
    for run in listed.directories:
        if place.is_relative_to(run.resolve()):
            raise ConfigError(f'--out "{folder}" lies in the run {run.resolve().name}: give a folder of its own')
    check_makeable(folder)
    if place.is_dir() and any(place.iterdir()) and not joins_runs(place):
        raise ConfigError(f'--out "{folder}" holds other files: give a new folder, or one that joins runs')


def names_results(texts: Sequence[str]) -> bool:
    """Return whether the words of a command line name result files, as NAME=FILE, and no run directories."""
    return any("=" in text and not Path(text).is_dir() for text in texts)


def run_of_results(texts: Sequence[str], *, out: str = "") -> Path:
    """Make a run directory of the files that `texts` name, with the arm named first as its control.

    It is `out`, or else a folder next to the first file, which is named after the files' contents. ConfigError for
    words that name no file and for a folder that is there already, RecordError for files that are no results.
    """
    files = list(map(_named, texts))
    if len({arm for arm, _ in files}) < 2:
        raise ConfigError(
            f'"{files[0][0]}" is the only arm: give the results of two, such as eager=a.json compiled=b.json'
        )
    named = [[arm, checksum] for (arm, _), checksum in zip(files, checksums(files), strict=True)]
    digits = f"{zlib.crc32(json.dumps(named).encode()):08x}"
    folder = Path(out) if out else files[0][1].parent / f"results-{digits}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f'"{folder}" exists: give a new --out, or judge it again with tailgate analyze {folder}')
    check_makeable(folder)
    write_run(folder, files)
    return folder


def _named(text: str) -> Named:
    name, given, file = text.partition("=")
    if not given:
        raise ConfigError(f'"{text}" names no arm: give each result file as NAME=FILE, and no run directory with them')
    if not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f'"{text}" has no name of an arm in front: give 1 to {_LONGEST_NAME} printable characters')
    if not Path(file).is_file():
        raise ConfigError(f'result file "{file}" does not exist: give a result file of arm {name}')
    return name, Path(file)
