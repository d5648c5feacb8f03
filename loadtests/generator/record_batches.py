"""Records as Arrow columns, at a few microseconds a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analysis.records.schemas import REQUESTS
from analysis.records.tables import column_of
from loadtests.generator.record import SERVED_COLUMNS, RequestRecord


def request_batch(rows: Sequence[RequestRecord]) -> pa.RecordBatch:
    """`rows` (one or more) as one record batch with the schema REQUESTS."""
    values = dict(zip(RequestRecord._fields, zip(*rows, strict=True), strict=True))
    values |= zip(SERVED_COLUMNS, zip(*values.pop("served"), strict=True), strict=True)
    columns = [_column(values[name], kind) for name, kind in _KINDS.items()]
    return pa.RecordBatch.from_arrays(columns, schema=REQUESTS)


def moved(batch: pa.RecordBatch, offset_ns: int) -> pa.RecordBatch:
    """Return the requests with `offset_ns` added to every time that the load process took."""
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns"):
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), pc.add(batch.column(place), offset_ns))
    return batch


# pyarrow takes some 100 ns to look at each Python object. numpy reads numbers in 40 ns, and many columns of text hold
# one value throughout. What holds a None goes the general way.


def _column(values: tuple[Any, ...], kind: Any) -> pa.Array:
    first, rows = values[0], len(values)
    if first is None or kind is _TEXT:
        constant = values.count(first) == rows
        if constant and first is None:
            return pa.nulls(rows, kind)
        return _repeated(first, rows) if constant else column_of(values, kind)
    try:
        return _lists(values) if kind is _TOKEN_LIST else _whole_numbers(values, kind)
    except (TypeError, OverflowError):
        return column_of(values, kind)


def _repeated(text: str, rows: int) -> pa.Array:
    raw = text.encode("utf-8")
    ends = np.arange(rows + 1, dtype=np.int32) * len(raw)
    return pa.Array.from_buffers(_TEXT, rows, [None, pa.py_buffer(ends), pa.py_buffer(raw * rows)])


def _whole_numbers(values: tuple[int, ...], kind: Any) -> pa.Array:
    flat = np.fromiter(values, np.int64 if kind is _LONG else np.int32, len(values))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(flat)])


def _lists(values: tuple[Any, ...]) -> pa.Array:
    # All tokens of all rows as one flat array: a list of Python lists would cost more than all the rest.
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=ends[1:])
    flat = pa.Array.from_buffers(_LONG, int(ends[-1]), [None, pa.py_buffer(b"".join(values))])
    return pa.Array.from_buffers(_TOKEN_LIST, len(values), [None, pa.py_buffer(ends)], children=[flat])


_TEXT, _LONG, _TOKEN_LIST = pa.string(), pa.int64(), pa.list_(pa.int64())
# Each kind as one object: comparing types of columns costs more than comparing identities.
_KINDS = {
    field.name: next((kind for kind in (_TEXT, _LONG, _TOKEN_LIST) if kind == field.type), field.type)
    for field in REQUESTS
}
