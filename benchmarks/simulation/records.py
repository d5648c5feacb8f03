"""Made-up requests as clients record them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailgate.analysis.arrays import Ints
from tailgate.analysis.records.schemas import REQUESTS

EPOCH_NS = 1_700_000_000_000_000_000
NETWORK_S = 0.002  # the mean way through the network, to the server and back


def to_ns(seconds: npt.ArrayLike) -> Ints:
    """Convert seconds since the start of the trial to nanoseconds since the epoch."""
    return EPOCH_NS + (np.asarray(seconds) * 1e9).astype(np.int64)


def request_table(sent_ns: Ints, **columns: object) -> pa.Table:
    """Make requests of trial 1 that were sent as scheduled and answered.

    `columns` add to this or override it: a value for all of them, one for each, or None, the default of other columns.
    """
    count = len(sent_ns)
    values = {"trial": 1, "status": "OK", "scheduled_ns": sent_ns, "sent_ns": sent_ns, **columns}

    def column(field: pa.Field) -> pa.Array:
        value = values.get(field.name)
        if value is None:
            return pa.nulls(count, field.type)
        if isinstance(value, pa.Array):
            return value
        return pa.array([value] * count if isinstance(value, str | int) else value, field.type)

    return pa.table([column(field) for field in REQUESTS], schema=REQUESTS)


def token_lists(offsets_ns: Ints, counts: Ints) -> pa.Array:
    """Make `token_ns` of requests with so many tokens each, from the offsets of all one after the other."""
    return pa.ListArray.from_arrays(
        pa.array(np.append(0, np.cumsum(counts)), pa.int32()), pa.array(offsets_ns, pa.int64())
    )
