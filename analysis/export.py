"""The records of a run in other formats: Parquet, JSON Lines, CSV. Batch by batch, so a run of any size goes through.

The outcome is laid out as a run directory is, each table under its own name with another ending and the small files
that tell of the run beside it. From Parquet and JSON Lines it is judged as the run itself is.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from analysis.records import COMPILE_EVENTS, REQUESTS, STEPS, RecordError, conform, shifted

TABLES = {"requests": REQUESTS, "steps": STEPS, "compile_events": COMPILE_EVENTS}
FORMATS = ("parquet", "jsonl", "csv")

_ROWS_AT_ONCE = 4096
_SMALL_FILES = ("experiment.toml", "environment.json", "parity.json")
_SMALL_FILES_OF_TRIALS = ("trial.json", "generator-*.json", "compiler.json")
_BLOCK_BYTES = 16 << 20


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
        source = Source(path, TABLES[name])
        offset_ns = _clock_offset(path)[1] if name == "requests" else 0
        sink = _open_sink(target, TABLES[name], form)
        try:
            for batch in source:
                sink.write(shifted(batch, offset_ns))
                rows[name] += batch.num_rows
        finally:
            sink.close()
        if source.torn:
            problems.append(f"{path.relative_to(run_dir).as_posix()} is cut off at its end")
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
            target.write_text(json.dumps(account) + "\n", encoding="utf-8")
    told = {"source": run_dir.resolve().name, "format": form, "rows": rows, "problems": problems}
    (out / "export.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
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
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        account = json.loads((path.parent / f"generator-{_process(path)}.json").read_text(encoding="utf-8"))
        if account["clock"]["applied"] is False:
            return account, int(account["clock"]["offset_ns"])
    return {}, 0


def _copy(folder: Path, run_dir: Path, out: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        target = out / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _told_problems(run_dir: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        told = json.loads((run_dir / "export.json").read_text(encoding="utf-8")).get("problems")
        return [str(problem) for problem in told or []]
    return []


# Reading


class Source:
    """The rows of an Arrow, Parquet or JSON Lines file in `schema`, batch by batch. `torn`, once they were read, says
    whether the file's tail was cut off. Columns that the file lacks are null."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self.torn = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        readers: dict[str, Callable[[], Iterator[pa.RecordBatch]]] = {
            ".parquet": self._parquet,
            ".jsonl": self._json_lines,
        }
        try:
            for batch in readers.get(self._path.suffix, self._stream)():
                table = conform(pa.Table.from_batches([batch]), self._schema, (), self._path.name)
                yield from table.combine_chunks().to_batches()
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, RecordError):
                raise
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RecordError(f"{self._path.name} cannot be read ({why}): give the file again") from error

    def _stream(self) -> Iterator[pa.RecordBatch]:
        if not self._path.stat().st_size:
            return
        with pa.OSFile(str(self._path), "rb") as file:
            if file.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
                return
            file.seek(0)
            try:
                stream = pa.ipc.open_stream(file)
            except (pa.ArrowInvalid, OSError):
                self.torn = True
                return
            while True:
                try:
                    batch = stream.read_next_batch()
                    batch.validate()
                except StopIteration:
                    return
                except (pa.ArrowInvalid, OSError):
                    self.torn = True
                    return
                yield batch

    def _parquet(self) -> Iterator[pa.RecordBatch]:
        with pa.parquet.ParquetFile(self._path) as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)

    def _json_lines(self) -> Iterator[pa.RecordBatch]:
        # Lines are cut here and not by Arrow, which reads a whole file at once.
        with self._path.open("rb") as file:
            while lines := file.readlines(_BLOCK_BYTES):
                if not lines[-1].endswith(b"\n"):
                    try:
                        json.loads(lines[-1])
                    except ValueError:
                        self.torn = True
                        lines.pop()
                block = b"".join(lines)
                if block.strip():
                    options = pa.json.ReadOptions(block_size=len(block) + 1)
                    yield from pa.json.read_json(pa.BufferReader(block), read_options=options).to_batches()


# Writing


class _Parquet:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pa.parquet.ParquetWriter(path, schema, compression="zstd")
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
