from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from analysis.records.schemas import REQUESTS
from benchmarks.master import Trial


def test_every_record_of_two_workers_is_acknowledged_and_in_the_run(tmp_path: Path) -> None:
    with Trial(tmp_path / "trial", workers=2, rate=1000, seconds=2, tokens=3, requests=40) as trial:
        row = trial.figures()
    assert (row["rows"], row["rows_in_the_run"], row["unacknowledged_rows"]) == (2000, 2000, 0)
    # Each of two workers records 500 a second: a whole batch of 256, and the rest once a second.
    assert row["batches"] == 8
    assert (row["exit_code"], row["lost"], row["clock_beyond_bound"]) == (0, 0, 0)
    assert min(row["round_trip_ms"]["p50"], row["ack_ms"]["p50"], row["master_core"]) > 0
    record = sum(field.type.bit_width // 8 for field in REQUESTS if pa.types.is_integer(field.type))
    assert row["bytes_per_record"] > record + 3 * 8
    assert row["share_bytes"] > 40 * 8
    assert 0 < row["shares_s"] <= row["ready_s"]
