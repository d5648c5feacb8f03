"""The records of a run as they lie in its directory: documents, tables, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.columns import Columns
from analysis.records.documents import Document, read_document, read_toml
from analysis.records.plain_values import mapping, number
from analysis.records.schemas import (
    BED,
    COMPILE_EVENTS,
    JUDGED_REQUESTS,
    QUEUE_COLUMNS,
    REQUESTS,
    REQUIRED_BED_COLUMNS,
    REQUIRED_EVENT_COLUMNS,
    REQUIRED_REQUEST_COLUMNS,
    REQUIRED_STEP_COLUMNS,
    STEPS,
)
from analysis.records.sums import sums_path
from analysis.records.tables import RecordError, Take, one_line, read_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run directory holds."""

    directory: Path
    experiment: dict[str, Any]
    environment: dict[str, Any]
    trials: tuple[dict[str, Any], ...]  # trial.json of each trial, in order; empty for bare tables
    generators: tuple[dict[str, Any], ...]
    requests: pa.Table  # the columns of REQUESTS that are judged by
    events: pa.Table | None  # None: no such file, so nothing is known of compiles
    steps: pa.Table | None
    bed: pa.Table | None  # samples of the machines; None: nobody watched them
    problems: tuple[str, ...]  # what is torn, damaged or unreadable, in words
    stated: bool = False  # its files say what they should hold
    parity: dict[str, Any] | None = None  # parity.json: the arms measured before the first trial; None if they were not


def read_run(directory: Path) -> RunRecords:
    """The records under `directory`: trial-NN/ folders, or the tables side by side in it.

    Raises RecordError when there is no table of requests or one that cannot be read.
    """
    if not directory.is_dir():
        raise RecordError(f"{directory} is not a directory: give the directory of a run")
    files = _Files(directory)
    experiment = files.toml(directory / "experiment.toml")
    environment = files.document(directory / "environment.json") or {}
    folders = trial_folders(directory)
    tables: dict[str, list[pa.Table]] = {}
    trials: list[dict[str, Any]] = []
    numbers: list[int] = []  # of each folder's trial
    for position, folder in enumerate(folders, start=1):
        info = files.document(folder / "trial.json")
        if info is None and (folder / "trial.json").exists():
            info = {}
        elif info is None and folder != directory:
            info = {"complete": False}
        numbers.append(_trial_number(info, folder, position))
        if info is not None:
            trials.append({**info, "trial": numbers[-1]})
        for stem, schema, required in (
            ("compile_events", COMPILE_EVENTS, REQUIRED_EVENT_COLUMNS),
            ("steps", STEPS, REQUIRED_STEP_COLUMNS),
            ("bed", BED, REQUIRED_BED_COLUMNS),
        ):
            for path in table_files(folder, stem):
                pieces = tables.setdefault(stem, [schema.empty_table()])
                take = _taking(pieces.append, numbers[-1])
                files.table(stem, path, read_pieces(path, schema, take, required=required))
    events, steps, bed = (
        pa.concat_tables(tables[stem]) if stem in tables else None for stem in ("compile_events", "steps", "bed")
    )
    # Most of the memory that judging takes is that of requests, so that only columns are read that are used.
    unused = () if may_serve(events) else QUEUE_COLUMNS
    judged = pa.schema(field for field in JUDGED_REQUESTS if field.name not in unused)
    requests = None
    generators: list[dict[str, Any]] = []
    for trial, folder in zip(numbers, folders, strict=True):
        own: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("generator-*.json")):
            generator = files.document(path)
            if generator is not None:
                own[path.stem.removeprefix("generator-")] = {**generator, "trial": trial}
        for path in table_files(folder, "requests"):
            requests = requests or Columns(judged)
            account = own.get(load_process(path))
            if account is not None:
                account["rows"] = 0
            take = _taking(requests.append, trial, account)
            problems = read_pieces(path, judged, take, required=REQUIRED_REQUEST_COLUMNS, written=REQUESTS)
            files.table("requests", path, problems)
        generators += own.values()
        files.document(folder / "compiler.json")
    exported = files.document(directory / "export.json") or {}
    parity = files.document(directory / "parity.json")
    if requests is None:
        raise RecordError(f"{directory.name} holds no requests*.arrow, .parquet or .jsonl: give a run directory")
    return RunRecords(
        directory=directory,
        experiment=experiment,
        environment=environment,
        trials=tuple(trials),
        generators=tuple(generators),
        requests=requests.table(),
        events=events,
        steps=steps,
        bed=bed,
        # What was wrong with the records before they were exported does not show in the files any more.
        problems=(*files.problems(), *earlier_problems(exported)),
        stated=files.stated,
        parity=parity,
    )


def _taking(take: Take, number: int, account: dict[str, Any] | None = None) -> Take:
    """What gives rows of the trial `number` to `take`, in the run's time; `account` as in `_of_generator`."""
    return lambda table: take(_with_trial(_of_generator(table, account), number))


def may_serve(events: pa.Table | None) -> bool:
    """Whether any event may be of the time in which the arms served."""
    if events is None or not events.num_rows:
        return False
    return not pc.all(pc.fill_null(pc.equal(events.column("phase"), "warmup"), False)).as_py()


class _Files:
    """The files of a run as they are read: what is wrong with each, and which of them say what they should hold."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._problems: list[str] = []
        self._documents: dict[str, bool] = {}  # of each file, whether it says what it should hold
        self._tables: dict[str, dict[str, bool]] = {}  # the same, by table

    def document(self, path: Path) -> dict[str, Any] | None:
        """The JSON document at `path`; None where there is none, or none that can be believed."""
        return self._content(path, read_document(path))

    def toml(self, path: Path) -> dict[str, Any]:
        """The TOML document at `path`, empty where there is none. RecordError where it cannot be read."""
        try:
            return self._content(path, read_toml(path)) or {}
        except (OSError, ValueError) as error:
            raise RecordError(f"{path.name} cannot be read ({one_line(error)}): correct it") from error

    def _content(self, path: Path, document: Document | None) -> dict[str, Any] | None:
        if document is None:
            return None
        if document.problem:
            self._add(path, document.problem)
        if document.content is not None:
            self._documents[self._label(path)] = document.stated
        return document.content

    def table(self, stem: str, path: Path, problems: Sequence[str]) -> None:
        """The file at `path` of the table `stem` was read, with these problems."""
        for problem in problems:
            self._add(path, problem)
        self._tables.setdefault(stem, {})[self._label(path)] = sums_path(path).exists()

    @property
    def stated(self) -> bool:
        """Whether the tables say what they should hold."""
        return any(any(kind.values()) for kind in self._tables.values())

    def problems(self) -> list[str]:
        """All that is wrong. Where some files of a kind say what they should hold, one that does not was changed."""
        kinds = [kind for kind in (self._documents, *self._tables.values()) if any(kind.values())]
        silent = [name for kind in kinds for name, stated in kind.items() if not stated]
        return self._problems + [f"{name} does not say what it should hold, as others of the run do" for name in silent]

    def _add(self, path: Path, problem: str) -> None:
        self._problems.append(f"{self._label(path)} {problem}")

    def _label(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()


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


def _of_generator(table: pa.Table, account: dict[str, Any] | None) -> pa.Table:
    """Some requests of one load process in the run's time; its account then counts them among its rows."""
    if account is None:
        return table
    account["rows"] += table.num_rows
    return shifted(table, clock_offset_ns(account))


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
