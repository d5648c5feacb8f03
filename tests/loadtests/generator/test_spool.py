"""The file that a thread appends to: order, a slow disk, a broken one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import gevent
import pytest
from gevent.threadpool import ThreadPool

from loadtests.generator.spool import Spool


def test_pieces_are_in_the_file_in_order_and_told_of_where_they_lie(tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    spool = Spool(os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT), on_written=lambda *at: told.append(at))
    assert all(spool.offer(b"x" * number, number) for number in (1, 2, 3))
    spool.close()
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"x" * 6
    assert told == [(0, 1, 1), (1, 2, 2), (3, 3, 3)]
    assert (spool.rows, spool.dropped_rows, spool.waiting_bytes, spool.error) == (6, 0, 0, None)


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


def test_a_thread_that_has_no_memory_to_start_is_a_reason_and_not_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPool, "apply", apply)
    spool = Spool(os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT))
    assert spool.offer(b"x", 1)
    assert spool.settle(20.0)
    assert spool.error is not None
    assert (spool.error.errno, spool.dropped_rows) == (errno.ENOMEM, 1)
    assert not spool.offer(b"y", 2)
    spool.close()
