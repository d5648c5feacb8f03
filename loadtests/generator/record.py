"""The record of one request, and records as rows of a table. Imports no gevent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import column_of


class RequestRecord(NamedTuple):
    """One row of `REQUESTS`: what the load process measured, and `served`. A plain tuple: made inside the window."""

    request_id: str
    session_id: str
    trial: int
    arm: str | None
    replica: str | None
    pair_id: str
    scheduled_ns: int
    sent_ns: int
    first_token_ns: int | None
    end_ns: int
    status: str
    error: str | None
    prompt_tokens: int
    max_tokens: int | None  # None, as the next two, for an embedding: it has no tokens
    output_tokens: int | None
    token_ns: npt.NDArray[np.int64] | None  # offsets from sent_ns, shape (output_tokens,)
    phase: str
    served: Sequence[int | None]  # what the server said of it, shape (len(SERVED_COLUMNS),); None where it said nothing

    @property
    def ok(self) -> bool:
        return self.status == "OK"

    @property
    def ttft_ms(self) -> float | None:
        """Scheduled time to first token, in ms; None when no token came."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.scheduled_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Scheduled time to the end, in ms."""
        return (self.end_ns - self.scheduled_ns) / 1e6


# A column of the schema that is no field of a record is a whole number that the server measures: it comes as trailing
# metadata under the column's own name.
SERVED_COLUMNS = tuple(name for name in REQUESTS.names if name not in RequestRecord._fields)
_TIMES = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")


def request_batch(rows: Sequence[RequestRecord], *, offset_ns: int = 0) -> pa.RecordBatch:
    """Return `rows` (one or more) as one batch with the schema REQUESTS.

    `offset_ns` is added to every time that the load process took.
    """
    values = dict(zip(RequestRecord._fields, zip(*rows, strict=True), strict=True))
    values |= zip(SERVED_COLUMNS, zip(*values.pop("served"), strict=True), strict=True)
    columns = [column_of(values[field.name], field.type) for field in REQUESTS]
    if offset_ns:
        for place in map(REQUESTS.get_field_index, _TIMES):
            columns[place] = pc.add(columns[place], offset_ns)
    return pa.RecordBatch.from_arrays(columns, schema=REQUESTS)
