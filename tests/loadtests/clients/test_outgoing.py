"""What waits to be written has an end."""

from __future__ import annotations

import gevent
import gevent.socket
import pytest
from gevent import get_hub

from loadtests.clients import outgoing
from loadtests.clients.outgoing import Outgoing


def test_a_peer_that_reads_nothing_is_lost_before_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "MOST_WAITING", 100)
    here, there = gevent.socket.socketpair()
    here.setblocking(False)
    lost: list[OSError] = []
    out = Outgoing(here, None, get_hub().loop, lost.append)
    for _ in range(10_000):
        out.write(b"x" * 1000)
    assert [str(problem) for problem in lost] == ["the server reads nothing: 100 writes wait"]
    assert out.closed
    there.close()
    gevent.sleep(0)
    here.close()


def test_a_peer_that_reads_late_gets_all_of_it() -> None:
    here, there = gevent.socket.socketpair()
    here.setblocking(False)
    lost: list[OSError] = []
    out = Outgoing(here, None, get_hub().loop, lost.append)
    for _ in range(2000):
        out.write(b"x" * 1000)
    received = 0
    with gevent.Timeout(10.0):
        while received < 2_000_000:
            received += len(there.recv(1 << 20))
    assert not lost
    here.close()
    there.close()
