"""The load process's own account."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import gevent

from loadtests.generator.load_log import LoadLog
from loadtests.generator.recorder import RequestRecorder
from loadtests.generator.spool import Spool
from servers.clock import now_ns
from tests.fakes.request_records import MS, record


def test_a_disk_that_hangs_costs_records_and_not_memory_and_the_account_says_so(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the disk."""
    reader, writer = os.pipe()
    recorder = RequestRecorder(Spool(writer, most_waiting_bytes=200_000), rows_per_batch=64)
    log = LoadLog(tmp_path, worker=0, planned=5000, recorder=recorder)
    for number in range(5000):
        recorder.append(record(number))
        gevent.sleep(0)
        assert recorder.file.waiting_bytes <= 200_000
    log.ended(None, None)
    log.write()
    rows = json.loads((tmp_path / "generator-0.json").read_text())["records"]
    assert rows["dropped"] == recorder.file.dropped_rows + 1 > 3000
    assert rows["waiting_bytes"] > 100_000
    recorder.close(timeout_s=0.05)
    assert recorder.file.rows + recorder.file.dropped_rows == 5000
    os.close(reader)


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
