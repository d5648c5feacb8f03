"""Messages to an engine that stands still."""

from __future__ import annotations

import multiprocessing
import threading

from servers.engine.messages import Cancel, Submit
from servers.front.sender import Sender


def submit(number: int, tokens: int) -> Submit:
    return Submit(request_id=str(number), prompt=[5] * tokens, max_tokens=1, recv_ns=0)


def test_nobody_waits_for_an_engine_that_does_not_read_and_nothing_is_lost_or_reordered() -> None:
    near, far = multiprocessing.get_context("spawn").Pipe()
    sender = Sender(near)
    sent: list[Submit | Cancel] = []
    for number in range(400):  # a pipe takes some 200 KiB
        for message in (submit(number, 50_000 if number % 50 == 0 else 2_000), Cancel(request_id=str(number))):
            sent.append(message)
            done = threading.Thread(target=sender.send, args=(message,), daemon=True)
            done.start()
            done.join(5.0)
            assert not done.is_alive(), f"message {len(sent)} waits for the engine"
    assert [far.recv() for _ in sent] == sent


def test_an_engine_that_is_gone_is_no_error() -> None:
    near, far = multiprocessing.get_context("spawn").Pipe()
    sender = Sender(near)
    far.close()
    for number in range(3):
        sender.send(submit(number, 100_000))
        sender.send(Cancel(request_id=str(number)))
