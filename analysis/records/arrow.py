"""Arrow columns as arrays of NumPy: numbers with null filled in, and texts as small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Codes, Ints

_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def integers(column: Any, missing: int) -> Any:
    """Return whole numbers as wide as the column's, with `missing` for null. May be read-only."""
    return pc.fill_null(column, missing).to_numpy() if column.null_count else column.to_numpy()


def moments(column: Any) -> Ints:
    """Return times in ns of 64 bits, -1 for null. May be read-only."""
    return np.asarray(integers(column, -1), dtype=np.int64)


def codes(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """Return one small integer for each distinct text, in alphabetical order of the texts, -1 for null; and the
    texts."""
    encoded = _whole(column)
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int16 if len(names) < _FEW_NAMES else np.int32)
    rank[order] = np.arange(len(names))
    return rank[integers(encoded.indices, -1)], tuple(names[index] for index in order)


def groups(column: Any) -> Codes:
    """Return one number below the length for each distinct text, -1 for null."""
    numbers: Codes = integers(_whole(column).dictionary_encode().indices, -1)
    return numbers


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    """Return which codes stand for `name`."""
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
