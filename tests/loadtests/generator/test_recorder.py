"""Records on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.schemas import REQUESTS
from loadtests.generator.record_batches import request_batch
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import Spool
from servers.fields import ConfigError
from tests.fakes.request_records import record, row_of


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


def test_file_of_a_process_that_died_at_once_reads_as_empty(tmp_path: Path) -> None:
    RequestRecorder(record_file(tmp_path / "requests-0.arrow", remedy="take another"))
    assert rows_of(tmp_path / "requests-0.arrow") == []


def test_full_batch_is_on_disk_without_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    recorder = RequestRecorder(record_file(path, remedy="take another"), rows_per_batch=4)
    for number in range(6):
        recorder.append(record(number))
    assert recorder.file.settle(5.0)
    assert len(rows_of(path)) == recorder.file.rows == 4


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
        assert batch.to_pylist() == [row_of(row) for row in rows]


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
from tests.fakes.request_records import record
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


@pytest.mark.parametrize("cut", [1, 100, 1_000])
def test_torn_tail_loses_the_last_batch_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "requests-0.arrow"
    recorder = RequestRecorder(record_file(path, remedy="take another"), rows_per_batch=10)
    for number in range(30):
        recorder.append(record(number))
    assert recorder.file.settle(5.0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(rows_of(path)) == 20


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
