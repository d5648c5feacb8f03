"""One table of records in a file: appended while the run goes on, readable after a kill, taken in three formats.

A table is an Arrow IPC stream that grows by whole batches; a kill in the middle of a batch costs that batch and nothing
before it. Parquet and JSON Lines are read where other systems wrote them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet

from analysis.records.documents import parse_json
from analysis.records.sums import Piece, Statement, SumsWriter, append, changed, read_statement, sums_path
from analysis.wording import counted

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"
_LARGEST_INT = 9.2e18
_ROWS_AT_ONCE = 1 << 15
_BYTES_AT_ONCE = (1 << 20, 1 << 22)
_SHARE_AT_ONCE = 256  # of a file
_LINES_AT_ONCE = 1 << 24  # bytes
_LONGEST, _HEAD = 1000, 700  # characters of an error
THREADS = min(4, os.cpu_count() or 1)
# Gives back what is freed, where Arrow's default keeps much of it: a table takes half the memory while it is read.
_POOL = pa.system_memory_pool()


class RecordError(ValueError):
    """The records cannot be read or judged. The message is one line: what, where, remedy. Of one with many characters
    the beginning and the end are kept."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_HEAD]} ... {line[_HEAD - _LONGEST :]}")


class RecordWriter:
    """Rows appended to one Arrow IPC stream file; what `flush` wrote survives a kill of the process.

    Beside the file is stated what it should hold (see `analysis.records.sums`). An existing file is continued: what is
    torn or damaged is cut out first, and another schema raises RecordError.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        kept = _kept_batches(path, schema)
        # The whole batches are written beside the file and moved over it: a kill here loses nothing either.
        fresh = path.with_name(path.name + ".new")
        self._sums = SumsWriter(fresh)
        self._file = fresh.open("wb", buffering=0)
        self._append(schema.serialize().to_pybytes(), 0)
        for batch in kept:
            self.append_batch(batch)
        fresh.replace(path)
        sums_path(fresh).replace(sums_path(path))

    def append(self, row: Mapping[str, Any]) -> None:
        """The row is part of the next batch; columns it lacks are null."""
        self._rows.append(row)

    def flush(self) -> None:
        """Every row appended so far is in the file, as one batch."""
        if self._rows:
            columns = [column_of([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
            self.append_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
            self._rows = []

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """The rows of the batch, which has the file's schema, are in it."""
        self._append(batch.serialize().to_pybytes(), batch.num_rows)

    def close(self) -> None:
        """The rows are in the file and the stream is marked as ended. Closing twice does nothing more."""
        if self._file.closed:
            return
        self.flush()
        self._append(END_OF_STREAM, 0)
        self._file.close()
        self._sums.close()

    def _append(self, piece: bytes, rows: int) -> None:
        start = self._file.tell()
        append(self._file, piece)
        try:
            self._sums.add(piece, rows)
        except OSError:
            # What is not stated would be taken for damage, and what is behind it too.
            self._file.seek(start)
            self._file.truncate()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
    tables: list[pa.Table] = []
    try:
        _read_arrow(path, None, lambda table: table, tables.append, schema)
    except (pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path.name} cannot be gone on with ({one_line(error)}): write to another file") from error
    if any(not table.schema.equals(schema) for table in tables):
        raise RecordError(f"{path.name} holds other columns than those to append: write to another file")
    return [batch for table in tables for batch in table.to_batches()]


Take = Callable[[pa.Table], None]
"""Is given some rows of a file."""

Shape = Callable[[pa.Table], pa.Table]
"""Brings rows as they lie in a file into the columns to read. Runs in several threads."""

CUT_OFF = "is cut off at its end"
NOT_AS_WRITTEN = "is not as it was written"


def _read_arrow(
    path: Path, names: Collection[str] | None, shape: Shape, take: Take, written: pa.Schema
) -> tuple[str, ...]:
    """`take` was given all whole batches of an Arrow file, some at a time. Returns what is wrong with it, in words.

    Columns not in `names` are left out, if given. Nothing is given when not even the schema is whole, unless sums show
    that it was `written`.
    """
    statement = read_statement(path)
    if statement is not None:
        return _read_stated(path, statement, names, shape, take, written)
    # Read, not memory-mapped: a writer that continues the file must be free to replace it.
    with pa.OSFile(str(path)) as file:
        size = file.size()
        if size == 0:
            return ()
        try:
            with_footer = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            file.seek(0)
            if with_footer:
                # Nothing vouches for these bytes, so that every one is looked at before any is used.
                options = _only(names, pa.ipc.open_file(file).schema)
                table = pa.ipc.open_file(file, options=options).read_all()
                table.validate(full=True)
            else:
                options = _only(names, pa.ipc.open_stream(file).schema)
                file.seek(0)
                stream = pa.ipc.open_stream(file, options=options, memory_pool=_POOL)
        except (pa.ArrowException, OSError):
            return (CUT_OFF,)
        if with_footer:
            take(shape(table))
            return ()
        return _read_unstated(file, size, stream, shape, take)


def _read_unstated(
    file: pa.NativeFile, size: int, stream: pa.ipc.RecordBatchStreamReader, shape: Shape, take: Take
) -> tuple[str, ...]:
    batches: list[pa.RecordBatch] = []
    waiting = 0
    taken = ended = False
    problems: tuple[str, ...] = ()
    while not ended:
        try:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            batches.append(batch)
            waiting += len(batch)
        except StopIteration:
            ended = True
            # Zeros read as the mark of an end too.
            after = size - file.tell()
            if after:
                problems = (f"holds {after} bytes behind its end",)
            elif not _has_end_mark(file, size):
                problems = (CUT_OFF,)
        except (pa.ArrowException, OSError):
            ended = True
            problems = (CUT_OFF,)
        if waiting >= _ROWS_AT_ONCE or (ended and (waiting or not taken)):
            take(shape(_apart(pa.Table.from_batches(batches, schema=stream.schema))))
            taken, batches, waiting = True, [], 0
    return problems


def _has_end_mark(file: pa.NativeFile, size: int) -> bool:
    file.seek(max(0, size - len(END_OF_STREAM)))
    return bool(file.read(len(END_OF_STREAM)) == END_OF_STREAM)


def _read_stated(
    path: Path, statement: Statement, names: Collection[str] | None, shape: Shape, take: Take, written: pa.Schema
) -> tuple[str, ...]:
    """As `_read_arrow`, of a file that a statement vouches for: only bytes that are as they were written are decoded.

    Several threads read, check and decode, since each spends its time outside of Python.
    """
    with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        if not size and not statement.pieces:
            return ()
        pieces = [piece for piece in statement.pieces if piece.end <= size]
        stated_rows = statement.end[2] if statement.end else sum(piece.rows for piece in statement.pieces)
        if not pieces or pieces[0].at:
            return (_damage(statement, size, lost=stated_rows),)
        known = written.serialize().to_pybytes()
        head_bytes = os.pread(file.fileno(), pieces[0].size, 0)
        damaged = int(not _is_intact(head_bytes, pieces[0]))
        if damaged and not _is_intact(known, pieces[0]):
            return (_damage(statement, size, lost=stated_rows),)
        schema = pa.ipc.read_schema(pa.py_buffer(known if damaged else head_bytes))
        head, options = schema.serialize().to_pybytes(), _only(names, schema)

        def read(group: Sequence[Piece]) -> tuple[pa.Table, int]:
            """The rows of the group, and how many of its pieces are damaged."""
            start, end = (group[0].at, group[-1].end) if group else (0, 0)
            stretch = pa.allocate_buffer(len(head) + end - start, memory_pool=_POOL)
            view = memoryview(stretch).cast("B")
            view[: len(head)] = head
            content = view[len(head) :]
            os.preadv(file.fileno(), [content], start)
            parts = [content[piece.at - start : piece.end - start] for piece in group]
            intact = [part for part, piece in zip(parts, group, strict=True) if _is_intact(part, piece)]
            bad = len(parts) - len(intact)
            stream = pa.ipc.open_stream(
                pa.BufferReader(b"".join((head, *intact)) if bad else stretch), options=options, memory_pool=_POOL
            )
            return shape(_apart(stream.read_all())), bad

        rows = 0
        waiting: deque[Future[tuple[pa.Table, int]]] = deque()

        def take_oldest() -> None:
            nonlocal rows, damaged
            table, bad = waiting.popleft().result()
            rows += table.num_rows
            damaged += bad
            take(table)

        least, most = _BYTES_AT_ONCE
        for group in _groups(pieces[1:], min(most, max(least, size // _SHARE_AT_ONCE))):
            waiting.append(pool.submit(read, group))
            if len(waiting) > THREADS:
                take_oldest()
        while waiting:
            take_oldest()
    if damaged or statement.damaged or not _follow(pieces):
        return (_damage(statement, size, lost=max(0, stated_rows - rows)),)
    if statement.end is None:
        return (CUT_OFF,)  # what its writer did not come to state is lost
    if statement.end != (size, len(pieces), rows):
        return (_damage(statement, size, lost=max(0, stated_rows - rows)),)
    return ()


def _follow(pieces: Sequence[Piece]) -> bool:
    return all(one.end == other.at for one, other in pairwise(pieces))


def _damage(statement: Statement, size: int, *, lost: int) -> str:
    if statement.end is not None and size < statement.end[0]:
        what = f"is cut off: it has {size} of {statement.end[0]} bytes"
    elif statement.end is not None and size > statement.end[0]:
        what = f"holds {counted(size - statement.end[0], 'byte')} more than were written"
    else:
        what = NOT_AS_WRITTEN
    return f"{what}, {counted(lost, 'row')} of it {'is' if lost == 1 else 'are'} gone" if lost else what


def _apart(table: pa.Table) -> pa.Table:
    """The rows as one piece that is a copy, which lets go of the columns beside it in the file."""
    # One piece alone is left where it is.
    return pa.concat_tables([table, table.schema.empty_table()]).combine_chunks(memory_pool=_POOL)


def _groups(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """The pieces in groups of at most `size` bytes, each one stretch of the file; a larger piece is a group by itself,
    and there is an empty group for no pieces."""
    group: list[Piece] = []
    rows = 0
    for piece in pieces:
        if group and (rows >= _ROWS_AT_ONCE or group[-1].end != piece.at or piece.end - group[0].at > size):
            yield group
            group, rows = [], 0
        group.append(piece)
        rows += piece.rows
    yield group


def _is_intact(content: bytes | memoryview, piece: Piece) -> bool:
    return len(content) == piece.size and zlib.crc32(content) == piece.crc32


def _only(names: Collection[str] | None, schema: pa.Schema) -> pa.ipc.IpcReadOptions:
    if names is None:
        return pa.ipc.IpcReadOptions()
    return pa.ipc.IpcReadOptions(included_fields=[index for index, name in enumerate(schema.names) if name in names])


def _read_json_lines(path: Path, shape: Shape, take: Take) -> tuple[str, ...]:
    """As `_read_arrow`, of the lines that are a table of JSON each."""
    bad = 0
    torn = False
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
                    torn = True
            if kept:
                block = b"\n".join(kept) + b"\n"
                options = pa.json.ReadOptions(block_size=len(block) + 1)
                table = pa.json.read_json(pa.BufferReader(block), read_options=options)
                table.validate(full=True)
                take(shape(table))
    which = f"has {bad} lines that are" if bad > 1 else "has a line that is"
    return (*([CUT_OFF] if torn else []), *([f"{which} no table of JSON"] if bad else []))


def _read_parquet(path: Path, names: Collection[str], shape: Shape, take: Take) -> tuple[str, ...]:
    with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = [name for name in file.schema_arrow.names if name in names]
        take(shape(file.schema_arrow.empty_table()))
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            batch.validate(full=True)
            take(shape(pa.Table.from_batches([batch])))
    return ()


def clean_line(line: bytes) -> bytes | None:
    """A line of JSON as Arrow's reader takes it, which ends the process on some that it does not; None for no table."""
    try:
        value = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value).encode() if b"NaN" in line or b"Infinity" in line else line.strip()


def read_table(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> tuple[pa.Table, bool]:
    """The rows of an Arrow, Parquet or JSON Lines file in `schema`, and whether some of the file is torn or damaged.

    Columns that `schema` lacks are not read. Missing columns are null; a missing `required` column or a column of
    another kind raises RecordError.
    """
    tables: list[pa.Table] = []
    problems = read_pieces(path, schema, tables.append, required=required)
    return pa.concat_tables(tables) if tables else schema.empty_table(), bool(problems)


def read_pieces(
    path: Path, schema: pa.Schema, take: Take, *, required: Sequence[str] = (), written: pa.Schema | None = None
) -> tuple[str, ...]:
    """`take` was given all rows as `read_table` has them, some at a time. Returns what is wrong with the file, in words
    that follow its name.

    `written` is the schema that a run writes the table in, `schema` if not given; rows behind a damaged head of the
    file are read by it. Of an Arrow stream, memory holds no more at any time than what `take` keeps and a few pieces.
    """

    def shape(table: pa.Table) -> pa.Table:
        return conform(table, schema, required, path.name)

    try:
        if path.suffix not in (".parquet", ".jsonl"):
            return _read_arrow(path, schema.names, shape, take, written or schema)
        statement = read_statement(path)
        damage = (NOT_AS_WRITTEN,) if statement is not None and changed(path, statement) else ()
        if path.suffix == ".parquet":
            return (*damage, *_read_parquet(path, schema.names, shape, take))
        return (*damage, *_read_json_lines(path, shape, take))
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise RecordError(f"{path.name} cannot be read ({one_line(error)}): give the file again") from error


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
