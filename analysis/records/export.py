"""The records of a run in other formats: Parquet, JSON Lines, CSV.

The outcome is laid out as a run directory is, each table under its own name with another ending and the small files
that describe the run beside it. From Parquet and JSON Lines it is judged as the run itself is.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from analysis.records.asked_answers import PATTERN as ANSWERS
from analysis.records.checksums import crc32_of
from analysis.records.documents import content_of, read_document, write_document, write_json
from analysis.records.run_files import EXPORT
from analysis.records.run_list import RUN_LIST
from analysis.records.run_records import (
    clock_offset_ns,
    earlier_problems,
    load_process,
    shifted,
    table_files,
    trial_folders,
)
from analysis.records.schemas import BED, COMPILE_EVENTS, REQUESTS, SERVER_LOAD, STEPS
from analysis.records.tables import RecordError, read_table

TABLES = {
    "requests": REQUESTS,
    "steps": STEPS,
    "compile_events": COMPILE_EVENTS,
    "bed": BED,
    "server_load": SERVER_LOAD,
}
FORMATS = ("parquet", "jsonl", "csv")

_ROWS_AT_ONCE = 4096
_SMALL_FILES = ("experiment.toml", "environment.json", "parity.json", "frontier.json")
_SMALL_FILES_OF_TRIALS = ("trial.json", "generator-*.json", "compiler.json", ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote: rows of each table, and what was wrong with the records, in words."""

    rows: dict[str, int]
    problems: tuple[str, ...]


def export(
    run_dir: Path, out: Path, *, form: str, tables: Sequence[str] = tuple(TABLES), empty: Sequence[str] = ()
) -> Exported:
    """`out`, a new directory, holds `tables` of the run in `form` (one of FORMATS) and the documents of the run.

    Columns called as in `empty` hold nothing there.
    Raises RecordError for a format, table or directory that cannot be used.
    """
    if form not in FORMATS:
        raise RecordError(f'format "{form}" is unknown: use {", ".join(FORMATS)}')
    for name in tables:
        if name not in TABLES:
            raise RecordError(f'table "{name}" is unknown: use one or more of {", ".join(TABLES)}')
    if not tables:
        raise RecordError(f"no table is named: give one or more of {', '.join(TABLES)}")
    if not run_dir.is_dir():
        raise RecordError(f"{run_dir} is not a directory: give the directory of a run")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} exists already: give a new --out")
    if (run_dir / RUN_LIST).exists():
        raise RecordError(f"{run_dir} joins runs and holds no records itself: export each of its runs")
    folders = trial_folders(run_dir)
    sources = [(folder, name, path) for folder in folders for name in tables for path in table_files(folder, name)]
    if not sources:
        raise RecordError(f"{run_dir.name} holds none of the tables {', '.join(tables)}: give a run directory")
    rows = dict.fromkeys(tables, 0)
    problems = earlier_problems(content_of(run_dir / EXPORT))
    for folder, name, path in sources:
        target = out / folder.relative_to(run_dir) / f"{path.name.partition('.')[0]}.{form}"
        offset_ns = clock_offset_ns(_account(path)) if name == "requests" else 0
        written, wrong = _convert(path, target, TABLES[name], form, offset_ns, empty)
        rows[name] += written
        problems += [f"{path.relative_to(run_dir).as_posix()} {problem}" for problem in wrong]
    small = [(run_dir, pattern) for pattern in _SMALL_FILES]
    small += [(folder, pattern) for folder in folders for pattern in _SMALL_FILES_OF_TRIALS]
    for path in (path for folder, pattern in small for path in folder.glob(pattern)):
        target = out / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for folder, name, path in sources:
        account = _account(path)
        if name == "requests" and clock_offset_ns(account):  # the rows are in the run's time now
            account = {**account, "clock": {**account["clock"], "applied": True}}
            copy = out / folder.relative_to(run_dir) / f"generator-{load_process(path)}.json"
            stated = (document := read_document(copy)) is not None and document.stated
            (write_document if stated else write_json)(copy, account, indent=2)
    record = {"source": run_dir.resolve().name, "format": form, "rows": rows, "problems": problems}
    write_document(out / EXPORT, record, indent=2)
    state_tables(out)
    return Exported(rows=rows, problems=tuple(problems))


def state_tables(directory: Path) -> None:
    """Write the CRC-32 of each table of the export in `directory` into its export.json."""
    tables = [path for folder in trial_folders(directory) for name in TABLES for path in table_files(folder, name)]
    files = {path.relative_to(directory).as_posix(): f"{crc32_of(path):08x}" for path in tables}
    write_document(directory / EXPORT, content_of(directory / EXPORT) | {"files": files}, indent=2)


def _convert(
    path: Path, target: Path, schema: pa.Schema, form: str, offset_ns: int, empty: Sequence[str]
) -> tuple[int, tuple[str, ...]]:
    """`target` holds the rows of `path`; how many, and what is wrong with `path`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    table, problems = read_table(path, schema)
    for index, field in enumerate(schema):
        if field.name in empty:
            table = table.set_column(index, field, pa.nulls(table.num_rows, field.type))
    table = shifted(table, offset_ns)
    if form == "parquet":
        _write_parquet(table, target)
    else:
        _write_lines(table, target, form)
    return table.num_rows, problems


def _account(path: Path) -> dict[str, Any]:
    """The account of the load process that wrote `path`."""
    return content_of(path.parent / f"generator-{load_process(path)}.json")


def _write_parquet(table: pa.Table, path: Path) -> None:
    leaves = {field.name: field.type for field in table.schema}
    leaves |= {f"{name}.list.element": kind.value_type for name, kind in leaves.items() if pa.types.is_list(kind)}
    pa.parquet.write_table(
        table,
        path,
        compression="zstd",
        write_page_checksum=True,
        # Times rise by little: their differences take half the room.
        column_encoding={name: "DELTA_BINARY_PACKED" for name, kind in leaves.items() if pa.types.is_integer(kind)},
        use_dictionary=[name for name, kind in leaves.items() if pa.types.is_string(kind)],
    )


def _write_lines(table: pa.Table, path: Path, form: str) -> None:
    """JSON Lines or CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        cells = csv.writer(file, lineterminator="\n")
        if form == "csv":
            cells.writerow(table.schema.names)
        for batch in table.to_batches(_ROWS_AT_ONCE):
            rows = batch.to_pylist()
            if form == "csv":
                cells.writerows(map(_cell, row.values()) for row in rows)
            else:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _cell(value: Any) -> Any:
    """Null is an empty cell; numbers of a list stand with spaces between, texts of a list as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        numbers = all(isinstance(item, int) for item in value)
        return " ".join(map(str, value)) if numbers else json.dumps(value, ensure_ascii=False)
    return value
