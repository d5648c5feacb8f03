"""Records on their way to the master over a channel that loses, repeats and disorders, and shares on their way back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from loadtests.workers.shipping import Inbox, Outbox, ShareParts, new_folder
from tests.fakes.request_records import record, row_of

OFFSET_NS = 3_200_000_000


class Channel:
    """Carries messages in both directions; `fate` says how often each arrives, and they overtake each other."""

    def __init__(self, fate: Callable[[], int]) -> None:
        self._fate = fate
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self.sent = 0

    def to_master(self, message: dict[str, Any]) -> None:
        self.sent += 1
        for _ in range(self._fate()):
            gevent.spawn_later(random.random() * 0.002, self._arrive, message)

    def to_worker(self, number: int) -> None:
        for _ in range(self._fate()):
            gevent.spawn_later(random.random() * 0.002, self._acknowledge, number)

    def _arrive(self, message: dict[str, Any]) -> None:
        assert self.inbox is not None
        self.inbox.take(message["number"], message["rows"], message["offset_ns"], message["batch"])

    def _acknowledge(self, number: int) -> None:
        assert self.outbox is not None
        self.outbox.acknowledged(number)


def ship(tmp_path: Path, channel: Channel, *, batches: int = 20, resend_after_s: float = 0.05) -> bool:
    """Whether the master had all `batches` of 4 records within some seconds."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "kept" / "requests-0.arrow"
    channel.inbox = Inbox(tmp_path / "run" / "requests-0.arrow", acknowledge=channel.to_worker)
    channel.outbox = Outbox(
        path,
        send=channel.to_master,
        clock=lambda: (OFFSET_NS, 1000),
        resend_after_s=resend_after_s,
        window_bytes=20_000,
    )
    recorder = RequestRecorder(record_file(path, remedy="", on_written=channel.outbox.written), rows_per_batch=4)
    for number in range(4 * batches):
        recorder.append(record(number))
    recorder.close()
    arrived = channel.outbox.wait_empty(8.0)
    channel.outbox.close()
    channel.inbox.close()
    return arrived


def test_each_record_arrives_once_and_on_the_masters_clock(tmp_path: Path) -> None:
    channel = Channel(lambda: 1)
    assert ship(tmp_path, channel)
    table, torn = read_table(tmp_path / "run" / "requests-0.arrow", REQUESTS)
    assert not torn
    rows = table.to_pylist()
    assert [row["request_id"] for row in rows] == [f"1-{number}" for number in range(80)]
    base = record(0)
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns"):
        assert {row[name] for row in rows} == {getattr(base, name) + OFFSET_NS}
    assert {row["server_recv_ns"] for row in rows} == {row_of(base)["server_recv_ns"]}
    assert rows[0]["token_ns"] == base.token_ns.tolist()
    kept, _ = read_table(tmp_path / "kept" / "requests-0.arrow", REQUESTS)
    assert set(kept.column("sent_ns").to_pylist()) == {base.sent_ns}


@pytest.mark.parametrize("seed", range(3))
def test_a_channel_that_loses_and_repeats_and_disorders_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    channel = Channel(lambda: rng.choice((0, 1, 1, 1, 2)))
    assert ship(tmp_path, channel)
    rows = read_table(tmp_path / "run" / "requests-0.arrow", REQUESTS)[0].to_pylist()
    assert [row["request_id"] for row in rows] == [f"1-{number}" for number in range(80)]
    assert channel.sent > 20


def test_what_a_silent_master_lacks_is_counted_and_little_is_sent_to_it(tmp_path: Path) -> None:
    channel = Channel(lambda: 0)
    (tmp_path / "run").mkdir()
    path = tmp_path / "kept" / "requests-0.arrow"
    outbox = Outbox(path, send=channel.to_master, clock=lambda: (0, 0), window_bytes=20_000, resend_after_s=60.0)
    recorder = RequestRecorder(record_file(path, remedy="", on_written=outbox.written), rows_per_batch=4)
    for number in range(400):
        recorder.append(record(number))
    recorder.close()
    assert not outbox.wait_empty(0.1)
    assert outbox.unacknowledged_rows == 400
    assert channel.sent <= 20  # a window, not the run
    outbox.close()


@pytest.mark.parametrize("batch", [b"", b"nonsense", b"\xff" * 64])
def test_what_is_no_batch_of_records_is_refused(tmp_path: Path, batch: bytes) -> None:
    inbox = Inbox(tmp_path / "requests-0.arrow", acknowledge=lambda number: None)
    with pytest.raises(ValueError, match="batch 0"):
        inbox.take(0, 4, 0, batch)
    inbox.close()
    assert read_table(tmp_path / "requests-0.arrow", REQUESTS)[0].num_rows == 0


def test_shares_put_together_from_their_parts_are_the_schedule(tmp_path: Path) -> None:
    traffic = TrafficConfig(duration_s=30.0, rate=20.0)
    schedule = build_schedule(
        traffic, Source(), arms=["a", "b"], seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=8
    )
    indices: list[int] = []
    for worker in range(3):
        parts = ShareParts(schedule.share(worker, 3), part_bytes=1000)
        assert len(parts) > 5
        content = b"".join(parts.part(number) for number in range(len(parts)))
        (tmp_path / f"{worker}.arrow").write_bytes(content)
        share = Schedule.read(tmp_path / f"{worker}.arrow")
        indices += share.table["index"].to_pylist()
        assert share.arms == schedule.arms
    assert sorted(indices) == list(range(len(schedule)))
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("20260101T120000Z-demo/trial-01", "20260101T120000Z-demo/trial-01"),
        ("../../etc/trial-01", "etc/trial-01"),
        ("/root/../x", "root/x"),
        ("..", "trial"),
        ("", "trial"),
    ],
)
def test_a_name_from_the_network_stays_within_the_folder(tmp_path: Path, name: str, expected: str) -> None:
    assert new_folder(tmp_path, name) == tmp_path / expected
    assert new_folder(tmp_path, name).name.endswith("-2")
