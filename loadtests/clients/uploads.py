"""Requests on their way out of one connection: headers at once, bodies as far as the peer's windows allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from loadtests.clients import frames
from loadtests.clients.frames import DATA, END_HEADERS, END_STREAM, HEADERS, ProtocolError, frame
from loadtests.clients.grpc_call import GrpcCall

if TYPE_CHECKING:
    from loadtests.clients.connection import Connection


class Uploads:
    """Flow control towards the peer, of the connection and of its streams (RFC 9113, 5.2)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._write = connection.write
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._frame_bytes = frames.DEFAULT_FRAME
        self._blocked: deque[GrpcCall] = deque()  # requests whose body waits for a window

    def start(self, call: GrpcCall, stream_id: int, block: bytes) -> None:
        """The request is on its way on the stream, with the header block `block`."""
        size, body, window = self._frame_bytes, call.body, self._stream_window
        call.connection, call.stream_id, call.send_window = self._connection, stream_id, window
        if len(block) <= size:
            out = frame(HEADERS, END_HEADERS, stream_id, block)
        else:
            out = frame(HEADERS, 0, stream_id, block[:size])
            for start in range(size, len(block), size):
                last = END_HEADERS if start + size >= len(block) else 0
                out += frame(frames.CONTINUATION, last, stream_id, block[start : start + size])
        if len(body) <= size and len(body) <= self._window and len(body) <= window and not self._blocked:
            self._window -= len(body)
            call.position = len(body)
            self._write(out + frame(DATA, END_STREAM, stream_id, body))
        else:
            self._write(out)
            self._blocked.append(call)
            self.resume()

    def resume(self) -> None:
        """Bodies of waiting requests are sent as far as connection and stream windows allow, in order."""
        short: deque[GrpcCall] = deque()  # their own stream's window is used up
        while self._blocked and self._window > 0:
            call = self._blocked.popleft()
            if call.status or call.connection is not self._connection:
                continue
            whole = len(call.body)
            while call.position < whole and self._window > 0 and call.send_window > 0:
                size = min(whole - call.position, self._frame_bytes, self._window, call.send_window)
                piece = call.body[call.position : call.position + size]
                call.position += size
                self._window -= size
                call.send_window -= size
                self._write(frame(DATA, END_STREAM if call.position == whole else 0, call.stream_id, piece))
            if call.position < whole:
                short.append(call)
        self._blocked.extendleft(reversed(short))

    def grow(self, increment: int) -> None:
        """The connection's window has `increment` bytes more."""
        if not increment:
            raise ProtocolError("the connection's window grows by 0")
        self._window += increment
        if self._window > frames.LARGEST_WINDOW:
            raise ProtocolError("the connection window overflowed", frames.FLOW_CONTROL_ERROR)

    def set_stream_window(self, value: int, calls: Iterable[GrpcCall]) -> None:
        """Streams begin with a window of `value`, and those of `calls` have as much more or less as it changed."""
        if value > frames.LARGEST_WINDOW:
            raise ProtocolError(
                f"the initial window is {value}; the limit is {frames.LARGEST_WINDOW}", frames.FLOW_CONTROL_ERROR
            )
        change, self._stream_window = value - self._stream_window, value
        for call in calls:
            call.send_window += change
            if call.send_window > frames.LARGEST_WINDOW:
                raise ProtocolError("a stream's window overflowed by SETTINGS", frames.FLOW_CONTROL_ERROR)

    def set_frame_bytes(self, value: int) -> None:
        """The peer takes frames of `value` bytes."""
        if not frames.DEFAULT_FRAME <= value <= frames.LARGEST_FRAME:
            raise ProtocolError(
                f"the largest frame is {value}; the limits are {frames.DEFAULT_FRAME} and {frames.LARGEST_FRAME}"
            )
        self._frame_bytes = value
