"""Records on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import numpy as np
import pyarrow as pa
import pytest

from analysis.records.schemas import REQUESTS
from loadtests.generator.record import SERVED_COLUMNS, RequestRecord, record_of
from loadtests.generator.record_batches import request_batch
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import Spool
from servers.fields import ConfigError
from servers.metadata import ARM_HEADER, trailing_key
from tests.fakes.request_rows import record, row_of


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


def test_rows_come_back_as_they_were_appended(tmp_path: Path) -> None:
    rows = [
        record(0),
        record(1, arm=None, replica=None, first_token_ns=None, output_tokens=0, token_ns=np.zeros(0, dtype=np.int64)),
        record(2, status="UNAVAILABLE", error="refused", token_ns=np.array([5], dtype=np.int64)),
    ]
    recorder = RequestRecorder(
        record_file(tmp_path / "deep" / "requests-0.arrow", remedy="take another"), rows_per_batch=2
    )
    for row in rows:
        recorder.append(row)
    recorder.close()
    recorder.close()
    expected = [row_of(row) for row in rows]
    assert rows_of(tmp_path / "deep" / "requests-0.arrow") == expected


def test_a_broken_disk_is_told_to_whoever_appends(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    recorder = RequestRecorder(Spool(writer), rows_per_batch=2)
    os.close(reader)
    recorder.append(record(0))
    recorder.append(record(1))
    assert recorder.file.settle(5.0)
    with pytest.raises(BrokenPipeError):
        recorder.flush()
    with pytest.raises(BrokenPipeError):
        recorder.close()
    assert recorder.file.dropped_rows == 2


def test_records_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    code = f"""
import os, signal
from pathlib import Path
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import Spool
from tests.fakes.request_rows import record
recorder = RequestRecorder(record_file(Path({str(path)!r}), remedy="take another"))
for number in range(1000):
    recorder.append(record(number))
recorder.flush()
recorder.file.settle(5.0)
recorder.append(record(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [row["request_id"] for row in rows_of(path)] == [f"1-{number}" for number in range(1000)]


def test_records_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    RequestRecorder(record_file(tmp_path / "requests-0.arrow", remedy="take another")).close()
    with pytest.raises(ConfigError, match="exists already: take another"):
        RequestRecorder(record_file(tmp_path / "requests-0.arrow", remedy="take another"))


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RequestRecorder(record_file(tmp_path / "file" / "requests-0.arrow", remedy="take another"))


def test_a_number_that_its_column_cannot_hold_is_unknown() -> None:
    rows = [record(0, batch_size=2**31, queue_ns=2**63), record(1, batch_size=7, queue_ns=9)]
    rows.append(record(2, batch_size=None, queue_ns=10**30))
    batch = request_batch(rows)
    batch.validate(full=True)
    assert batch.column("batch_size").to_pylist() == [None, 7, None]
    assert batch.column("queue_ns").to_pylist() == [None, 9, None]
    batch = request_batch(rows[::-1])
    assert batch.column("batch_size").to_pylist() == [None, 7, None]


def test_every_column_of_the_schema_is_measured_here_or_by_the_server() -> None:
    assert sorted([*RequestRecord._fields, *SERVED_COLUMNS]) == sorted([*REQUESTS.names, "served"])


def test_what_the_server_measures_is_a_whole_number() -> None:
    assert {str(REQUESTS.field(name).type) for name in SERVED_COLUMNS} <= {"int32", "int64"}


@pytest.mark.parametrize(
    ("pinned", "routed", "said", "arm", "error"),
    [
        ("new", "new", "new", "new", None),
        ("new", "", "eager", "new", 'pinned to arm "new" but arm "eager" answered: check the routes'),
        (None, "new", "new", "new", None),
        (None, "new", "", "new", None),
        (None, "", "new", "new", None),
        (None, "new", "eager", "new", 'routed to arm "new" but arm "eager" answered: check the routes'),
    ],
)
def test_an_answer_counts_for_the_arm_that_it_was_sent_to(
    pinned: str | None, routed: str, said: str, arm: str, error: str | None
) -> None:
    plan = SimpleNamespace(session_id="s", turn=0, prompt_tokens=3, max_tokens=1, phase="")
    copy: Any = SimpleNamespace(arm=pinned, plan=plan, request_id="1", pair_id="1", lane=None, scheduled_ns=0)
    call: Any = SimpleNamespace(status="OK", error="", sent_ns=1, first_token_ns=2, output_tokens=1, token_ns=b"")
    call.initial_metadata = {ARM_HEADER: routed} if routed else {}
    call.trailing_metadata = {trailing_key("arm"): said} if said else {}
    record = record_of(call, copy, 1, 3)
    assert (record.arm, record.error) == (arm, error)


def test_a_slow_disk_holds_up_nobody_and_what_it_cannot_take_is_counted() -> None:
    """A pipe that nobody reads takes 64 KiB and then makes the writer wait, as a disk that is behind does."""
    reader, writer = os.pipe()
    spool = Spool(writer, most_waiting_bytes=1 << 20)
    piece = b"x" * 40_000
    for _ in range(100):
        spool.offer(piece, 10)
        gevent.sleep(0)
        assert spool.waiting_bytes <= 1 << 20
    assert spool.rows + spool.dropped_rows < 1000  # some wait
    assert spool.dropped_rows > 700
    before = spool.dropped_rows
    assert not spool.settle(0.05)
    taken = bytearray()
    while len(taken) < 40_000 * (100 - before // 10):  # the disk is back: what waited is written
        gevent.sleep(0)
        taken += os.read(reader, 1 << 16) if select_ready(reader) else b""
    assert spool.settle(5.0)
    assert (spool.rows, spool.dropped_rows) == (1000 - before, before)
    spool.close()
    os.close(reader)


def select_ready(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0.001)[0])


def test_close_gives_up_on_a_disk_that_hangs_and_counts_what_is_lost() -> None:
    reader, writer = os.pipe()
    spool = Spool(writer)
    for _ in range(4):
        spool.offer(b"x" * 40_000, 10)
    spool.close(timeout_s=0.05)
    assert spool.rows + spool.dropped_rows == 40
    assert spool.dropped_rows >= 20
    os.close(reader)  # wakes the thread that hangs


def test_nothing_follows_a_piece_that_failed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    spool = Spool(writer)
    spool.offer(b"x", 1)
    assert spool.settle(5.0)
    assert isinstance(spool.error, BrokenPipeError)
    assert spool.offer(b"y", 2) is False
    assert spool.dropped_rows == 3
    spool.close()
