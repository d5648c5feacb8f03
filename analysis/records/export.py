"""The records of a run as Parquet, laid out as a run directory that is judged as the run itself is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from analysis.records.asked_answers import PATTERN as ANSWERS
from analysis.records.documents import content_of, read_document, write_document, write_json
from analysis.records.joining import joins_runs
from analysis.records.run_records import (
    EXPORT,
    clock_offset_ns,
    earlier_problems,
    load_process,
    shifted,
    table_files,
    trial_folders,
)
from analysis.records.schemas import TABLES
from analysis.records.tables import RecordError, crc32_of, read_table

_DOCUMENTS = ("experiment.toml", "environment.json", "parity.json", "frontier.json")
_DOCUMENTS_OF_TRIALS = ("trial.json", "generator-*.json", "compiler.json", ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote: rows of each table, and what was wrong with the records, in words."""

    rows: dict[str, int]
    problems: tuple[str, ...]


def export(run_dir: Path, out: Path, *, tables: Sequence[str] = tuple(TABLES), empty: Sequence[str] = ()) -> Exported:
    """Write `tables` and the documents of the run to `out`, a new directory. Columns named in `empty` are null there.

    Raises RecordError for a directory that cannot be used.
    """
    if not run_dir.is_dir():
        raise RecordError(f"{run_dir} is not a directory: give the directory of a run")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} exists already: give a new --out")
    if joins_runs(run_dir):
        raise RecordError(f"{run_dir} joins runs and holds no records itself: export each of its runs")
    folders = trial_folders(run_dir)
    sources = [(folder, name, path) for folder in folders for name in tables for path in table_files(folder, name)]
    if not sources:
        raise RecordError(f"{run_dir.name} holds none of the tables {', '.join(tables)}: give a run directory")
    documents = [path for pattern in _DOCUMENTS for path in run_dir.glob(pattern)]
    documents += [path for folder in folders for pattern in _DOCUMENTS_OF_TRIALS for path in folder.glob(pattern)]
    for path in documents:
        target = out / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    rows = dict.fromkeys(tables, 0)
    problems = earlier_problems(run_dir)
    for folder, name, path in sources:
        table, wrong = read_table(path, TABLES[name])
        problems += [f"{path.relative_to(run_dir).as_posix()} {problem}" for problem in wrong]
        rows[name] += table.num_rows
        target = out / folder.relative_to(run_dir)
        target.mkdir(parents=True, exist_ok=True)
        if name == "requests":
            table = _in_run_time(table, target / f"generator-{load_process(path)}.json")
        for index, item in enumerate(table.schema):
            if item.name in empty:
                table = table.set_column(index, item, pa.nulls(table.num_rows, item.type))
        written = target / f"{path.name.partition('.')[0]}.parquet"
        if written.exists():
            raise RecordError(f"{path} and another file of its table have one name: rename one")
        _write_parquet(table, written)
    record = {"source": run_dir.resolve().name, "rows": rows, "problems": problems}
    write_document(out / EXPORT, record, indent=2)
    state_tables(out)
    return Exported(rows=rows, problems=tuple(problems))


def state_tables(directory: Path) -> None:
    """Write the CRC-32 of each table of the export in `directory` into its export.json."""
    tables = [path for folder in trial_folders(directory) for name in TABLES for path in table_files(folder, name)]
    files = {path.relative_to(directory).as_posix(): f"{crc32_of(path):08x}" for path in tables}
    write_document(directory / EXPORT, content_of(directory / EXPORT) | {"files": files}, indent=2)


def _in_run_time(requests: pa.Table, account_path: Path) -> pa.Table:
    """Return the requests on the clock of the run, and note in the copied account of their load process that they
    are."""
    document = read_document(account_path)
    account = (document and document.content) or {}
    if document is None or not (offset_ns := clock_offset_ns(account)):
        return requests
    account["clock"] = {**account["clock"], "applied": True}
    (write_document if document.stated else write_json)(account_path, account, indent=2)
    return shifted(requests, offset_ns)


def _write_parquet(table: pa.Table, path: Path) -> None:
    leaves = {field.name: field.type for field in table.schema}
    leaves |= {f"{name}.list.element": kind.value_type for name, kind in leaves.items() if pa.types.is_list(kind)}
    pa.parquet.write_table(
        table,
        path,
        compression="zstd",
        write_page_checksum=True,
        # Times rise by little: their differences take half the space.
        column_encoding={name: "DELTA_BINARY_PACKED" for name, kind in leaves.items() if pa.types.is_integer(kind)},
        use_dictionary=[name for name, kind in leaves.items() if pa.types.is_string(kind)],
    )
