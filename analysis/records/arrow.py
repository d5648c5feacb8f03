"""Arrow columns as arrays of NumPy: numbers with null filled in, and texts as small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from analysis.arrays import Bools, Codes, Ints
from analysis.records import scratch
from analysis.records.columns import Groups, as_one, filled
from analysis.records.scratch import lean, parts, pieces

_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def integers(column: Any, missing: int) -> Any:
    """Whole numbers of 32 or 64 bits, as wide as the column's at least, with `missing` for null. May be read-only."""
    values = filled(as_one(column), missing)
    if values.itemsize >= 4:
        return values
    # Sums and products of counts do not fit in less; one value for all rows takes no memory.
    if len(values) > 1 and lean(values).strides == (0,):
        return np.broadcast_to(np.int32(values[0]), len(values))
    wide = scratch.empty(len(values), np.int32)
    wide[:] = values
    return wide


def moments(column: Any) -> Ints:
    """Moments in ns of 64 bits, -1 for null, also where there is none at all. May be read-only."""
    return np.asarray(integers(column, -1).astype(np.int64, copy=False))


def codes(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """One small integer for each distinct text, in alphabetical order of the texts; -1 for null."""
    whole = as_one(column)
    encoded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int16 if len(names) < _FEW_NAMES else np.int32)
    rank[order] = np.arange(len(names))
    places = filled(encoded.indices, -1)
    number = scratch.empty(len(places), rank.dtype)
    for part in parts(len(places)):
        number[part] = rank[places[part]]
    return number, tuple(names[index] for index in order)


def groups(column: pa.ChunkedArray) -> Codes:
    """One number below the length for each distinct text; -1 for null."""
    grouped = Groups()
    for piece in pieces(column):
        grouped.append(piece)
    return grouped.numbers()


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)
