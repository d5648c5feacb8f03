from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.records.schemas import REQUESTS
from benchmarks.observed import Emitted, Note, Observed, write_notes


def test_notes_come_back_as_they_were_made(tmp_path: Path) -> None:
    note = Note(name="a", scheduled=1, sent=2)
    note.stamps.extend([10, 20])
    note.ended(end_ns=30, ok=True, trailing={"tailgate-recv-ns": "5", "tailgate-end-ns": "6"})
    write_notes([note, Note(name="b", scheduled=3, sent=4)], tmp_path / "notes.npz")
    seen = Observed.of_notes(tmp_path / "notes.npz")
    assert seen.names.tolist() == ["a", "b"]
    assert seen.counts.tolist() == [2, 0]
    assert seen.stamps.tolist() == [10, 20]
    assert seen.end.tolist() == [30, 0]
    assert seen.ok.tolist() == [1, 0]
    assert (seen.recv[0], seen.answer[0]) == (5, 6)


def row(number: int, status: str = "OK") -> dict[str, object]:
    values = {field.name: None for field in REQUESTS}
    return {
        **values, "request_id": f"1-{number}", "scheduled_ns": 100, "sent_ns": 110, "end_ns": 190, "status": status,
        "token_ns": [5, 9], "server_recv_ns": 120, "server_end_ns": 180,
    }  # fmt: skip


def test_records_are_seen_the_same_way_and_a_torn_tail_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests-0.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, REQUESTS) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row(0), row(1, "CANCELLED")], schema=REQUESTS))
        writer.write_batch(pa.RecordBatch.from_pylist([row(2)], schema=REQUESTS))
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    seen = Observed.of_records(path)
    assert seen.names.tolist() == ["1-0", "1-1"]
    assert seen.stamps.tolist() == [115, 119, 115, 119]
    assert seen.end.tolist() == [190, 0]
    assert seen.ok.tolist() == [1, 0]
    assert seen.answer.tolist() == [180, 180]


def test_ticks_that_were_not_sent_have_no_time() -> None:
    sent = Emitted(
        ticks=np.array([3, 5]), emits=np.array([30, 50]), names=np.array(["a"]), first_ticks=np.array([3]),
        tokens=np.array([2]), phases=2,
    )  # fmt: skip
    assert sent.at(np.array([2, 3, 4, 5, 6])).tolist() == [0, 30, 0, 50, 0]
