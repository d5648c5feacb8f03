"""Messages to the front: in order, and in the pipe before what may hold the interpreter begins."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from servers.engine.outbox import Outbox


def test_what_was_put_is_in_the_pipe_once_it_is_flushed() -> None:
    front_end, engine_end = multiprocessing.Pipe()
    outbox = Outbox()
    outbox.put("first")
    sender = threading.Thread(target=outbox.send, args=(engine_end,))
    sender.start()
    outbox.put("second")
    assert outbox.flush(10.0)
    received: list[str] = []
    while front_end.poll():
        received += front_end.recv()
    assert received == ["first", "second"], "and nothing of the flush itself"
    outbox.put("last")
    outbox.close()
    sender.join(10.0)
    assert front_end.recv() == ["last"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_front_that_does_not_read_holds_a_flush_up_no_longer_than_it_may(is_gone: bool) -> None:
    front_end, engine_end = multiprocessing.Pipe()
    outbox = Outbox()
    if is_gone:
        front_end.close()
    outbox.put("x" * (64 << 20))  # more than a pipe takes
    sender = threading.Thread(target=outbox.send, args=(engine_end,), daemon=True)
    sender.start()
    assert not outbox.flush(0.05)
    if not is_gone:
        front_end.close()
    outbox.close()
    sender.join(10.0)
    assert not sender.is_alive()
