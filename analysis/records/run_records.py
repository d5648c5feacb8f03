"""The records of a run as they lie in its directory: documents, tables, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.asked_answers import PATTERN as ANSWERS
from analysis.records.joining import (
    JoinedRun,
    RunDocuments,
    check_joinable,
    joined_environment,
    joined_experiment,
    joined_parity,
    joined_runs,
    joined_search,
    names_of,
    one_run,
)
from analysis.records.plain_values import mapping, number
from analysis.records.run_files import RunFiles
from analysis.records.run_list import RunList, read_run_list
from analysis.records.schemas import (
    BED,
    COMPILE_EVENTS,
    JUDGED_REQUESTS,
    REQUIRED_BED_COLUMNS,
    REQUIRED_EVENT_COLUMNS,
    REQUIRED_REQUEST_COLUMNS,
    REQUIRED_SERVER_LOAD_COLUMNS,
    REQUIRED_STEP_COLUMNS,
    SERVER_LOAD,
    STEPS,
)
from analysis.records.tables import RecordError
from analysis.records.weight_journal import JOURNAL, WeightChange, read_weights, weights_problem
from analysis.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run directory holds."""

    directory: Path
    experiment: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[dict[str, Any], ...]  # trial.json of each trial, in order; empty for bare tables
    generators: tuple[dict[str, Any], ...]
    requests: pa.Table  # the columns of JUDGED_REQUESTS
    events: pa.Table | None  # None: no such file, so nothing is known of compiles
    steps: pa.Table | None  # None: of no trial
    bed: pa.Table | None  # samples of the machines; None: nobody watched them
    problems: tuple[str, ...]  # what is torn, damaged or unreadable, in words
    server_load: pa.Table | None = None  # of external arms by their own account; None where none shows it
    stated: bool = False  # its files state what they should hold
    parity: dict[str, Any] | None = None  # parity.json: the arms measured before the first trial; None if they were not
    answers: tuple[dict[str, Any], ...] = ()  # of external arms to prompts that all were asked, a trial and an arm each
    search: dict[str, Any] | None = None  # frontier.json: how a search, or several, went on; None where none was made
    stepless: frozenset[int] = frozenset()  # trials of runs that were kept without their engine steps
    weights: tuple[WeightChange, ...] = ()  # what each arm was to get from when on; empty where it never changed
    runs: tuple[JoinedRun, ...] = ()  # that were read, in order of time; the one alone where none were joined
    differences: tuple[str, ...] = ()  # between runs that were joined all the same, in words

    @property
    def joined(self) -> bool:
        """Whether these are the records of several runs."""
        return any(run.place for run in self.runs)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that hold trials."""
        return tuple(run.documents.directory for run in self.runs) or (self.directory,)


def read_run(directory: Path) -> RunRecords:
    """The records under `directory`: trial-NN/ folders, the tables side by side in it, or the runs that it joins.

    Raises RecordError when there is no table of requests or one that cannot be read, and for runs that may not be
    joined.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    listed = read_run_list(directory)
    if listed is None:
        documents, files = _documents(directory, "")
        return _read(directory, [one_run(documents)], {documents.directory: files})
    opened = _opened(listed)
    differences = check_joinable([documents for documents, _ in opened], listed.accepted)
    files_of = {documents.directory: files for documents, files in opened}
    return _read(directory, joined_runs([documents for documents, _ in opened]), files_of, differences)


def check_runs(listed: RunList) -> tuple[RunDocuments, ...]:
    """What the runs of the list say of themselves: they may be joined, and each holds requests. Else RecordError."""
    documents = tuple(run for run, _ in _opened(listed))
    for run in documents:
        if not any(table_files(folder, "requests") for folder in run.folders):
            raise RecordError(f"{run.name} holds no requests*.arrow, .parquet or .jsonl: give another run")
    check_joinable(documents, listed.accepted)
    return documents


def _opened(listed: RunList) -> list[tuple[RunDocuments, RunFiles]]:
    named = zip(listed.directories, names_of(listed.directories), strict=True)
    opened = [_documents(directory, name) for directory, name in named]
    # In order of time, so that the outcome does not hang on the order in which they were named.
    return sorted(opened, key=lambda run: (min(run[0].starts_ns.values(), default=0), run[0].name))


def _documents(directory: Path, name: str) -> tuple[RunDocuments, RunFiles]:
    """The documents of the run in `directory`; `name` is put in front of what is said of its files."""
    files = RunFiles(directory, name)
    experiment = files.toml(directory / "experiment.toml")
    environment = files.document(directory / "environment.json") or {}
    folders = trial_folders(directory)
    infos: list[dict[str, Any] | None] = []
    numbers: list[int] = []
    for position, folder in enumerate(folders, start=1):
        info = files.document(folder / "trial.json")
        if info is None and (folder / "trial.json").exists():
            info = {}
        elif info is None and folder != directory:
            info = {"complete": False}
        infos.append(info)
        numbers.append(_trial_number(info, folder, position))
    documents = RunDocuments(
        directory=directory,
        name=name or directory.resolve().name,
        experiment=experiment,
        environment=environment,
        parity=files.document(directory / "parity.json"),
        search=files.document(directory / "frontier.json"),
        folders=tuple(folders),
        numbers=tuple(numbers),
        infos=tuple(infos),
    )
    return documents, files


def _read(
    directory: Path, runs: Sequence[JoinedRun], files_of: Mapping[Path, RunFiles], differences: Sequence[str] = ()
) -> RunRecords:
    """The records of the runs, in their order, each with its own files."""
    tables: dict[str, list[pa.Table]] = {}
    silent: list[tuple[RunFiles, Path]] = []  # folders without compile events
    for run, number_in_run, folder in _folders(runs):
        files = files_of[run.documents.directory]
        for stem, (schema, required) in _TABLES.items():
            paths = table_files(folder, stem)
            if stem == "compile_events" and not paths:
                silent.append((files, folder))
            for path in paths:
                rows = _with_trial(files.table(stem, path, schema, required=required), number_in_run)
                tables.setdefault(stem, []).append(run.with_own_names(rows))
    events, steps, bed, server_load = (pa.concat_tables(tables[stem]) if stem in tables else None for stem in _TABLES)
    if events is not None:
        # No event of a trial would read as no compile in it.
        for files, folder in silent:
            files.add(folder, "holds no compile_events, as other trials do")
    requests: list[pa.Table] = []
    generators: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for run, number_in_run, folder in _folders(runs):
        files = files_of[run.documents.directory]
        own: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("generator-*.json")):
            generator = files.document(path)
            if generator is not None:
                own[path.stem.removeprefix("generator-")] = {**generator, "trial": run.trials[number_in_run]}
        for path in table_files(folder, "requests"):
            rows = files.table("requests", path, JUDGED_REQUESTS, required=REQUIRED_REQUEST_COLUMNS)
            nameless = rows.column("trial").null_count
            if nameless and (folder / "trial.json").exists():  # bare tables need not name their one trial
                files.add(path, f"has {counted(nameless, 'request')} without a trial")
            account = own.get(load_process(path))
            if account is not None:
                account["rows"] = rows.num_rows
                rows = shifted(rows, clock_offset_ns(account))
            requests.append(run.with_own_names(_with_trial(rows, number_in_run)))
        generators += own.values()
        files.document(folder / "compiler.json")
        for path in sorted(folder.glob(ANSWERS)):
            if (document := files.document(path)) is not None:
                answers.append({**document, "trial": run.trials[number_in_run]})
    if not requests:
        raise RecordError(f"{directory.name} holds no requests*.arrow, .parquet or .jsonl: give a run directory")
    joined = bool(runs[0].place)
    problems_of = [_problems(run, files_of[run.documents.directory]) for run in runs]
    return RunRecords(
        directory=directory,
        experiment=joined_experiment(runs) if joined else dict(runs[0].documents.experiment),
        environment=joined_environment(runs) if joined else dict(runs[0].documents.environment),
        trials=_trials(runs),
        generators=tuple(generators),
        requests=pa.concat_tables(requests),
        events=events,
        steps=steps,
        bed=bed,
        server_load=server_load,
        problems=tuple(problem for problems in problems_of for problem in problems),
        stated=all(files.stated for files in files_of.values()),
        parity=joined_parity(runs),
        answers=tuple(answers),
        search=joined_search(runs),
        stepless=_stepless(runs),
        weights=() if joined else read_weights(runs[0].documents.directory),
        runs=tuple(runs),
        differences=tuple(differences),
    )


_TABLES = {
    "compile_events": (COMPILE_EVENTS, REQUIRED_EVENT_COLUMNS),
    "steps": (STEPS, REQUIRED_STEP_COLUMNS),
    "bed": (BED, REQUIRED_BED_COLUMNS),
    "server_load": (SERVER_LOAD, REQUIRED_SERVER_LOAD_COLUMNS),
}


def _folders(runs: Iterable[JoinedRun]) -> Iterator[tuple[JoinedRun, int, Path]]:
    """Each folder of each run, with its trial's number in the run."""
    for run in runs:
        for own, folder in zip(run.documents.numbers, run.documents.folders, strict=True):
            yield run, own, folder


def _stepless(runs: Sequence[JoinedRun]) -> frozenset[int]:
    """The trials of runs without a table of steps. Where one trial of a run has it, those of its others are lost."""
    return frozenset(
        number
        for run in runs
        if not any(table_files(folder, "steps") for folder in run.documents.folders)
        for number in run.trials.values()
    )


def _trials(runs: Sequence[JoinedRun]) -> tuple[dict[str, Any], ...]:
    """trial.json of each trial, in order, with its number among all."""
    trials = [
        {**info, "trial": run.trials[own]}
        for run in runs
        for own, info in zip(run.documents.numbers, run.documents.infos, strict=True)
        if info is not None
    ]
    return tuple(trials if len(runs) == 1 else sorted(trials, key=lambda info: info["trial"]))


def _problems(run: JoinedRun, files: RunFiles) -> list[str]:
    """What is wrong with the run. What was before its records were exported does not show in the files any more."""
    front = f"{run.documents.name}: " if run.place else ""
    journal = weights_problem(run.documents.directory)
    own = [f"{JOURNAL} {journal}"] if journal else []
    return [*files.problems(), *(f"{front}{problem}" for problem in (*own, *earlier_problems(files.exported)))]


def earlier_problems(exported: Mapping[str, Any]) -> list[str]:
    """What was wrong with the records before they were exported, by export.json."""
    problems = exported.get("problems")
    return [str(problem) for problem in problems] if isinstance(problems, list) else []


def load_process(path: Path) -> str:
    """The name of the load process that wrote the requests at `path`."""
    return path.name.removeprefix("requests-").partition(".")[0]


def clock_offset_ns(account: Mapping[str, Any]) -> int:
    """What the times of a load process still lack to the run's time, by its account.

    A file that was copied from a load process's own disk is in that host's time.
    """
    clock = mapping(account.get("clock"))
    offset_ns: Any = clock.get("offset_ns")
    return int(offset_ns) if clock.get("applied") is False and number(offset_ns) is not None else 0


# The times of a request that its load process took; the others are the server's.
_CLIENT_TIMES = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")


def shifted(rows: Any, offset_ns: int) -> Any:
    """The requests, a table or a batch, with `offset_ns` added to every time that the load process took."""
    for name in _CLIENT_TIMES if offset_ns else ():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), pc.add(rows.column(place), offset_ns))
    return rows


def trial_folders(directory: Path) -> list[Path]:
    """The folders of the trials, or the directory itself where it has none."""
    return sorted(path for path in directory.glob("trial-*") if path.is_dir()) or [directory]


def table_files(folder: Path, stem: str) -> list[Path]:
    """The files of a table, all in the first format that there is."""
    by_suffix = (sorted(folder.glob(f"{stem}*.{suffix}")) for suffix in ("arrow", "parquet", "jsonl"))
    return next(filter(None, by_suffix), [])


def _trial_number(info: Mapping[str, Any] | None, folder: Path, position: int) -> int:
    given = (info or {}).get("trial")
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 31:
        return given
    name = folder.name.removeprefix("trial-")
    return int(name) if name.isdecimal() else position


def _with_trial(table: pa.Table, number: int) -> pa.Table:
    index = table.schema.get_field_index("trial")
    if not table.column(index).null_count:
        return table
    return table.set_column(index, table.schema.field(index), pc.fill_null(table.column(index), number))
