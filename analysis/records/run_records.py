"""The records of a run as they lie in its directory: documents, tables, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records import joining
from analysis.records.asked_answers import PATTERN as ANSWERS
from analysis.records.documents import Document, content_of, read_document, read_toml
from analysis.records.joining import JoinedRun, RunDocuments, RunList, read_run_list
from analysis.records.plain_values import mapping, number
from analysis.records.schemas import JUDGED_REQUESTS, REQUIRED, TABLES
from analysis.records.tables import NOT_AS_WRITTEN, RecordError, crc32_of, one_line, read_end, read_table
from analysis.records.weight_journal import WeightChange, read_journal
from analysis.wording import counted

EXPORT = "export.json"


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
    bed: pa.Table | None  # samples of the machines; None if nothing sampled them
    problems: tuple[str, ...]  # what is torn, damaged or unreadable, in words
    server_load: pa.Table | None = None  # as external arms report it; None if none does
    stated: bool = False  # its files state what they should hold
    parity: dict[str, Any] | None = None  # parity.json: the arms measured before the first trial; None if they were not
    answers: tuple[dict[str, Any], ...] = ()  # of external arms to prompts that all were asked, a trial and an arm each
    search: dict[str, Any] | None = None  # frontier.json: how a search, or several, went on; None if none was made
    stepless: frozenset[int] = frozenset()  # trials of runs that were kept without their engine steps
    weights: tuple[WeightChange, ...] = ()  # empty if they never changed
    runs: tuple[JoinedRun, ...] = ()  # that were read, in order of time; the one alone if none were joined
    differences: tuple[str, ...] = ()  # between joined runs, as they were accepted

    @property
    def joined(self) -> bool:
        """Whether these are the records of several runs."""
        return any(run.place for run in self.runs)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that hold trials."""
        return tuple(run.documents.directory for run in self.runs) or (self.directory,)


def read_run(directory: Path) -> RunRecords:
    """Return the records under `directory`: trial-NN/ folders, tables in it, or the runs that it joins.

    Raises RecordError if there is no table of requests or one that cannot be read, and for runs that may not be joined.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    listed = read_run_list(directory)
    if listed is None:
        documents, files = _documents(directory, "")
        return _read(directory, [joining.one_run(documents)], {documents.directory: files})
    opened = _opened(listed)
    runs = [documents for documents, _ in opened]
    differences = joining.check_joinable(runs, listed.accepted)
    files_of = {documents.directory: files for documents, files in opened}
    return _read(directory, joining.joined_runs(runs), files_of, differences)


def read_together(directories: Sequence[Path]) -> RunRecords:
    """Return the records of runs that may be of different experiments, with the trials and ids of joined runs."""
    opened = _opened(RunList(directories=tuple(directories)))
    files_of = {documents.directory: files for documents, files in opened}
    return _read(directories[-1], joining.joined_runs([documents for documents, _ in opened]), files_of)


def check_runs(listed: RunList) -> tuple[RunDocuments, ...]:
    """Return the documents of the listed runs. Raises RecordError for runs that may not be joined or hold no
    requests."""
    documents = tuple(run for run, _ in _opened(listed))
    for run in documents:
        if not any(table_files(folder, "requests") for folder in run.folders):
            raise RecordError(f"{run.name} holds no requests*.arrow, .parquet or .jsonl: give another run")
    joining.check_joinable(documents, listed.accepted)
    return documents


def load_process(path: Path) -> str:
    """Return the name of the load process that wrote the requests at `path`."""
    return path.name.removeprefix("requests-").partition(".")[0]


def clock_offset_ns(account: Mapping[str, Any]) -> int:
    """Return what the times of a load process still lack to the run's time, by its account: a file that was copied from
    the process's own disk is in its host's time."""
    clock = mapping(account.get("clock"))
    offset_ns = number(clock.get("offset_ns"))
    return int(clock["offset_ns"]) if clock.get("applied") is False and offset_ns is not None else 0


def shifted(rows: Any, offset_ns: int) -> Any:
    """Return the requests, a table or a batch, with `offset_ns` added to every time that the load process took."""
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns") if offset_ns else ():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), pc.add(rows.column(place), offset_ns))
    return rows


def trial_folders(directory: Path) -> list[Path]:
    """Return the folders of the trials, or the directory itself if it has none."""
    return sorted(path for path in directory.glob("trial-*") if path.is_dir()) or [directory]


def table_files(folder: Path, stem: str) -> list[Path]:
    """Return the files of a table, of every format."""
    return sorted(path for suffix in ("arrow", "parquet", "jsonl") for path in folder.glob(f"{stem}*.{suffix}"))


# --- Files that state what they should hold ---------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Files:
    """The files of the run in `directory` as they are read. With a `name`, each is called by it and its own path."""

    directory: Path
    name: str
    exported: Mapping[str, Any]  # export.json, which states what exported tables hold
    problems: list[str] = field(default_factory=list)
    documents: dict[str, bool] = field(default_factory=dict)  # whether each file states what it should hold
    tables: dict[str, bool] = field(default_factory=dict)

    def add(self, path: Path, problem: str) -> None:
        """Add what is wrong with the file or folder at `path`, in words that follow its name."""
        self.problems.append(f"{self._label(path)} {problem}")

    def document(self, path: Path) -> dict[str, Any] | None:
        """Return the JSON document at `path`; None if there is none, or none that can be believed."""
        return self._content(path, read_document(path))

    def toml(self, path: Path) -> dict[str, Any]:
        """Return the TOML document at `path`, empty if there is none. Raises RecordError if it cannot be read."""
        try:
            return self._content(path, read_toml(path)) or {}
        except (OSError, ValueError) as error:
            raise RecordError(f"{self._label(path)} cannot be read ({one_line(error)}): correct it") from error

    def _content(self, path: Path, document: Document | None) -> dict[str, Any] | None:
        if document is None:
            return None
        if document.problem:
            self.add(path, document.problem)
        if document.content is not None:
            self.documents[self._label(path)] = document.stated
        return document.content

    def table(self, path: Path, schema: pa.Schema, *, required: Sequence[str]) -> pa.Table:
        """Return the rows of the file, as `read_table` has them. Raises RecordError and OSError."""
        stated = mapping(self.exported.get("files")).get(path.relative_to(self.directory).as_posix())
        if stated is not None and stated != f"{crc32_of(path):08x}":
            self.add(path, f"{NOT_AS_WRITTEN}: its rows are not used")
            self.tables[self._label(path)] = True
            return schema.empty_table()
        rows, problems = read_table(path, schema, required=required)
        for problem in problems:
            self.add(path, problem)
        states = bool(stated or read_end(path))
        if states or not problems:  # what was cut off lost what it stated
            self.tables[self._label(path)] = states
        return rows

    @property
    def stated(self) -> bool:
        """Whether the tables state what they should hold."""
        return any(self.tables.values())

    @property
    def changed(self) -> list[str]:
        """What a changed file shows: it states nothing, and others of the run do."""
        any_document = any(self.documents.values())
        silent = [name for name, states in self.documents.items() if any_document and not states]
        silent += [name for name, states in self.tables.items() if (any_document or self.stated) and not states]
        return [f"{name} does not state what it should hold, as others of the run do" for name in silent]

    def _label(self, path: Path) -> str:
        own = path.relative_to(self.directory).as_posix()
        return f"{self.name}/{own}" if self.name else own


# --- Reading ----------------------------------------------------------------------------------------------------------


def _opened(listed: RunList) -> list[tuple[RunDocuments, _Files]]:
    named = zip(listed.directories, joining.names_of(listed.directories), strict=True)
    opened = [_documents(directory, name) for directory, name in named]
    # In order of time, so that the order in which they were given does not matter.
    return sorted(opened, key=lambda run: run[0].order)


def _documents(directory: Path, name: str) -> tuple[RunDocuments, _Files]:
    """Read the documents of the run in `directory`; `name` precedes what is reported of its files."""
    export = read_document(directory / EXPORT)
    files = _Files(directory=directory, name=name, exported=(export and export.content) or {})
    if export is not None and export.problem:
        files.add(directory / EXPORT, export.problem)
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


def _trial_number(info: Mapping[str, Any] | None, folder: Path, position: int) -> int:
    given = (info or {}).get("trial")
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 1 << 31:
        return given
    name = folder.name.removeprefix("trial-")
    return int(name) if name.isdecimal() else position


def _read(
    directory: Path, runs: Sequence[JoinedRun], files_of: Mapping[Path, _Files], differences: Sequence[str] = ()
) -> RunRecords:
    """Return the records of the runs, in their order, each with its own files."""
    tables = {stem: list(_tables(runs, files_of, stem)) for stem in ("compile_events", "steps", "bed", "server_load")}
    events, steps, bed, server_load = (pa.concat_tables(rows) if rows else None for rows in tables.values())
    if events is not None:
        for run, _, folder in _folders(runs):
            if not table_files(folder, "compile_events"):  # which would read as no compile in this trial
                files_of[run.documents.directory].add(folder, "holds no compile_events, as other trials do")
    requests: list[pa.Table] = []
    generators: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for run, own_number, folder in _folders(runs):
        files, trial = files_of[run.documents.directory], run.trials[own_number]
        accounts: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("generator-*.json")):
            if (account := files.document(path)) is not None:
                accounts[path.stem.removeprefix("generator-")] = {**account, "trial": trial}
        for path in table_files(folder, "requests"):
            rows = files.table(path, JUDGED_REQUESTS, required=REQUIRED["requests"])
            nameless = rows.column("trial").null_count
            if nameless and (folder / "trial.json").exists():  # bare tables need not name their one trial
                files.add(path, f"has {counted(nameless, 'request')} without a trial")
            if own := accounts.get(load_process(path)):
                own["rows"] = rows.num_rows
                rows = shifted(rows, clock_offset_ns(own))
            requests.append(run.with_own_names(_with_trial(rows, own_number)))
        generators += accounts.values()
        files.document(folder / "compiler.json")
        for path in sorted(folder.glob(ANSWERS)):
            if (document := files.document(path)) is not None:
                answers.append({**document, "trial": trial})
    if not requests:
        raise RecordError(f"{directory.name} holds no requests*.arrow, .parquet or .jsonl: give a run directory")
    documents = [run.documents for run in runs]
    joined = bool(runs[0].place)
    return RunRecords(
        directory=directory,
        experiment=joining.joined_experiment(runs) if joined else dict(documents[0].experiment),
        environment=joining.joined_environment(runs),
        trials=_trials(runs),
        generators=tuple(generators),
        requests=pa.concat_tables(requests),
        events=events,
        steps=steps,
        bed=bed,
        server_load=server_load,
        problems=tuple(problem for run in runs for problem in _problems(run, files_of[run.documents.directory])),
        stated=all(files.stated for files in files_of.values()),
        parity=joining.joined_parity([own.parity for own in documents]),
        answers=tuple(answers),
        search=joining.joined_search([own.search for own in documents]),
        stepless=_stepless(runs),
        weights=() if joined else read_journal(documents[0].directory)[0],
        runs=tuple(runs),
        differences=tuple(differences),
    )


def _tables(runs: Sequence[JoinedRun], files_of: Mapping[Path, _Files], stem: str) -> Iterator[pa.Table]:
    for run, own_number, folder in _folders(runs):
        for path in table_files(folder, stem):
            rows = files_of[run.documents.directory].table(path, TABLES[stem], required=REQUIRED[stem])
            yield run.with_own_names(_with_trial(rows, own_number))


def _folders(runs: Iterable[JoinedRun]) -> Iterator[tuple[JoinedRun, int, Path]]:
    """Yield each folder of each run, with its trial's number in the run."""
    for run in runs:
        for own, folder in zip(run.documents.numbers, run.documents.folders, strict=True):
            yield run, own, folder


def _with_trial(rows: pa.Table, number: int) -> pa.Table:
    place = rows.schema.get_field_index("trial")
    return rows.set_column(place, rows.schema.field(place), pc.fill_null(rows.column(place), number))


def _trials(runs: Sequence[JoinedRun]) -> tuple[dict[str, Any], ...]:
    """Return trial.json of each trial, in order, with its new number."""
    trials = [
        {**info, "trial": run.trials[own]}
        for run in runs
        for own, info in zip(run.documents.numbers, run.documents.infos, strict=True)
        if info is not None
    ]
    return tuple(sorted(trials, key=lambda info: info["trial"]))


def _stepless(runs: Sequence[JoinedRun]) -> frozenset[int]:
    """Return the trials of runs without any table of steps. If one trial of a run has it, those of its others are
    lost."""
    without = (run for run in runs if not any(table_files(folder, "steps") for folder in run.documents.folders))
    return frozenset(trial for run in without for trial in run.trials.values())


def _problems(run: JoinedRun, files: _Files) -> list[str]:
    """Return what is wrong with the run. What was wrong before an export does not show in the files any more."""
    front = f"{run.documents.name}: " if run.place else ""
    own = [*filter(None, [read_journal(run.documents.directory)[1]]), *earlier_problems(run.documents.directory)]
    return [*files.problems, *files.changed, *(f"{front}{problem}" for problem in own)]


def earlier_problems(directory: Path) -> list[str]:
    """Return what was wrong with the records of a run before they were exported to `directory`."""
    problems = content_of(directory / EXPORT).get("problems")
    return [str(problem) for problem in problems] if isinstance(problems, list) else []
