"""Rows of the table of requests, and files of them."""

import pyarrow as pa

from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter

S = 1_000_000_000
T0 = 1_700_000_000 * S


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


def write_rows(path, rows, *, batch=1):
    with RecordWriter(path, REQUESTS) as writer:
        for start in range(0, len(rows), batch):
            for item in rows[start : start + batch]:
                writer.append(item)
            writer.flush()
