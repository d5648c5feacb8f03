"""The records of a run in other formats: Parquet, JSON Lines, CSV. Batch by batch, so a run of any size goes through.

The outcome is laid out as a run directory is, each table under its own name with another ending and the small files
that tell of the run beside it. From Parquet and JSON Lines it is judged as the run itself is.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from analysis.records.documents import read_document, write_document
from analysis.records.run_records import shifted
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS, STEPS
from analysis.records.sums import state, sums_path
from analysis.records.tables import RecordError, read_pieces

TABLES = {"requests": REQUESTS, "steps": STEPS, "compile_events": COMPILE_EVENTS}
FORMATS = ("parquet", "jsonl", "csv")

_ROWS_AT_ONCE = 4096
_SMALL_FILES = ("experiment.toml", "environment.json", "parity.json")
_SMALL_FILES_OF_TRIALS = ("trial.json", "generator-*.json", "compiler.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote: rows of each table, and what was wrong with the records, in words."""

    rows: dict[str, int]
    problems: tuple[str, ...]


class _Sink(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


def export(run_dir: Path, out: Path, *, form: str, tables: Sequence[str] = tuple(TABLES)) -> Exported:
    """`out`, a new directory, holds `tables` of the run in `form` (one of FORMATS) and all that tells of the run.

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
    folders = sorted(path for path in run_dir.glob("trial-*") if path.is_dir()) or [run_dir]
    found = [(folder, name, path) for folder in folders for name in tables for path in _files(folder, name)]
    if not found:
        raise RecordError(f"{run_dir.name} holds none of the tables {', '.join(tables)}: give a run directory")
    rows = dict.fromkeys(tables, 0)
    problems: list[str] = _told_problems(run_dir)
    for folder, name, path in found:
        target = out / folder.relative_to(run_dir) / f"{path.name.partition('.')[0]}.{form}"
        target.parent.mkdir(parents=True, exist_ok=True)
        offset_ns = _clock_offset(path)[1] if name == "requests" else 0
        sink = _open_sink(target, TABLES[name], form)

        def write(table: pa.Table, _: int, *, name: str = name, offset_ns: int = offset_ns, sink: _Sink = sink) -> None:
            for batch in table.to_batches(_ROWS_AT_ONCE):
                sink.write(shifted(batch, offset_ns))
                rows[name] += batch.num_rows

        try:
            found_problems = read_pieces(path, TABLES[name], write)
        finally:
            sink.close()
        if sums_path(path).exists():
            state(target)
        problems += [f"{path.relative_to(run_dir).as_posix()} {problem}" for problem in found_problems]
    for pattern in _SMALL_FILES:
        _copy(run_dir, run_dir, out, pattern)
    for folder in folders:
        for pattern in _SMALL_FILES_OF_TRIALS:
            _copy(folder, run_dir, out, pattern)
    for folder, _, path in found:
        account, offset_ns = _clock_offset(path)
        if offset_ns:  # the rows are in the run's time now
            account = {**account, "clock": {**account["clock"], "applied": True}}
            target = out / folder.relative_to(run_dir) / f"generator-{_process(path)}.json"
            _write(target, account, like=path)
    told = {"source": run_dir.resolve().name, "format": form, "rows": rows, "problems": problems}
    _write(out / "export.json", told, like=found[0][2])
    return Exported(rows=rows, problems=tuple(problems))


def _files(folder: Path, name: str) -> list[Path]:
    for ending in ("arrow", "parquet", "jsonl"):
        found = sorted(folder.glob(f"{name}*.{ending}"))
        if found:
            return found
    return []


def _process(path: Path) -> str:
    return path.name.removeprefix("requests-").partition(".")[0]


def _clock_offset(path: Path) -> tuple[dict[str, Any], int]:
    """The account of the load process that wrote `path`, and what is still to be added to its times."""
    account = _content(path.parent / f"generator-{_process(path)}.json")
    clock = account.get("clock")
    if not isinstance(clock, Mapping) or clock.get("applied") is not False:
        return {}, 0
    offset_ns = clock.get("offset_ns")
    return account, offset_ns if isinstance(offset_ns, int) else 0


def _write(path: Path, content: dict[str, Any], *, like: Path) -> None:
    """The JSON file says what it should hold where the table at `like` does: of a run, all files do or none."""
    if sums_path(like).exists():
        write_document(path, content, indent=2)
    else:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _content(path: Path) -> dict[str, Any]:
    document = read_document(path)
    return (document.content if document is not None else None) or {}


def _copy(folder: Path, run_dir: Path, out: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        target = out / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _told_problems(run_dir: Path) -> list[str]:
    told = _content(run_dir / "export.json").get("problems")
    return [str(problem) for problem in told] if isinstance(told, list) else []


# Writing


class _Parquet:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pa.parquet.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        if sum(item.num_rows for item in self._waiting) >= _ROWS_AT_ONCE:  # a row group a batch would be thousands
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema).combine_chunks())
            self._waiting = []


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, batch: pa.RecordBatch) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in batch.to_pylist())

    def close(self) -> None:
        self._file.close()


class _Csv:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(schema.names)

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            self._writer.writerow(_cell(value) for value in row.values())

    def close(self) -> None:
        self._file.close()


def _cell(value: Any) -> Any:
    """Null is an empty cell; numbers of a list stand with spaces between, texts of a list as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        numbers = all(isinstance(item, int) for item in value)
        return " ".join(map(str, value)) if numbers else json.dumps(value, ensure_ascii=False)
    return value


def _open_sink(path: Path, schema: pa.Schema, form: str) -> _Sink:
    if form == "parquet":
        return _Parquet(path, schema)
    return _JsonLines(path) if form == "jsonl" else _Csv(path, schema)
