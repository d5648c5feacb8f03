"""What a connection sends: requests as far as the peer's windows allow, many of them in one call to the kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import gevent
import gevent.socket

from tailgate.loadtests.clients import frames
from tailgate.loadtests.clients.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from tailgate.loadtests.clients.grpc_call import GrpcCall
from tailgate.loadtests.clients.tls import TlsStream

if TYPE_CHECKING:
    from tailgate.loadtests.clients.connection import Connection

_MOST_PENDING: Final = 32  # writes that share one call to the kernel: about a quarter of a millisecond of requests


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
        """Send the bytes when the running greenlet yields, together with all that others add until then.

        A call to the kernel costs twice as much as starting a request does; under load this shares it among many. A
        greenlet that writes much without yielding, a dispatcher that is late, shares it among a few only.
        """
        if self.closed:
            return
        self._pending.append(data)
        if len(self._pending) >= _MOST_PENDING:
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._loop.run_callback(self.flush)

    def flush(self) -> None:
        """Hand the written bytes to the kernel, as far as it takes them; the rest follows later."""
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


class Uploads:
    """Flow control towards the peer, of the connection and of its streams (RFC 9113, 5.2)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._write = connection.write
        self.window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._blocked: deque[GrpcCall] = deque()  # requests whose body waits for a window

    def start(self, call: GrpcCall, stream_id: int, block: bytes) -> None:
        """Send the request on the stream, with the header block `block`, which fits one frame."""
        size, body, window = frames.DEFAULT_FRAME, call.body, self._stream_window
        call.connection, call.stream_id, call.send_window = self._connection, stream_id, window
        out = frame(HEADERS, END_HEADERS, stream_id, block)
        if len(body) <= size and len(body) <= self.window and len(body) <= window and not self._blocked:
            self.window -= len(body)
            call.position = len(body)
            self._write(out + frame(DATA, END_STREAM, stream_id, body))
        else:
            self._write(out)
            self._blocked.append(call)
            self.resume()

    def resume(self) -> None:
        """Send the bodies of waiting requests in order, as far as connection and stream windows allow."""
        short: deque[GrpcCall] = deque()  # their own stream's window is used up
        while self._blocked and self.window > 0:
            call = self._blocked.popleft()
            if call.status or call.connection is not self._connection:
                continue
            whole = len(call.body)
            while call.position < whole and self.window > 0 and call.send_window > 0:
                size = min(whole - call.position, frames.DEFAULT_FRAME, self.window, call.send_window)
                piece = call.body[call.position : call.position + size]
                call.position += size
                self.window -= size
                call.send_window -= size
                self._write(frame(DATA, END_STREAM if call.position == whole else 0, call.stream_id, piece))
            if call.position < whole:
                short.append(call)
        self._blocked.extendleft(reversed(short))

    def set_stream_window(self, value: int, calls: Iterable[GrpcCall]) -> None:
        """Let streams begin with a window of `value`, and change the windows of `calls` by as much as it changed."""
        change, self._stream_window = value - self._stream_window, value
        for call in calls:
            call.send_window += change
