"""One table of records in a file: appended while the run goes on, readable after a kill, taken in three formats.

A table is an Arrow IPC stream that grows by whole batches and ends with its row count and checksum. A kill in the
middle of a batch costs that batch and nothing before it. Of a file that is not as its checksum states no row is used.
Parquet and JSON Lines are read where other systems wrote them.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet

from analysis.records.checksums import END_OF_STREAM, Checksum, read_end
from analysis.records.documents import parse_json
from analysis.wording import counted

_FILE_MAGIC = b"ARROW1"
_LARGEST_INT = 9.2e18
_ROWS_AT_ONCE = 1 << 16  # of Parquet
_BYTES_AT_ONCE = 1 << 24  # of Arrow
_LINES_AT_ONCE = 1 << 24  # bytes
_LONGEST, _HEAD = 1000, 700  # characters of an error
# This pool gives back at once what is freed, where others keep much of it: the columns of a large run take half the
# memory while they are read. Not every build of Arrow has it.
with contextlib.suppress(NotImplementedError):
    pa.set_memory_pool(pa.jemalloc_memory_pool())
    pa.jemalloc_set_decay_ms(0)


class RecordError(ValueError):
    """The records cannot be read or judged. The message is one line: what, where, remedy. Of one with many characters
    the beginning and the end are kept."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_HEAD]} ... {line[_HEAD - _LONGEST :]}")


class RecordWriter:
    """Rows appended to one Arrow IPC stream file; what `flush` wrote survives a kill of the process.

    An existing file is continued: a batch that a kill tore is cut off first. A file with another schema or one that is
    not as it was written raises RecordError.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        self._checksum = Checksum()
        kept = _kept_batches(path, schema)
        # The whole batches are written beside the file and moved over it: a kill here loses nothing either.
        fresh = path.with_name(path.name + ".new")
        self._file = fresh.open("wb", buffering=0)
        self._append(schema.serialize().to_pybytes(), 0)
        for batch in kept:
            self.append_batch(batch)
        fresh.replace(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row to the next batch; columns it lacks are null."""
        self._rows.append(row)

    def flush(self) -> None:
        """Write every row appended so far, as one batch."""
        if self._rows:
            columns = [column_of([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
            self.append_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._rows = []

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of the batch, which has the file's schema."""
        self._append(batch.serialize().to_pybytes(), batch.num_rows)

    def close(self) -> None:
        """Write the rows that wait and the end of the file. Closing twice does nothing more."""
        if self._file.closed:
            return
        self.flush()
        self._append(self._checksum.end(), 0)
        self._file.close()

    def _append(self, piece: bytes, rows: int) -> None:
        _append_whole(self._file, piece)
        self._checksum.add(piece, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _append_whole(file: io.FileIO, piece: bytes) -> None:
    """Append the whole of `piece`, or leave `file` as it was and raise the OSError that the disk gave."""
    start = file.tell()
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.seek(start)
            file.truncate()
        raise


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values as a column. A whole number may be anything that a server said: one that does not fit is unknown."""
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):
        if not pa.types.is_integer(kind):
            raise
        beyond = 1 << (kind.bit_width - 1)
        fitting = [value if value is not None and -beyond <= value < beyond else None for value in values]
        return pa.array(fitting, kind)


def _kept_batches(path: Path, schema: pa.Schema) -> list[pa.RecordBatch]:
    if not path.exists() or path.stat().st_size == 0:
        return []
    problems: list[str] = []
    try:
        tables = list(_arrow_tables(path, None, problems))
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path.name} cannot be continued ({one_line(error)}): write to another file") from error
    if any(problem.startswith(NOT_AS_WRITTEN) for problem in problems):
        raise RecordError(f"{path.name} cannot be continued (it {problems[0]}): write to another file")
    if any(not table.schema.equals(schema) for table in tables):
        raise RecordError(f"{path.name} holds other columns than those to append: write to another file")
    return [batch for table in tables for batch in table.to_batches()]


CUT_OFF = "is cut off at its end"
NOT_AS_WRITTEN = "is not as it was written"


def unusable(rows: int) -> str:
    """Say of a file that states `rows` rows and is not as it states that nothing of it counts."""
    return f"{NOT_AS_WRITTEN}: its {counted(rows, 'row')} {'is' if rows == 1 else 'are'} not used"


def _arrow_tables(path: Path, names: Collection[str] | None, problems: list[str]) -> Iterator[pa.Table]:
    """All whole batches of an Arrow file, some at a time; `problems` gets what is wrong with the file, in words.

    Columns not in `names` are left out, if given. There is no table when not even the schema is whole, or when the file
    is not as it states.
    """
    end = read_end(path)
    if end is not None and not end.agrees_with(path):
        problems.append(unusable(end.rows))
        return
    # Read, not memory-mapped: a writer that continues the file must be free to replace it.
    with pa.OSFile(str(path)) as file:
        size = file.size() if end is None else end.size
        try:
            with_footer = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            file.seek(0)
            if with_footer:
                options = _only(names, pa.ipc.open_file(file).schema)
                table = pa.ipc.open_file(file, options=options).read_all()
                table.validate(full=True)
            else:
                options = _only(names, pa.ipc.open_stream(file).schema)
                file.seek(0)
                stream = pa.ipc.open_stream(file, options=options)
        except (pa.ArrowException, OSError):
            problems.append(CUT_OFF)
            return
        if with_footer:
            yield table
        else:
            yield from _stream_tables(file, size, stream, problems)


def _stream_tables(
    file: pa.NativeFile, size: int, stream: pa.ipc.RecordBatchStreamReader, problems: list[str]
) -> Iterator[pa.Table]:
    """The batches of the stream, which `size` bytes of the file hold, each validated before it is used."""
    batches: list[pa.RecordBatch] = []
    waiting = 0
    ended = False
    while not ended:
        try:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            batches.append(batch)
            waiting += batch.nbytes
        except StopIteration:
            ended = True
            # Zeros read as the mark of an end too.
            after = size - file.tell()
            if after:
                problems.append(f"holds {counted(after, 'byte')} behind its end")
            elif not _has_end_mark(file, size):
                problems.append(CUT_OFF)
        except (pa.ArrowException, OSError):
            ended = True
            problems.append(CUT_OFF)
        if waiting >= _BYTES_AT_ONCE or ended:
            yield pa.Table.from_batches(batches, schema=stream.schema).combine_chunks()
            batches, waiting = [], 0


def _has_end_mark(file: pa.NativeFile, size: int) -> bool:
    file.seek(max(0, size - len(END_OF_STREAM)))
    return bool(file.read(len(END_OF_STREAM)) == END_OF_STREAM)


def _only(names: Collection[str] | None, schema: pa.Schema) -> pa.ipc.IpcReadOptions:
    if names is None:
        return pa.ipc.IpcReadOptions()
    return pa.ipc.IpcReadOptions(included_fields=[index for index, name in enumerate(schema.names) if name in names])


def _json_tables(path: Path, _: Collection[str], problems: list[str]) -> Iterator[pa.Table]:
    """As `_arrow_tables`, of the lines that are a table of JSON each."""
    bad = 0
    # Lines are cut here and not by Arrow, which reads a whole file at once.
    with path.open("rb") as file:
        while lines := file.readlines(_LINES_AT_ONCE):
            kept = []
            for line in lines:
                clean = clean_line(line) if line.strip() else b""
                if clean:
                    kept.append(clean)
                elif clean is None and line.endswith(b"\n"):
                    bad += 1
                elif clean is None:
                    problems.append(CUT_OFF)
            if kept:
                block = b"\n".join(kept) + b"\n"
                options = pa.json.ReadOptions(block_size=len(block) + 1)
                table = pa.json.read_json(pa.BufferReader(block), read_options=options)
                table.validate(full=True)
                yield table
    if bad:
        problems.append(f"has {f'{bad} lines that are' if bad > 1 else 'a line that is'} no table of JSON")


def _parquet_tables(path: Path, names: Collection[str], problems: list[str]) -> Iterator[pa.Table]:
    """As `_arrow_tables`. Parquet that is damaged cannot be read at all, which raises."""
    with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = [name for name in file.schema_arrow.names if name in names]
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            batch.validate(full=True)
            yield pa.Table.from_batches([batch])


def clean_line(line: bytes) -> bytes | None:
    """A line of JSON as Arrow's reader takes it, which ends the process on some that it does not; None for no table."""
    try:
        value = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value).encode() if b"NaN" in line or b"Infinity" in line else line.strip()


def read_table(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> tuple[pa.Table, tuple[str, ...]]:
    """The rows of an Arrow, Parquet or JSON Lines file in `schema`, and what is wrong with the file, in words that
    follow its name.

    Columns that `schema` lacks are not read. Missing columns are null; a missing `required` column or a column of
    another kind raises RecordError.
    """
    tables_of = {".parquet": _parquet_tables, ".jsonl": _json_tables}.get(path.suffix, _arrow_tables)
    problems: list[str] = []
    tables = [schema.empty_table()]
    try:
        for table in tables_of(path, schema.names, problems):
            tables.append(conform(table, schema, required, path.name))
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise RecordError(f"{path.name} cannot be read ({one_line(error)}): give the file again") from error
    return pa.concat_tables(tables), tuple(problems)


def one_line(error: BaseException) -> str:
    """What the error says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def conform(table: pa.Table, schema: pa.Schema, required: Sequence[str], source: str) -> pa.Table:
    """The rows of `table` in `schema`, with null for columns that it lacks. RecordError names `source`.

    A missing `required` column or a column of another kind raises it.
    """
    columns: list[Any] = []
    for field in schema:
        places = table.schema.get_all_field_indices(field.name)
        if len(places) > 1:
            raise RecordError(f'{source}: column "{field.name}" appears {len(places)} times: keep one')
        if not places:
            if field.name in required:
                raise RecordError(f'{source}: column "{field.name}" is missing: this table needs {", ".join(required)}')
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        columns.append(_cast(table.column(places[0]), field, source))
    return pa.table(columns, schema=schema)


def _cast(column: Any, field: pa.Field, source: str) -> Any:
    if column.type == field.type:
        return column
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
        if pa.types.is_floating(column.type) and pa.types.is_integer(field.type):
            # Not-a-number and values beyond any clock are unknown, not zero.
            usable = pc.and_kleene(pc.is_finite(column), pc.less(pc.abs(column), _LARGEST_INT))
            column = pc.round(pc.if_else(usable, column, None))
        text = pa.types.is_string(field.type) or pa.types.is_dictionary(field.type)
        if text and pa.types.is_dictionary(column.type):
            column = pc.cast(column, pa.string())
        if not text and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise pa.ArrowInvalid("text")
        if pa.types.is_dictionary(field.type):
            # A cast to the type that it has takes as long as the encoding.
            texts = column if column.type == field.type.value_type else column.cast(field.type.value_type)
            encoded = texts.dictionary_encode()
            return encoded if encoded.type == field.type else encoded.cast(field.type)
        return column.cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(
            f'{source}: column "{field.name}" holds {column.type} that is not {field.type} '
            f"({one_line(error)}): convert it"
        ) from error
