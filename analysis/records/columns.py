"""Rows of one schema gathered from many pieces, while memory holds each row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools

_AT_ONCE = 1 << 16
_LARGEST = {np.dtype(f"i{size}"): (1 << 8 * size - 1) - 1 for size in (1, 2, 4, 8)}  # by width


class Columns:
    """A table that grows. Numbers and shared names (dictionaries) end up in one piece, other columns in many.

    A column of whole numbers or of codes is as wide as its values need, which may be less than in `schema`.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._columns = [_Numbers(field.type) if _fixed(field.type) else _Pieces(field.type) for field in schema]

    def append(self, table: pa.Table) -> None:
        """The rows of `table` are in."""
        for column, given in zip(self._columns, table.columns, strict=True):
            column.append(given)

    def table(self) -> pa.Table:
        """All rows so far."""
        return pa.table([column.whole() for column in self._columns], names=self._schema.names)


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_dictionary(kind))


def parts(rows: int) -> Iterator[slice]:
    """All of `rows` rows in slices, so that what is worked out of a few long columns fits a processor's cache."""
    return (slice(begin, min(begin + _AT_ONCE, rows)) for begin in range(0, rows, _AT_ONCE))


def as_one(column: Any) -> Any:
    """The column as one array, without a copy where it is one already."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    # combine_chunks copies also where there is one chunk.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def filled(array: Any, missing: int) -> npt.NDArray[Any]:
    """The numbers with `missing` for null; without a copy, and read-only, where there is no null."""
    # fill_null copies also where there is nothing to fill.
    values: npt.NDArray[Any] = (pc.fill_null(array, missing) if array.null_count else array).to_numpy(
        zero_copy_only=False
    )
    return values


class _Pieces:
    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._chunks: list[pa.Array] = []

    def append(self, column: pa.ChunkedArray) -> None:
        self._chunks += column.chunks

    def whole(self) -> pa.ChunkedArray:
        return pa.chunked_array(self._chunks, self._kind)


class _Numbers:
    """Numbers, or the codes of names, in one array with room to spare: what is not written to takes no memory."""

    def __init__(self, kind: pa.DataType) -> None:
        self._codes = pa.types.is_dictionary(kind)
        self._names: dict[str, int] = {}
        self._name_kind = kind.value_type if self._codes else None
        self._widest = np.dtype((kind.index_type if self._codes else kind).to_pandas_dtype())
        self._rows = 0
        self._values: npt.NDArray[Any] = np.empty(0, dtype=np.int8)
        self._valid: Bools | None = None  # None: every row so far

    def append(self, column: pa.ChunkedArray) -> None:
        begin, end = self._rows, self._rows + len(column)
        piece = as_one(column)
        own = filled(piece.indices if self._codes else piece, 0)
        if self._codes:
            codes = [self._names.setdefault(name, len(self._names)) for name in piece.dictionary.to_pylist()]
            if codes != list(range(len(codes))):
                own = np.array(codes, dtype=own.dtype)[own]
        wide = self._wide_enough(own)
        if end > len(self._values):
            self._values = _with_room(self._values, max(end, 2 * begin), begin, wide)
        elif wide != self._values.dtype:
            self._values = _with_room(self._values, len(self._values), begin, wide)
        if column.null_count and self._valid is None:
            self._valid = np.ones(len(self._values), dtype=np.bool_)
        if self._valid is not None:
            if end > len(self._valid):
                self._valid = _with_room(self._valid, len(self._values), begin, self._valid.dtype)
            self._valid[begin:end] = column.is_valid()
        self._values[begin:end] = own
        self._rows = end

    def _wide_enough(self, own: npt.NDArray[Any]) -> np.dtype[Any]:
        """The width that the values so far and `own` need."""
        width = self._values.dtype
        if width == self._widest or not own.size:
            return width
        reach = max(int(own.max()), -1 - int(own.min()))
        return next(item for item, largest in _LARGEST.items() if item.itemsize >= width.itemsize and reach <= largest)

    def whole(self) -> pa.Array:
        valid = self._valid
        known = None if valid is None else pa.py_buffer(np.packbits(valid[: self._rows], bitorder="little"))
        kind = pa.from_numpy_dtype(self._values.dtype)
        values = pa.Array.from_buffers(kind, self._rows, [known, pa.py_buffer(self._values[: self._rows])])
        if not self._codes:
            return values
        return pa.DictionaryArray.from_arrays(values, pa.array(list(self._names), self._name_kind))


def _with_room(values: npt.NDArray[Any], rows: int, filled: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    larger = np.empty(rows, dtype=kind)
    larger[:filled] = values[:filled]
    return larger
