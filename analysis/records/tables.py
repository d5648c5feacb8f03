"""Tables of records in files: written as an Arrow stream, read from Arrow, Parquet and JSON Lines.

A stream ends with a line such as `rows 000000001234 crc32 0a1b2c3d`, in front of which other readers of Arrow stop.
Decision 0011 says what becomes of a file without it, or that differs from it.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from tailgate.analysis.records.documents import parse_lines
from tailgate.analysis.wording import counted

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
CUT_OFF = "is cut off at its end"
NOT_AS_WRITTEN = "is not as it was written: its rows are not used"

_END_LINE = re.compile(rb"\nrows ([0-9]{12}) crc32 ([0-9a-f]{8})\n\Z")
END_LINE_BYTES = len(b"\nrows 000000000000 crc32 00000000\n")
_LARGEST_INT = 9.2e18
_ROWS_AT_ONCE = 1 << 16  # of Parquet
_BYTES_AT_ONCE = 1 << 24
_CHECKED_AT_ONCE = 1 << 18  # bytes, which stay in a processor's cache
_AHEAD = 3  # items read before they are used
T = TypeVar("T")
_LONGEST, _HEAD = 1000, 700  # characters of an error


pa.set_memory_pool(pa.system_memory_pool())  # that of NumPy, whose `release_unused` returns what both let go of


class RecordError(ValueError):
    """The records cannot be read or judged. The message is one line, which may be cut: what, where, remedy."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_HEAD]} ... {line[_HEAD - _LONGEST :]}")


def one_line(error: BaseException) -> str:
    """Return the first line of the error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_end(path: Path) -> tuple[int, bool] | None:
    """Return the rows that the last line of the file states, and whether its checksum is right; None without that line.

    Raises OSError.
    """
    size = max(0, path.stat().st_size - END_LINE_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(size)
        line = _END_LINE.match(file.read())
        if line is None:
            return None
        crc32, left = 0, size + line.start(2)
        file.seek(0)
        piece = memoryview(bytearray(_CHECKED_AT_ONCE))
        while left and (count := file.readinto(piece[:left])):
            crc32 = zlib.crc32(piece[:count], crc32)
            left -= count
    return int(line[1]), crc32 == int(line[2], 16)


class RecordWriter:
    """Rows appended to a new Arrow stream; what `flush` wrote survives a kill of the process.

    Raises OSError if the file cannot be made, as where it exists.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        self._written, self._crc32 = 0, 0  # rows, and the checksum of the file so far
        self._file = path.open("xb", buffering=0)
        self._append(schema.serialize().to_pybytes(), 0)

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
        """Write the rows that wait and the end of the file. A second call does nothing."""
        if self._file.closed:
            return
        self.flush()
        line = b"\nrows %012d crc32 " % self._written
        self._append(b"%s%s%08x\n" % (END_OF_STREAM, line, zlib.crc32(END_OF_STREAM + line, self._crc32)), 0)
        self._file.close()

    def _append(self, piece: bytes, rows: int) -> None:
        """Append the whole of `piece`, or leave the file as it was and raise the OSError that the disk gave."""
        start, rest = self._file.tell(), memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.seek(start)
                self._file.truncate()
            raise
        self._crc32 = zlib.crc32(piece, self._crc32)
        self._written += rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values as a column; a whole number that does not fit is null, since a server may send any."""
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):
        if not pa.types.is_integer(kind):
            raise
        beyond = 1 << (kind.bit_width - 1)
        return pa.array([x if x is not None and -beyond <= x < beyond else None for x in values], kind)


def read_table(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the rows of a file in `schema`, and what is wrong with it: see `tables_in`."""
    found = [schema.empty_table(), *tables_in(path, schema, required=required)]
    problems = tuple(item for item in found if isinstance(item, str))
    return pa.concat_tables(item for item in found if not isinstance(item, str)), problems


def tables_in(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> Iterator[pa.Table | str]:
    """Yield the rows of an Arrow, Parquet or JSON Lines file in `schema`, some megabytes at a time, and what is wrong
    with the file, in words that follow its name.

    Columns that `schema` lacks are not read, and columns that the file lacks are null. Raises RecordError for a missing
    `required` column, a column of another kind, and a file that cannot be read.
    """
    tables_of = {".parquet": _parquet_tables, ".jsonl": _json_tables}.get(path.suffix, _arrow_tables)
    try:
        for item in tables_of(path, schema):
            yield item if isinstance(item, str) else _conform(item, schema, required, path.name)
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise RecordError(f"{path.name} cannot be read ({one_line(error)}): give the file again") from error


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Start to read the items on another processor, and return them: each is read while those before it are used."""
    reader = ThreadPoolExecutor(1)
    coming = deque(reader.submit(next, items, None) for _ in range(_AHEAD))

    def read() -> Iterator[T]:
        with reader:
            while (item := coming.popleft().result()) is not None:
                coming.append(reader.submit(next, items, None))
                yield item

    return read()


def _arrow_tables(path: Path, schema: pa.Schema) -> Iterator[pa.Table | str]:
    """Yield the whole batches of an Arrow stream, and what is wrong with the file."""
    end = read_end(path)
    if end is None:
        yield CUT_OFF
    elif not end[1]:
        yield NOT_AS_WRITTEN
        return
    batches: list[pa.RecordBatch] = []
    rows = waiting = 0
    with pa.OSFile(str(path)) as file:
        for batch in _whole_batches(file, schema, torn=end is None):
            batches.append(batch)
            rows += batch.num_rows
            waiting += batch.nbytes
            if waiting >= _BYTES_AT_ONCE:
                yield pa.Table.from_batches(batches).combine_chunks()
                batches, waiting = [], 0
    if batches:
        yield pa.Table.from_batches(batches).combine_chunks()
    if end is not None and rows != end[0]:
        raise ValueError(f"{rows} of {end[0]} rows")


def _whole_batches(file: pa.NativeFile, schema: pa.Schema, *, torn: bool) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the stream up to the first that is not whole."""
    with contextlib.suppress(pa.ArrowException, OSError):
        names = pa.ipc.open_stream(file).schema.names
        file.seek(0)
        wanted = [place for place, name in enumerate(names) if name in schema.names]
        for batch in pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=wanted)):
            if torn:  # a damaged batch may end the process
                batch.validate(full=True)
            yield batch


def _json_tables(path: Path, schema: pa.Schema) -> Iterator[pa.Table | str]:
    """Yield the lines that hold a table of JSON each. Arrow's own reader ends the process on others, such as `null`."""
    bad = 0
    with path.open("rb") as file:
        while lines := file.readlines(_BYTES_AT_ONCE):
            rows, others, torn = parse_lines(lines)
            bad += others
            yield from [CUT_OFF] if torn else []
            present = [name for name in schema.names if any(name in row for row in rows)]
            if rows:
                yield pa.table({name: pa.array([row.get(name) for row in rows]) for name in present})
    if bad:
        yield f"has {counted(bad, 'line')} without a table of JSON"


def _parquet_tables(path: Path, schema: pa.Schema) -> Iterator[pa.Table | str]:
    """Yield the rows of a Parquet file. A damaged one raises, since nothing of it can be read."""
    with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = [name for name in file.schema_arrow.names if name in schema.names]
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            batch.validate(full=True)
            yield pa.Table.from_batches([batch])


def _conform(table: pa.Table, schema: pa.Schema, required: Sequence[str], source: str) -> pa.Table:
    """Return the rows of `table` in `schema`, with null for columns that it lacks. RecordError names `source`."""
    columns: list[Any] = []
    for field in schema:
        count = table.column_names.count(field.name)
        if count > 1:
            raise RecordError(f'{source}: column "{field.name}" appears {count} times: keep one')
        if not count and field.name in required:
            raise RecordError(f'{source}: column "{field.name}" is missing: this table needs {", ".join(required)}')
        try:
            columns.append(_cast(table.column(field.name), field.type) if count else pa.nulls(len(table), field.type))
        except (pa.ArrowException, ValueError) as error:
            raise RecordError(
                f'{source}: column "{field.name}" holds {table.column(field.name).type} that is not {field.type} '
                f"({one_line(error)}): convert it"
            ) from error
    return pa.table(columns, schema=schema)


def _cast(column: Any, kind: pa.DataType) -> Any:
    """Return the column as one of `kind`, with timestamps in ns."""
    types = pa.types
    if column.type == kind:
        return column
    if types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())
    elif types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    elif types.is_floating(column.type) and types.is_integer(kind):
        # Not-a-number and values beyond any clock are unknown, not zero.
        usable = pc.and_kleene(pc.is_finite(column), pc.less(pc.abs(column), _LARGEST_INT))
        column = pc.round(pc.if_else(usable, column, None))
    return column.cast(kind)
