"""Rows of the table of requests, and files of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tailgate.analysis.records.request_columns import RequestColumns
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import END_LINE_BYTES, RecordWriter, read_end, read_table
from tailgate.loadtests.generator.record import SERVED_COLUMNS, RequestRecord
from tailgate.loadtests.generator.recorder import Spool

S = 1_000_000_000
T0 = 1_700_000_000 * S
WHOLE = 10**9  # rows of a batch that is the whole file


def row(index=0, *, at_s=0.0, ttft_s=0.1, e2e_s=0.5, status="OK", arm="eager", **more):
    start = T0 + int(at_s * S)
    return {
        "request_id": f"1-{index}-{arm}",
        "trial": 1,
        "arm": arm,
        "scheduled_ns": start,
        "sent_ns": start,
        "first_token_ns": None if ttft_s is None else start + int(ttft_s * S),
        "end_ns": start + int(e2e_s * S),
        "status": status,
        "output_tokens": 5,
    } | more


def table_of(rows):
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def columns_of(rows):
    return RequestColumns.of(table_of(rows))


def unstate(path: Path) -> None:
    """Take the last line from the Arrow file at `path`, which then states nothing."""
    assert read_end(path) is not None
    os.truncate(path, path.stat().st_size - END_LINE_BYTES)


def append_rows(path, schema, rows):
    """Write the rows of the file at `path`, if there is one, and `rows` after them."""
    held = read_table(path, schema)[0].to_pylist() if path.exists() else []
    path.unlink(missing_ok=True)
    write_rows(path, [*held, *rows], schema, batch=WHOLE)


def change_rows(path, edit, schema=REQUESTS, *, batch=WHOLE):
    """Write the file at `path` after `edit` of the list of its rows."""
    rows = edit(read_table(path, schema)[0].to_pylist())
    path.unlink()
    write_rows(path, rows, schema, batch=batch)


def write_rows(path, rows, schema=REQUESTS, *, batch=1):
    with RecordWriter(path, schema) as writer:
        for start in range(0, len(rows), batch):
            for item in rows[start : start + batch]:
                writer.append(item)
            writer.flush()


MS = 1_000_000


def record(number: int = 0, **changes: object) -> RequestRecord:
    """Return the record of a good answer, except for `changes` by column."""
    base = RequestRecord(
        **{"request_id": f"1-{number}", "pair_id": f"1-{number}", "session_id": "s", "trial": 1},
        **{"arm": "eager", "replica": "eager-0", "status": "OK", "error": None, "phase": "measure", "served": ()},
        **{"scheduled_ns": 1_000 * MS, "sent_ns": 1_001 * MS, "first_token_ns": 1_011 * MS, "end_ns": 1_101 * MS},
        **{"prompt_tokens": 7, "max_tokens": 3, "output_tokens": 3},
        token_ns=np.array([10 * MS, 20 * MS, 30 * MS], dtype=np.int64),
    )
    served = {"compile_stall_ns": None, "server_recv_ns": 1_002 * MS, "server_end_ns": 1_100 * MS}
    served |= {name: changes.pop(name) for name in SERVED_COLUMNS if name in changes}
    return base._replace(**changes, served=[served[name] for name in SERVED_COLUMNS])


def piped(descriptor: int, **settings: Any) -> Spool:
    """Return what writes batches of records, or bytes, to a pipe, which stands for a disk."""

    def write(piece: Any) -> None:
        os.write(descriptor, piece if isinstance(piece, bytes) else bytes(piece.serialize()))

    return Spool(write, **settings)


def row_of(record: RequestRecord) -> dict[str, Any]:
    """Return the row by column, as the file gives it back."""
    served = dict(zip(SERVED_COLUMNS, record.served, strict=True))
    row = {**record._asdict(), **served, "token_ns": record.token_ns.tolist()}
    del row["served"]
    return row
