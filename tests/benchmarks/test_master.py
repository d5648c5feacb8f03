from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from analysis.records.schemas import REQUESTS
from benchmarks import master
from benchmarks.master import Trial, memory_mib, thread_seconds


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sideways"], '"sideways" is unknown: use records, shares'),
        (["records", "--workers", "0"], "--workers: '0' is no count"),
        (["records", "--rates", ","], "--rates: the list is empty"),
        (["records", "--seconds", "x"], "--seconds: 'x' is no count"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert master.main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_process_without_other_threads_spends_its_time_in_the_main_one() -> None:
    before = thread_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    after = thread_seconds(os.getpid())
    assert after["main"] - before["main"] >= 0.04
    assert after["channel"] == before["channel"] == 0.0
    assert memory_mib(os.getpid()) > 10


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
