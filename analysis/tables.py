"""One table of records in a file: appended while the run goes on, readable after a kill, taken in three formats.

A table is an Arrow IPC stream that grows by whole batches; a kill in the middle of a batch costs that batch and nothing
before it. Parquet and JSON Lines are read where other systems wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"
_LARGEST_INT = 9.2e18
_ROWS_AT_ONCE = 1 << 15
# Gives back what is freed, where Arrow's default keeps much of it: a table takes half the memory while it is read.
_POOL = pa.system_memory_pool()


class RecordError(ValueError):
    """The records cannot be read or judged. The message is one line: what, where, remedy."""


class RecordWriter:
    """Rows appended to one Arrow IPC stream file; what `flush` wrote survives a kill of the process.

    An existing file is continued: a torn last batch is cut off first, and another schema raises RecordError.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        # The whole batches are written beside the file and moved over it: a kill here loses nothing either.
        fresh = path.with_name(path.name + ".new")
        with fresh.open("wb") as file:
            file.write(schema.serialize().to_pybytes())
            for batch in _kept_batches(path, schema):
                file.write(batch.serialize().to_pybytes())
        fresh.replace(path)
        self._file = path.open("ab")

    def append(self, row: Mapping[str, Any]) -> None:
        """The row is part of the next batch; columns it lacks are null."""
        self._rows.append(row)

    def append_columns(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """All rows of equally long `columns` are part of the next batch; columns it lacks are null."""
        names = list(columns)
        lengths = {len(columns[name]) for name in names}
        if len(lengths) > 1:
            raise RecordError(f"columns have {sorted(lengths)} rows: give columns of one length")
        self._rows.extend(dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True))

    def flush(self) -> None:
        """Every row appended so far is in the file, as one batch."""
        if self._rows:
            columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            self._file.write(batch.serialize().to_pybytes())
            self._rows = []
        self._file.flush()

    def close(self) -> None:
        """The rows are in the file and the stream is marked as ended. Closing twice does nothing more."""
        if self._file.closed:
            return
        self.flush()
        self._file.write(_END_OF_STREAM)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kept_batches(path: Path, schema: pa.Schema) -> list[pa.RecordBatch]:
    if not path.exists() or path.stat().st_size == 0:
        return []
    tables: list[pa.Table] = []
    _read_stream(path, None, lambda table, _: tables.append(table))
    if any(not table.schema.equals(schema) for table in tables):
        raise RecordError(f"{path.name} holds other columns than those to append: write to another file")
    return [batch for table in tables for batch in table.to_batches()]


Take = Callable[[pa.Table, int], None]
"""Is given some rows of a file, and about how many the whole file has."""


def _read_stream(path: Path, names: Collection[str] | None, take: Take) -> bool:
    """`take` was given all whole batches of an Arrow file, some at a time. Returns whether the tail of it is torn.

    Columns not in `names` are left out, if given. Nothing is given when not even the schema is whole.
    """
    # Read, not memory-mapped: a writer that continues the file must be free to replace it.
    with pa.OSFile(str(path)) as file:
        size = file.size()
        if size == 0:
            return False
        try:
            if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                table = pa.ipc.open_file(file, options=_only(names, pa.ipc.open_file(file).schema)).read_all()
                stream = None
            else:
                file.seek(0)
                options = _only(names, pa.ipc.open_stream(file).schema)
                file.seek(0)
                stream = pa.ipc.open_stream(file, options=options, memory_pool=_POOL)
        except (pa.ArrowException, OSError):
            return True
        if stream is None:
            take(table, table.num_rows)
            return False
        batches: list[pa.RecordBatch] = []
        waiting = taken = 0
        ended = torn = False
        while not ended:
            try:
                batch = stream.read_next_batch()
                batch.validate()
                batches.append(batch)
                waiting += len(batch)
            except StopIteration:
                ended = True
            except (pa.ArrowException, OSError):
                ended = torn = True
            if waiting >= _ROWS_AT_ONCE or (ended and (waiting or not taken)):
                taken += waiting
                # One piece is a copy, which lets go of the columns beside it in the file.
                table = pa.Table.from_batches(batches, schema=stream.schema).combine_chunks(memory_pool=_POOL)
                take(table, max(taken, size * taken // max(1, file.tell())))
                batches, waiting = [], 0
        return torn


def _only(names: Collection[str] | None, schema: pa.Schema) -> pa.ipc.IpcReadOptions:
    if names is None:
        return pa.ipc.IpcReadOptions()
    return pa.ipc.IpcReadOptions(included_fields=[index for index, name in enumerate(schema.names) if name in names])


def _read_json_lines(path: Path) -> tuple[pa.Table | None, bool]:
    data = path.read_bytes()
    torn = False
    cut = data.rfind(b"\n") + 1
    tail = data[cut:]
    if tail.strip():
        try:
            json.loads(tail)
        except ValueError:
            data, torn = data[:cut], True
    if not data.strip():
        return None, torn
    # A block must hold at least one whole line; a request with thousands of token times is long.
    options = pa.json.ReadOptions(block_size=max(1 << 24, min(len(data) + 1, 1 << 30)))
    return pa.json.read_json(pa.BufferReader(data), read_options=options), torn


def read_table(path: Path, schema: pa.Schema, *, required: Sequence[str] = ()) -> tuple[pa.Table, bool]:
    """The rows of an Arrow, Parquet or JSON Lines file in `schema`, and whether the tail of the file is torn.

    Columns that `schema` lacks are not read. Missing columns are null; a missing `required` column or a column of
    another kind raises RecordError.
    """
    tables: list[pa.Table] = []
    torn = read_pieces(path, schema, lambda table, _: tables.append(table), required=required)
    return pa.concat_tables(tables) if tables else schema.empty_table(), torn


def read_pieces(path: Path, schema: pa.Schema, take: Take, *, required: Sequence[str] = ()) -> bool:
    """`take` was given all rows as `read_table` has them, some at a time. Returns whether the tail is torn.

    Of an Arrow stream, memory then holds no more at any time than what `take` keeps and a piece.
    """

    def kept(table: pa.Table, expected: int) -> None:
        take(conform(table, schema, required, path.name), expected)

    try:
        if path.suffix == ".parquet":
            names = pa.parquet.read_schema(path).names
            table = pa.parquet.read_table(path, columns=[name for name in names if name in schema.names])
            torn = False
        elif path.suffix == ".jsonl":
            table, torn = _read_json_lines(path)
        else:
            return _read_stream(path, schema.names, kept)
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{path.name} cannot be read ({one_line(error)}): give the file again") from error
    if table is not None:
        kept(table, table.num_rows)
    return torn


def one_line(error: BaseException) -> str:
    """What the error says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def conform(table: pa.Table, schema: pa.Schema, required: Sequence[str], source: str) -> pa.Table:
    """The rows of `table` in `schema`, with null for columns that it lacks. RecordError names `source`.

    A missing `required` column or a column of another kind raises it.
    """
    columns: list[Any] = []
    for field in schema:
        found = table.schema.get_all_field_indices(field.name)
        if len(found) > 1:
            raise RecordError(f'{source}: column "{field.name}" appears {len(found)} times: keep one')
        if not found:
            if field.name in required:
                raise RecordError(f'{source}: column "{field.name}" is missing: {_wanted(required)}')
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        columns.append(_cast(table.column(found[0]), field, source))
    return pa.table(columns, schema=schema)


def _wanted(required: Sequence[str]) -> str:
    return "this table needs " + ", ".join(required)


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
