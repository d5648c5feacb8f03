"""The records of a run as they lie in its directory: documents, tables, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.records import joining
from tailgate.analysis.records.asked_answers import PATTERN as ANSWERS
from tailgate.analysis.records.documents import EDITED, read_document, read_toml
from tailgate.analysis.records.joining import RecordedRun, RunList, read_run_list
from tailgate.analysis.records.plain_values import first_of, table
from tailgate.analysis.records.request_columns import ColumnBuilder, RequestColumns
from tailgate.analysis.records.schemas import REQUIRED, TABLES
from tailgate.analysis.records.tables import RecordError, one_line, read_ahead, tables_in
from tailgate.analysis.records.weight_journal import JOURNAL, WeightChange, read_journal
from tailgate.analysis.wording import counted

MIRRORED = "mirrored"

# Peak memory of an analysis by bytes of all request files, and by those of the largest trial (benchmarks/analysis.py).
_BYTES_A_BYTE, _OF_A_TRIAL = 0.25, 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run directory holds."""

    directory: Path
    experiment: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[dict[str, Any], ...]  # trial.json of each trial with its `machine`, in order; empty for bare tables
    generators: tuple[dict[str, Any], ...]
    requests: RequestColumns
    events: pa.Table | None  # None: no such file, so nothing is known of compiles
    steps: pa.Table | None  # None: of no trial
    machines: pa.Table | None  # samples of the machines; None if nothing sampled them
    problems: tuple[str, ...]  # what is torn, damaged or unreadable, in words
    parity: Mapping[str, Any] | None = None  # parity.json: measured before the first trial; None if it was not
    answers: tuple[dict[str, Any], ...] = ()  # of external arms to prompts that all were asked, a trial and an arm each
    search: Mapping[str, Any] | None = None  # frontier.json: how a search, or several, went on; None if none was made
    weights: tuple[WeightChange, ...] = ()  # empty if they never changed
    runs: tuple[RecordedRun, ...] = ()  # that were read, in order of time; the one alone if none were joined
    differences: tuple[str, ...] = ()  # between joined runs, as they were accepted
    unjudged: RequestColumns | None = None  # of arms that only show whether their host stalled
    trial_names: Mapping[int, str] = field(default_factory=dict)  # where a reader knows a trial by another number

    @property
    def joined(self) -> bool:
        """Whether these are the records of several runs."""
        return any(run.place for run in self.runs)


def read_run(directory: Path) -> RunRecords:
    """Return the records under `directory`: trial-NN/ folders, tables in it, or the runs that it joins.

    Raises RecordError if there is no table of requests or one that cannot be read, and for runs that may not be joined.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    listed = read_run_list(directory)
    if listed is None:
        files = _Files(directory)
        return _records([(_documents(files), files)])
    opened = _opened(listed.directories)
    differences = joining.check_joinable([run for run, _ in opened], listed.accepted)
    return replace(_together(opened), directory=directory, differences=differences)


def read_together(directories: Sequence[Path]) -> RunRecords:
    """Return the records of runs that may be of different experiments, with the trials and ids of joined runs."""
    return _together(_opened(directories))


def check_runs(listed: RunList) -> tuple[RecordedRun, ...]:
    """Return the documents of the listed runs in order of time. Raises RecordError for runs that may not be joined or
    hold no requests."""
    runs = tuple(run for run, _ in _opened(listed.directories))
    joining.check_joinable(runs, listed.accepted)
    return runs


def trial_folders(directory: Path) -> list[Path]:
    """Return the folders of the trials, or the directory itself if it has none."""
    return sorted(path for path in directory.glob("trial-*") if path.is_dir()) or [directory]


def table_files(folder: Path, stem: str) -> list[Path]:
    """Return the files of a table, of every format."""
    return sorted(path for suffix in ("arrow", "parquet", "jsonl") for path in folder.glob(f"{stem}*.{suffix}"))


@dataclass(slots=True)
class _Files:
    """The files of one run, and what is wrong with those that were read. A run among others has a `name`."""

    directory: Path
    name: str = ""
    problems: list[str] = field(default_factory=list)

    def add(self, path: Path, problem: str) -> None:
        """Add what is wrong with the file or folder at `path`, in words that follow its name."""
        own = path.relative_to(self.directory).as_posix()
        self.problems += [f"{self.name}/{own} {problem}" if self.name else f"{own} {problem}"] if problem else []

    def document(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON document at `path`; None if there is none, or none that can be believed."""
        content, problem = read_document(path)
        self.add(path, problem)
        return content

    def all(self, folder: Path, pattern: str) -> list[tuple[Path, dict[str, Any]]]:
        """Return the documents in `folder` with names like `pattern`, in the order of their names."""
        read = [(path, self.document(path)) for path in sorted(folder.glob(pattern))]
        return [(path, content) for path, content in read if content is not None]

    def experiment(self) -> dict[str, Any]:
        """Return experiment.toml, empty if there is none. Raises RecordError if it cannot be read."""
        path = self.directory / "experiment.toml"
        try:
            return read_toml(path)
        except (OSError, ValueError) as error:
            where = f"{self.name}/{path.name}" if self.name else path.name
            remedy = f"correct it, and end it with the line {EDITED}"
            raise RecordError(f"{where} cannot be read ({one_line(error)}): {remedy}") from error

    def tables(self, path: Path, stem: str) -> Iterator[pa.Table]:
        """Yield the rows of the file of the table `stem`, some megabytes at a time. Raises RecordError."""
        for rows in tables_in(path, TABLES[stem], required=REQUIRED[stem]):
            if isinstance(rows, str):
                self.add(path, rows)
            else:
                yield rows


def _opened(directories: Sequence[Path]) -> list[tuple[RecordedRun, _Files]]:
    """Return the documents and the files of each run, in order of time whatever the order of `directories`."""
    named = zip(directories, joining.names_of(directories), strict=True)
    opened = [(_documents(files), files) for files in (_Files(directory, name) for directory, name in named)]
    return sorted(opened, key=lambda run: run[0].order)


def _documents(files: _Files) -> RecordedRun:
    """Return what the documents of a run judged by itself say. Raises RecordError if it sent no requests."""
    directory, name = files.directory, files.name or files.directory.resolve().name
    folders = trial_folders(directory)
    if not any(table_files(folder, "requests") for folder in folders):
        raise RecordError(f"{name} holds no requests*.arrow, .parquet or .jsonl: give a run that sent requests")
    names = enumerate((folder.name.removeprefix("trial-") for folder in folders), start=1)
    numbers = [int(name) if name.isdecimal() and len(name) < 10 else place for place, name in names]
    infos: list[dict[str, Any] | None] = []
    for folder, number in zip(folders, numbers, strict=True):
        path = folder / "trial.json"
        missing = {"complete": False} if folder != directory else None
        info = files.document(path) or {} if path.exists() else missing
        of_import = (info or {}).get("problems")
        files.problems += map(str, of_import) if isinstance(of_import, list) else []
        is_own = (info or {}).get("trial", number) == number and numbers.count(number) == 1
        files.add(path, "" if is_own else "is of another trial")
        infos.append(info)
    return RecordedRun(
        directory=directory,
        name=name,
        experiment=files.experiment(),
        environment=files.document(directory / "environment.json") or {},
        parity=files.document(directory / "parity.json"),
        search=files.document(directory / "frontier.json"),
        folders=tuple(folders),
        infos=tuple(infos),
        numbers=tuple(numbers),
        trials={number: number for number in numbers},
    )


def _together(opened: Sequence[tuple[RecordedRun, _Files]]) -> RunRecords:
    """Return the records of several runs, in order of time, as of one."""
    runs = joining.renumbered([run for run, _ in opened])
    return _records([(run, files) for run, (_, files) in zip(runs, opened, strict=True)])


def _records(opened: Sequence[tuple[RecordedRun, _Files]]) -> RunRecords:
    """Return the records of a run, or of several with new numbers."""
    _check_memory(opened)
    tables: dict[str, list[pa.Table]] = {stem: [] for stem in TABLES if stem != "requests"}
    infos: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    weights: tuple[WeightChange, ...] = ()
    for run, files in opened:
        for number, info, folder in zip(run.numbers, run.infos, run.folders, strict=True):
            trial = {"trial": run.trials[number]}
            infos += [] if info is None else [{**info, **trial, "machine": run.machine}]
            for stem, found in tables.items():
                for path in table_files(folder, stem):
                    found.append(TABLES[stem].empty_table())
                    found += [run.with_own_names(rows, number) for rows in files.tables(path, stem)]
            answers += [document | trial for _, document in files.all(folder, ANSWERS)]
        weights, problem = read_journal(run.directory)
        files.add(run.directory / JOURNAL, problem)
    known = {stem: pa.concat_tables(found) if found else None for stem, found in tables.items()}
    events = known["compile_events"]
    named = [] if events is None else pc.unique(pc.list_flatten(events.column("request_ids"))).drop_null().to_pylist()
    requests, generators = _requests(opened, named)
    runs = tuple(run for run, _ in opened)
    for files, folder in ((files, folder) for run, files in opened for folder in run.folders):
        if tables["compile_events"] and not table_files(folder, "compile_events"):  # which would read as no compile
            files.add(folder, "holds no compile_events, as other trials do")
    return RunRecords(
        directory=runs[-1].directory,
        experiment=joining.joined_experiment(runs) if runs[0].place else dict(runs[0].experiment),
        environment={  # what all have in common
            key: value
            for key, value in runs[0].environment.items()
            if all(run.environment.get(key) == value for run in runs)
        },
        trials=tuple(sorted(infos, key=lambda info: info["trial"])),
        generators=tuple(generators),
        requests=requests,
        events=events,
        steps=known["steps"],
        machines=known["machines"],
        problems=tuple(problem for _, files in opened for problem in files.problems),
        parity=joining.joined_parity([run.parity for run in runs]),
        answers=tuple(answers),
        search=joining.joined_search([run.search for run in runs]),
        weights=() if runs[0].place else weights,
        runs=runs,
    )


def _requests(
    opened: Sequence[tuple[RecordedRun, _Files]], named: Collection[str]
) -> tuple[RequestColumns, list[dict[str, Any]]]:
    """Return the requests of all runs, of which compile events name some, and what each load process said of its own,
    with the rows that are there."""
    # Nothing is counted in sessions where every arm got every request.
    alone = opened[0][0] if not opened[0][0].place else None
    builder = ColumnBuilder(sessions=alone is None or design_of(alone.experiment, alone.infos) != MIRRORED)
    # All accounts are read before any request. An account vouches for the requests up to its `settled_ns`: if it were
    # newer than the requests, the slowest of them would be missing (see analysis/interim/journal.py).
    trials: list[tuple[RecordedRun, _Files, int, bool, dict[str, dict[str, Any]], list[Path]]] = []
    for run, files in opened:
        for number, info, folder in zip(run.numbers, run.infos, run.folders, strict=True):
            trial = {"trial": run.trials[number]}
            accounts = {path.stem: account | trial for path, account in files.all(folder, "generator-*.json")}
            trials.append((run, files, number, info is not None, accounts, table_files(folder, "requests")))
    each = (tables_in(path, builder.schema, required=REQUIRED["requests"]) for *_, paths in trials for path in paths)
    # The next file is checked while this one is read, since each comes from the disk once.
    read = (tables for tables, _ in pairwise(chain(map(read_ahead, each), [iter(())])))
    for run, files, number, has_info, accounts, paths in trials:
        for path in paths:
            before, nameless, foreign = builder.rows, 0, 0
            for rows in next(read):
                if isinstance(rows, str):
                    files.add(path, rows)
                    continue
                nameless += rows.column("trial").null_count
                foreign += pc.sum(pc.not_equal(rows.column("trial"), number)).as_py() or 0
                builder.add(run.with_own_names(rows, number))
            process = path.name.partition(".")[0].replace("requests-", "generator-")
            if process in accounts:
                accounts[process]["rows"] = builder.rows - before
            if nameless and has_info:  # bare tables need not name their trial
                files.add(path, f"has {counted(nameless, 'request')} without a trial")
            if foreign and len(run.folders) > 1:  # their ids are compared with those of this trial alone
                files.add(path, f"has {counted(foreign, 'request')} of another trial")
        builder.end_trial(named)
    return builder.columns(), [account for *_, accounts, _ in trials for account in accounts.values()]


def design_of(experiment: Mapping[str, Any], infos: Iterable[Mapping[str, Any] | None]) -> str:
    """Return how the load was sent to the arms, as trials say, else as the experiment does."""
    reported = first_of((info or {} for info in infos), "design")
    return str(reported or table(experiment, "traffic").get("design") or MIRRORED)


def _check_memory(opened: Sequence[tuple[RecordedRun, _Files]]) -> None:
    """Raise RecordError if the analysis takes more memory than is free."""
    trials = [table_files(folder, "requests") for run, _ in opened for folder in run.folders]
    sizes = [sum(path.stat().st_size for path in paths) for paths in trials]
    size, needed = sum(sizes), _BYTES_A_BYTE * sum(sizes) + _OF_A_TRIAL * max(sizes)
    if needed > (free := psutil.virtual_memory().available):
        raise RecordError(
            f"{opened[0][0].name} holds {size / 1e9:.1f} GB of requests, whose analysis takes about {needed / 1e9:.1f} "
            f"GB of memory, and {free / 1e9:.1f} GB are free: analyse it on a machine with more"
        )
