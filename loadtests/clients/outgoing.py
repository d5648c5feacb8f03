"""What a connection writes, gathered so that many requests share one call to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import gevent
import gevent.socket

from loadtests.clients.tls import TlsStream

_MOST_PENDING: Final = 32  # writes that share one call to the kernel: about a quarter of a millisecond of requests
MOST_WAITING: Final = 1 << 20  # writes behind what the kernel does not take: 100 MB of small ones


class Outgoing:
    """The way out of one connection. `on_lost` is called with the error when the socket takes no more."""

    def __init__(
        self, sock: gevent.socket.socket, tls: TlsStream | None, loop: Any, on_lost: Callable[[OSError], None]
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._loop = loop
        self._on_lost = on_lost
        self._pending: list[bytes] = []  # written since the last flush
        self._flush_is_due = False
        self._waiting = False  # a greenlet waits for the kernel to take what it did not take at once
        self.closed = False

    def write(self, data: bytes) -> None:
        """The bytes go out when the greenlet that runs now lets go, together with all that others add until then.

        A call to the kernel costs twice as much as starting a request does; under load this shares it among many. A
        greenlet that writes much without letting go, a dispatcher that is late, shares it among a few only.
        """
        if self.closed:
            return
        self._pending.append(data)
        if self._waiting and len(self._pending) > MOST_WAITING:
            # Such as the answers to PINGs of a server that sends them without end and reads nothing.
            self.closed = True
            self._pending.clear()
            self._on_lost(OSError(f"the server reads nothing: {MOST_WAITING} writes wait"))
        elif len(self._pending) >= _MOST_PENDING:
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._loop.run_callback(self.flush)

    def flush(self) -> None:
        """What was written is with the kernel, as far as it takes it; the rest follows by itself."""
        self._flush_is_due = False
        if self.closed or self._waiting or not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        try:
            if self._tls is not None:
                data = self._tls.encrypted(data)
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            return self._on_lost(problem)
        if sent < len(data):
            self._waiting = True
            gevent.spawn(self._write_rest, data[sent:])
        return None

    def _write_rest(self, data: bytes) -> None:
        try:
            while data and not self.closed:
                gevent.socket.wait_write(self._sock.fileno())
                if self.closed:
                    break
                with suppress(BlockingIOError):
                    data = data[self._sock.send(data) :]
        except OSError as problem:
            self._on_lost(problem)
        finally:
            self._waiting = False
        self.flush()
