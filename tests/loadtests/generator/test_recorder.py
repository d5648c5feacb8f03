"""Records on disk, the load process's own account, and the garbage window."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gevent
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.requests import REQUESTS
from loadtests.generator.recorder import (
    GarbageWindow,
    LagHistogram,
    LoadLog,
    RequestRecord,
    RequestRecorder,
    request_batch,
)
from servers.clock import now_ns
from servers.config import ConfigError

MS = 1_000_000


def record(number: int = 0, **changes: object) -> RequestRecord:
    base = RequestRecord(
        request_id=f"1-{number}",
        session_id="s",
        turn=0,
        trial=1,
        arm="eager",
        replica="eager-0",
        pair_id=f"1-{number}",
        scheduled_ns=1_000 * MS,
        sent_ns=1_001 * MS,
        first_token_ns=1_011 * MS,
        end_ns=1_101 * MS,
        status="OK",
        error=None,
        prompt_tokens=7,
        max_tokens=3,
        output_tokens=3,
        token_ns=np.array([10 * MS, 20 * MS, 30 * MS], dtype=np.int64),
        queue_ns=1,
        prefill_ns=2,
        decode_ns=3,
        compile_stall_ns=None,
        batch_id=4,
        batch_size=1,
        padded_batch=2,
        padded_length=8,
        server_recv_ns=1_002 * MS,
        server_end_ns=1_100 * MS,
        phase="measure",
    )
    return base._replace(**changes)  # type: ignore[arg-type]


def rows_of(path: Path) -> list[dict[str, object]]:
    """Every row of every whole batch; a torn tail is left out."""
    rows: list[dict[str, object]] = []
    with pa.OSFile(str(path), "rb") as source:
        reader = pa.ipc.open_stream(source)
        assert reader.schema == REQUESTS
        while True:
            try:
                rows += reader.read_next_batch().to_pylist()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return rows


def test_record_has_the_fields_of_the_schema_in_order() -> None:
    assert list(RequestRecord._fields) == REQUESTS.names


def test_rows_come_back_as_they_were_appended(tmp_path: Path) -> None:
    rows = [
        record(0),
        record(1, arm=None, replica=None, first_token_ns=None, output_tokens=0, token_ns=np.zeros(0, dtype=np.int64)),
        record(2, status="UNAVAILABLE", error="refused", token_ns=np.array([5], dtype=np.int64)),
    ]
    recorder = RequestRecorder(tmp_path / "deep" / "requests-0.arrow", rows_per_batch=2)
    for row in rows:
        recorder.append(row)
    recorder.close()
    recorder.close()
    expected = [{**row._asdict(), "token_ns": row.token_ns.tolist()} for row in rows]
    assert rows_of(tmp_path / "deep" / "requests-0.arrow") == expected


def test_file_of_a_process_that_died_at_once_reads_as_empty(tmp_path: Path) -> None:
    RequestRecorder(tmp_path / "requests-0.arrow")
    assert rows_of(tmp_path / "requests-0.arrow") == []


def test_full_batch_is_on_disk_without_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    recorder = RequestRecorder(path, rows_per_batch=4)
    for number in range(6):
        recorder.append(record(number))
    assert recorder.settle()
    assert len(rows_of(path)) == recorder.written == 4


def test_columns_of_one_value_of_many_and_of_none_come_back(tmp_path: Path) -> None:
    """Each way in which a column is turned into Arrow: constant, mixed, all null, some null, beyond ASCII."""
    changes: list[dict[str, object]] = [
        {"arm": "eager", "error": None, "queue_ns": 1},
        {"arm": "compilé", "error": "é", "queue_ns": None},
        {"arm": "eager", "error": "", "queue_ns": -1},
    ]
    for several in (changes, changes[:1], changes[:2], [{"arm": None}, {"arm": "x"}], [{"arm": "é"}] * 5):
        rows = [record(number, **change) for number, change in enumerate(several)]
        batch = request_batch(rows)
        batch.validate(full=True)
        assert batch.to_pylist() == [{**row._asdict(), "token_ns": row.token_ns.tolist()} for row in rows]


def test_a_disk_that_hangs_costs_records_and_not_memory_and_the_account_says_so(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the disk."""
    reader, writer = os.pipe()
    path = tmp_path / "requests-0.arrow"
    recorder = RequestRecorder(path, rows_per_batch=64, most_waiting_bytes=200_000, descriptor=writer)
    log = LoadLog(tmp_path, worker=0, planned=5000, recorder=recorder)
    for number in range(5000):
        recorder.append(record(number))
        gevent.sleep(0)
        assert recorder.waiting <= 200_000
    log.ended_unrecorded(None)
    log.write()
    told = json.loads((tmp_path / "generator-0.json").read_text())["records"]
    assert told["dropped"] == recorder.dropped + 1 > 3000
    assert told["waiting_bytes"] > 100_000
    recorder._spool.close(timeout_s=0.05)
    assert recorder.written + recorder.dropped == 5000 - 5000 % 64
    os.close(reader)


def test_a_broken_disk_is_told_to_whoever_appends(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    recorder = RequestRecorder(tmp_path / "requests-0.arrow", rows_per_batch=2, descriptor=writer)
    os.close(reader)
    recorder.append(record(0))
    recorder.append(record(1))
    assert recorder.settle()
    with pytest.raises(BrokenPipeError):
        recorder.flush()
    with pytest.raises(BrokenPipeError):
        recorder.close()
    assert recorder.dropped == 2


def test_account_holds_cpu_of_each_second_once_the_schedule_has_begun(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=0, planned=1)
    until = time.perf_counter() + 0.6
    while time.perf_counter() < until:
        pass
    log.write()
    assert log.account()["cpu"]["of_s"] == 0  # getting ready may take all of a core
    log.start_ns = now_ns()
    until = time.thread_time() + 0.6
    while time.thread_time() < until:
        pass
    log.write()
    cpu = log.account()["cpu"]
    assert cpu["of_s"] > 0.5
    assert 0.1 < cpu["mean"] == cpu["max"] <= 1.05
    assert cpu["busy_s"] in (0.0, cpu["of_s"])


def test_records_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    code = f"""
import os, signal
from pathlib import Path
from loadtests.generator.recorder import RequestRecorder
from tests.loadtests.generator.test_recorder import record
recorder = RequestRecorder(Path({str(path)!r}))
for number in range(1000):
    recorder.append(record(number))
recorder.flush()
recorder.settle()
recorder.append(record(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [row["request_id"] for row in rows_of(path)] == [f"1-{number}" for number in range(1000)]


@pytest.mark.parametrize("cut", [1, 100, 1_000])
def test_torn_tail_loses_the_last_batch_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "requests-0.arrow"
    recorder = RequestRecorder(path, rows_per_batch=10)
    for number in range(30):
        recorder.append(record(number))
    assert recorder.settle()
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(rows_of(path)) == 20


def test_records_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    RequestRecorder(tmp_path / "requests-0.arrow").close()
    with pytest.raises(ConfigError, match="exists already: give --records an empty directory"):
        RequestRecorder(tmp_path / "requests-0.arrow")


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RequestRecorder(tmp_path / "file" / "requests-0.arrow")


@given(st.lists(st.integers(1_000, 3_600_000_000_000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_lag_quantile_is_at_most_one_percent_high_and_never_low(lags: list[int], q: float) -> None:
    histogram = LagHistogram()
    for lag in lags:
        histogram.add(lag)
    exact_ms = float(np.quantile(lags, q, method="inverted_cdf")) / MS
    assert exact_ms * (1 - 1e-9) <= histogram.quantile_ms(q) <= exact_ms * 1.0101
    assert histogram.max_ms == pytest.approx(max(lags) / MS)


def test_lag_of_nothing_is_zero() -> None:
    assert LagHistogram().summary() == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_log_counts_and_quantiles_count_from_the_schedule(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=3, planned=5, arms=["eager", "compiled"])
    at_ns = now_ns()
    for number in range(4):
        log.begun("eager")
        if number < 3:
            scheduled = at_ns - 500 * MS
            done = record(
                number,
                scheduled_ns=scheduled,
                sent_ns=scheduled + 40 * MS,
                first_token_ns=scheduled + 100 * MS,
                end_ns=scheduled + (200 + 100 * number) * MS,
                status="OK" if number < 2 else "UNAVAILABLE",
            )
            log.ended(done, "eager")
    log.lag.add(2 * MS)
    log.complete = True
    log.write()
    progress = json.loads((tmp_path / "progress-3.json").read_text())
    generator = json.loads((tmp_path / "generator-3.json").read_text())
    assert progress["arms"]["eager"] == {
        "n": 3,
        "failed": 1,
        "inflight": 1,
        "ttft_p50_ms": 100.0,
        "ttft_p99_ms": 100.0,
        "e2e_p50_ms": 250.0,
        "e2e_p99_ms": 299.0,
    }
    assert progress["overall"]["eager"] == progress["arms"]["eager"]
    assert progress["arms"]["compiled"]["ttft_p99_ms"] is None
    assert (generator["planned"], generator["started"], generator["finished"], generator["failed"]) == (5, 4, 3, 1)
    assert generator["lag_ms"]["max"] == 2.0
    assert generator["complete"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generator-3.json", "progress-3.json"]


def test_old_answers_leave_the_recent_quantiles(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, worker=0, planned=1)
    log.ended(record(0), None)  # ended long ago
    log.write()
    progress = json.loads((tmp_path / "progress-0.json").read_text())
    assert progress["arms"]["eager"]["e2e_p50_ms"] is None
    assert progress["overall"]["eager"]["e2e_p50_ms"] == 101.0


def test_collector_is_off_in_the_window_and_sweeps_free_cycles() -> None:
    log = LoadLog(None, worker=0, planned=None)
    window = GarbageWindow(log)
    assert gc.isenabled()
    window.open()
    try:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        window.sweep()
        assert log.gc_ms["count"] == 0  # nothing has gathered yet
        for _ in range(GarbageWindow.SWEEP_ABOVE + 1):
            cycle: list[object] = []
            cycle.append(cycle)
        window.sweep()
        assert log.gc_ms["count"] == 1
        assert gc.get_count()[0] < GarbageWindow.SWEEP_ABOVE
    finally:
        window.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
