"""Rows of one schema gathered from many pieces, while memory holds each row once."""

from __future__ import annotations

from collections.abc import Collection
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Codes
from analysis.records import scratch
from analysis.records.fingerprints import alike, fingerprints_of
from analysis.records.scratch import Growing, parts

_LARGEST = {np.dtype(f"i{size}"): (1 << 8 * size - 1) - 1 for size in (1, 2, 4, 8)}  # by width


class Columns:
    """A table that grows. Numbers and shared names (dictionaries) end up in one piece, other columns in many.

    A column of whole numbers or of codes is as wide as its values need, which may be less than in `schema`. Of those
    `grouped`, texts become numbers as `Groups` has them.
    """

    def __init__(self, schema: pa.Schema, *, grouped: Collection[str] = ()) -> None:
        self._schema = schema
        self._columns = [
            Groups() if field.name in grouped else _Numbers(field.type) if _fixed(field.type) else _Pieces(field.type)
            for field in schema
        ]

    def append(self, table: pa.Table) -> None:
        """The rows of `table` are in."""
        for column, given in zip(self._columns, table.columns, strict=True):
            column.append(given)

    def table(self) -> pa.Table:
        """All rows so far."""
        return pa.table([column.whole() for column in self._columns], names=self._schema.names)


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_dictionary(kind))


def as_one(column: Any) -> Any:
    """The column as one array, without a copy where it is one already."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    # combine_chunks copies also where there is one chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def filled(array: Any, missing: int) -> npt.NDArray[Any]:
    """The numbers with `missing` for null; without a copy, and read-only, where there is no null."""
    # fill_null copies also where there is nothing to fill.
    if not array.null_count:
        values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return values
    values = scratch.empty(len(array), array.type.to_pandas_dtype())
    for part in parts(len(array)):
        values[part] = pc.fill_null(array[part], missing).to_numpy(zero_copy_only=False)
    return values


def taken(column: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The entries of the column at the indices `rows`; one value that stands for all takes no memory here either."""
    if column.strides == (0,):
        return np.broadcast_to(column[:1], len(rows)) if len(column) else column
    entries = scratch.empty(len(rows), column.dtype)
    for part in parts(len(rows)):
        entries[part] = column[rows[part]]
    return entries


def in_order(rows: npt.NDArray[Any], keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows with their keys rising; those with the same key stay in order, and all do where they are in order."""
    if all((np.diff(keys[part.start : part.stop + 1]) >= 0).all() for part in parts(len(keys))):
        return rows
    return taken(rows, np.argsort(keys, kind="stable"))


class _Pieces:
    """Values of any length, in pieces; once they are many bytes, in a file."""

    def __init__(self, kind: pa.DataType) -> None:
        self._schema = pa.schema([("", kind)])
        self._chunks: list[pa.Array] = []
        self._bytes = 0  # of the chunks
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, column: pa.ChunkedArray) -> None:
        self._chunks += column.chunks
        self._bytes += column.nbytes
        if self._bytes > scratch.LARGEST_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        """All chunks are in the file, as a few large ones: each that is read again costs a look at its ends."""
        if self._writer is None:
            self._file = scratch.nameless()
            self._writer = pa.ipc.new_stream(self._file, self._schema)
        if self._chunks:
            self._writer.write_batch(pa.record_batch([pa.concat_arrays(self._chunks)], schema=self._schema))
        self._chunks, self._bytes = [], 0

    def whole(self) -> pa.ChunkedArray:
        if self._file is None or self._writer is None:
            return pa.chunked_array(self._chunks, self._schema.field(0).type)
        self._write()
        self._writer.close()
        return pa.ipc.open_stream(pa.py_buffer(scratch.mapped(self._file))).read_all().column(0)


class _Numbers:
    """Numbers, or the codes of names, in one array with room to spare."""

    def __init__(self, kind: pa.DataType) -> None:
        self._codes = pa.types.is_dictionary(kind)
        self._names: dict[str, int] = {}
        self._name_kind = kind.value_type if self._codes else None
        self._widest = np.dtype((kind.index_type if self._codes else kind).to_pandas_dtype())
        self._rows = 0
        self._numbers = Growing(np.int8)
        self._valid: Growing | None = None  # None: every row so far

    def append(self, column: pa.ChunkedArray) -> None:
        piece = as_one(column)
        own = filled(piece.indices if self._codes else piece, 0)
        if self._codes:
            codes = [self._names.setdefault(name, len(self._names)) for name in piece.dictionary.to_pylist()]
            if codes != list(range(len(codes))):
                own = np.array(codes, dtype=own.dtype)[own]
        wide = self._wide_enough(own)
        if wide != self._numbers.kind:
            narrow, self._numbers = self._numbers.all(), Growing(wide)
            for part in parts(len(narrow)):
                self._numbers.append(narrow[part])
        self._numbers.append(own)
        if column.null_count and self._valid is None:
            self._valid = Growing(np.bool_)
            self._valid.append(np.ones(self._rows, dtype=np.bool_))
        if self._valid is not None:
            self._valid.append(column.is_valid().to_numpy())
        self._rows += len(own)

    def _wide_enough(self, own: npt.NDArray[Any]) -> np.dtype[Any]:
        """The width that the values so far and `own` need."""
        width = self._numbers.kind
        if width == self._widest or not own.size:
            return width
        reach = max(int(own.max()), -1 - int(own.min()))
        return next(item for item, largest in _LARGEST.items() if item.itemsize >= width.itemsize and reach <= largest)

    def whole(self) -> pa.Array:
        known = None if self._valid is None else pa.py_buffer(np.packbits(self._valid.all(), bitorder="little"))
        values = self._numbers.all()
        array = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), self._rows, [known, pa.py_buffer(values)])
        if not self._codes:
            return array
        return pa.DictionaryArray.from_arrays(array, pa.array(list(self._names), self._name_kind))


class Groups:
    """One number below the length for each distinct text; -1 for null.

    Piece by piece, since copies lie near each other; the texts that several pieces hold are then given one number.
    """

    def __init__(self) -> None:
        self._numbers = Growing(np.int32)
        self._prints: Growing | None = Growing(np.uint64)  # of each distinct text of each piece; None: some is too long
        self._texts = _Pieces(pa.string())
        self._count = 0

    def append(self, column: Any) -> None:
        encoded = as_one(column).dictionary_encode()
        own = filled(encoded.indices, -1)
        self._numbers.append(np.where(own < 0, -1, own + self._count))
        prints = fingerprints_of(encoded.dictionary)
        if prints is None:
            self._prints = None
        elif self._prints is not None:
            self._prints.append(prints)
        self._texts.append(pa.chunked_array([encoded.dictionary]))
        self._count += len(encoded.dictionary)

    def numbers(self) -> Codes:
        """The number of each text so far. Nothing may be appended any more."""
        numbers, texts = self._numbers.all(), self._texts.whole()
        places = np.arange(self._count) if self._prints is None else alike(self._prints.all())
        if not places.size:
            return numbers
        # Numbers rise with the pieces in which a text is first met.
        same = as_one(texts.take(pa.array(places)).combine_chunks().dictionary_encode()).indices.to_numpy()
        first = np.unique(same, return_index=True)[1]
        number = np.arange(self._count + 1, dtype=np.int32)
        number[-1] = -1
        number[places] = places[first][same]
        for part in parts(len(numbers)):
            numbers[part] = number[numbers[part]]
        return numbers

    def whole(self) -> pa.Array:
        return pa.array(self.numbers())
