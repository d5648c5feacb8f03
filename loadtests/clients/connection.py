"""One HTTP/2 connection to a gRPC server: its streams, its frames, and flow control both ways.

One reader greenlet stamps the clock when bytes leave the socket and applies that stamp to every frame in them; a
consumer that runs late cannot move a token's time. Why not a stock client or a general HTTP/2 state machine:
docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import gevent
import gevent.socket
from gevent import get_hub
from gevent.event import Event

from tailgate.loadtests.clients import frames
from tailgate.loadtests.clients.frames import (
    DATA,
    DEFAULT_FRAME,
    END_STREAM,
    HEAD,
    PADDED,
    UINT32,
    ProtocolError,
    frame,
    grpc_timeout,
)
from tailgate.loadtests.clients.grpc_call import RESET_STATUS, GrpcCall
from tailgate.loadtests.clients.headers import HeaderDecoder, HeaderError
from tailgate.loadtests.clients.outgoing import Outgoing, Uploads
from tailgate.loadtests.clients.tls import TlsError, TlsStream
from tailgate.servers.clock import now_ns

if TYPE_CHECKING:
    from tailgate.loadtests.clients.inference import InferenceClient

READ_BYTES: Final = 262_144
_LARGEST_HEADER_BLOCK: Final = 256 * 1024


class Connection:
    """One HTTP/2 connection: a reader greenlet, the streams on it, and flow control both ways."""

    def __init__(self, client: InferenceClient, sock: gevent.socket.socket, tls: TlsStream | None = None) -> None:
        self._client = client
        self._sock = sock
        self._tls = tls
        self._decoder = HeaderDecoder(largest_list=_LARGEST_HEADER_BLOCK)
        self._calls: dict[int, GrpcCall] = {}
        self._next_id = 1
        self._left = b""  # the beginning of a frame
        outgoing = self._outgoing = Outgoing(sock, tls, client.loop, self._on_lost)
        self.write, self.flush = outgoing.write, outgoing.flush
        self._uploads = Uploads(self)
        self._peer_streams = 2**31
        self._unacknowledged = 0
        self._block: tuple[int, bool, bytearray] | None = None  # an unfinished header block
        self.settings_received = Event()
        self.draining = False
        self.closed = False
        self.reason = ""
        settings = struct.pack(">HIHI", frames.ENABLE_PUSH, 0, frames.INITIAL_WINDOW_SIZE, client.stream_window)
        self.write(frames.PREFACE + frame(frames.SETTINGS, 0, 0, settings))
        self.write(frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(client.connection_window - frames.DEFAULT_WINDOW)))
        self._stream_refill, self._connection_refill = client.stream_window // 2, client.connection_window // 2
        self.reader = gevent.spawn(self._read)

    @property
    def usable(self) -> bool:
        return not self.draining and not self.closed and len(self._calls) < self._peer_streams

    @property
    def streams(self) -> int:
        return len(self._calls)

    def open(self, call: GrpcCall) -> None:
        """Send the request: headers at once, the body as far as the peer's window allows."""
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > frames.LARGEST_STREAM_ID:
            self.draining = True
        self._calls[stream_id] = call
        block = self._client.header_prefix + call.headers
        at_ns = now_ns()
        if not call.restarted:
            call.sent_ns = at_ns
        if call.deadline_ns:
            block += grpc_timeout(call.deadline_ns - at_ns)
        self._uploads.start(call, stream_id, block)

    def abandon(self, stream_id: int, code: int) -> None:
        """Close the stream on this side, send RST_STREAM with `code` and free its slot."""
        if self._calls.pop(stream_id, None) is None:
            return
        if not self.closed:
            self.write(frame(frames.RST_STREAM, 0, stream_id, UINT32.pack(code)))
        self._stream_ended()

    def close(self, status: str, reason: str) -> None:
        """Close the socket and end every call that is still on it with `status`."""
        if self.closed:
            return
        self.flush()
        self.closed = self.draining = self._outgoing.closed = True
        self.reason = reason
        # This wakes the reader, which owns the descriptor; closing it here would leave the reader waiting.
        self._shut_down()
        self.settings_received.set()
        calls, self._calls = list(self._calls.values()), {}
        at_ns = now_ns()
        for call in calls:
            call.finish(status, reason, at_ns)
        self._client.connection_closed(self)

    def _stream_ended(self) -> None:
        if self.draining and not self._calls:
            self.close("UNAVAILABLE", self.reason or "the connection was drained")
        else:
            self._client.stream_ended()

    def _on_lost(self, problem: OSError) -> None:
        """Give up a socket that takes no more. The reader sees the same loss and ends the calls."""
        self.reason = self.reason or f"the connection was lost: {problem}"
        self.draining = True
        self._shut_down()

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(gevent.socket.SHUT_RDWR)

    def _gone(self, reason: str) -> None:
        """Close after the server did; one that speaks TLS does so at the first plaintext."""
        if not self.settings_received.is_set() and self._tls is None:
            reason += " before it said anything: if its port speaks TLS: use https://"
        self.close("UNAVAILABLE", self.reason or reason)

    def _read(self) -> None:
        sock, fd, tls = self._sock, self._sock.fileno(), self._tls
        watcher = get_hub().loop.io(fd, 1)
        try:
            if tls is not None:
                # The server's first frames may have come with the end of the handshake: nothing more need follow.
                self.feed(tls.decrypted(b""), now_ns())
            while not self.closed:
                # Through the hub before every read, even when bytes wait: a busy connection must not starve timers.
                gevent.socket.wait(watcher)
                if self.closed:
                    return
                try:
                    data = sock.recv(READ_BYTES)
                except BlockingIOError:
                    continue
                at_ns = now_ns()
                ended = not data
                if tls is not None:
                    data = tls.decrypted(data)
                    if tls.has_output:
                        self.write(b"")
                if data:
                    self.feed(data, at_ns)
                if ended:
                    self._gone("the server closed the connection")
        except ProtocolError as problem:
            self.write(frame(frames.GOAWAY, 0, 0, struct.pack(">II", 0, problem.code)))
            self.close("UNAVAILABLE", str(problem))
        except TlsError as problem:
            self.close("UNAVAILABLE", str(problem))
        except OSError as problem:
            self._gone(f"the connection was lost: {problem}")
        finally:
            watcher.close()
            sock.close()

    def feed(self, data: bytes, at_ns: int) -> None:
        """Handle the whole frames in what was read at `at_ns`; the rest waits for more."""
        self._left = self._frames(self._left + data if self._left else data, at_ns)

    def _frames(self, data: bytes, at_ns: int) -> bytes:
        """Handle every whole frame in `data` and return the bytes left over."""
        position, size = 0, len(data)
        unpack, calls = HEAD.unpack_from, self._calls
        while size - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            length = high << 16 | low
            stream_id &= 0x7FFFFFFF
            if length > DEFAULT_FRAME:
                raise ProtocolError(
                    self._not_http2(data, f"a frame has {length} bytes; the limit is {DEFAULT_FRAME}"),
                    frames.FRAME_SIZE_ERROR,
                )
            end = position + 9 + length
            if end > size:
                break
            if kind == DATA and self._block is None:
                payload = data[position + 9 : end]
                if flags & PADDED:
                    payload = frames.without_padding(payload)
                call = calls.get(stream_id)
                if call is not None:
                    call.on_data(payload, at_ns)
                    if flags & END_STREAM:
                        self._forget(stream_id, call)
                        call.on_end(at_ns)
                        self._stream_ended()
                    else:
                        call.unacknowledged += length
                        if call.unacknowledged >= self._stream_refill and not call.status:
                            self.write(frame(frames.WINDOW_UPDATE, 0, stream_id, UINT32.pack(call.unacknowledged)))
                            call.unacknowledged = 0
                else:
                    self._check_stream(stream_id, data)
                self._unacknowledged += length
                if self._unacknowledged >= self._connection_refill:
                    self.write(frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(self._unacknowledged)))
                    self._unacknowledged = 0
            else:
                self._control(kind, flags, stream_id, data[position + 9 : end], at_ns, data)
            if self.closed:
                return b""
            position = end
        return data[position:]

    def _check_stream(self, stream_id: int, data: bytes) -> None:
        """Refuse a frame of a stream that was never opened (RFC 9113, 5.1); one that is gone may still get some."""
        if not self.settings_received.is_set():
            raise ProtocolError(self._not_http2(data, "the first frame is not SETTINGS"))
        if not stream_id & 1 or stream_id >= self._next_id:
            raise ProtocolError(f"a frame names stream {stream_id}, which was never opened")

    def _not_http2(self, data: bytes, otherwise: str) -> str:
        if self.settings_received.is_set():
            return otherwise
        if self._tls is None and data[:2] == b"\x15\x03":  # a TLS alert
            return "the server speaks TLS: use https://"
        kind = "HTTP/2" if self._tls is not None else "plaintext HTTP/2"
        return f"the server does not speak {kind} (it answered {bytes(data[:16])!r})"

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes, at_ns: int, data: bytes) -> None:
        if not self.settings_received.is_set() and kind != frames.SETTINGS:
            raise ProtocolError(self._not_http2(data, "the first frame is not SETTINGS"))
        if self._block is not None and (kind != frames.CONTINUATION or self._block[0] != stream_id):
            raise ProtocolError("a header block was interrupted by another frame")
        try:
            if kind == frames.HEADERS:
                if flags & PADDED:
                    payload = frames.without_padding(payload)
                if flags & frames.PRIORITY_FLAG:
                    payload = payload[5:]
                self._header_block(stream_id, bool(flags & END_STREAM), payload, flags, at_ns)
            elif kind == frames.CONTINUATION:
                if self._block is None:
                    raise ProtocolError("CONTINUATION without a header block")
                _, ended, block = self._block
                block += payload
                if len(block) > _LARGEST_HEADER_BLOCK:
                    raise ProtocolError(f"a header block has more than {_LARGEST_HEADER_BLOCK} bytes")
                self._header_block(stream_id, ended, block, flags, at_ns)
            elif kind == frames.RST_STREAM:
                self._reset(stream_id, UINT32.unpack(payload)[0], at_ns)
            elif kind == frames.SETTINGS:
                if not flags & frames.ACK:
                    self._settings(payload)
            elif kind == frames.PING:
                if not flags & frames.ACK:
                    self.write(frame(frames.PING, frames.ACK, 0, payload))
            elif kind == frames.GOAWAY:
                last_id, code = struct.unpack_from(">II", payload)
                self._goaway(last_id & 0x7FFFFFFF, code, payload[8:])
            elif kind == frames.WINDOW_UPDATE:
                self._window_update(stream_id, UINT32.unpack(payload)[0] & 0x7FFFFFFF)
            elif kind == frames.PUSH_PROMISE:
                raise ProtocolError("the server pushed although push is off")
            # Other kinds, PRIORITY among them, carry nothing for this client; RFC 9113 says to ignore unknown ones.
        except struct.error:
            wrong = f"a frame of type {kind} has the wrong size ({len(payload)} bytes)"
            raise ProtocolError(wrong, frames.FRAME_SIZE_ERROR) from None

    def _header_block(self, stream_id: int, ended: bool, block: bytes | bytearray, flags: int, at_ns: int) -> None:
        if not flags & frames.END_HEADERS:
            self._block = (stream_id, ended, block if isinstance(block, bytearray) else bytearray(block))
            return
        self._block = None
        try:
            # Decoded even for a stream that is gone: the compression state is the connection's.
            fields = self._decoder.decode(bytes(block))
        except HeaderError as problem:
            raise ProtocolError(f"a header block cannot be decoded: {problem}", frames.COMPRESSION_ERROR) from None
        call = self._calls.get(stream_id)
        if call is None:
            self._check_stream(stream_id, b"")
            return
        if ended:
            self._forget(stream_id, call)
        call.on_headers(fields, ended, at_ns)
        if ended:
            call.finish("UNKNOWN", "the stream ended with an informational response", at_ns)
            self._stream_ended()

    def _forget(self, stream_id: int, call: GrpcCall) -> None:
        """Free the stream before its call ends, so that a callback may start the next one in its place."""
        self._calls.pop(stream_id, None)
        if call.position < len(call.body):
            # The server answered before it had the whole request: close this side too.
            self.write(frame(frames.RST_STREAM, 0, stream_id, UINT32.pack(frames.NO_ERROR)))

    def _reset(self, stream_id: int, code: int, at_ns: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        reason = f"the server reset the stream (HTTP/2 error {code})"
        if code == frames.REFUSED_STREAM:
            # RFC 9113, 8.7: refused means that nothing was done with it, so starting it again repeats nothing.
            self._client.restart(call, reason)
        else:
            call.finish(RESET_STATUS.get(code, "INTERNAL"), reason, at_ns)
        self._stream_ended()

    def _settings(self, payload: bytes) -> None:
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.MAX_CONCURRENT_STREAMS:
                self._peer_streams = value
            elif key == frames.INITIAL_WINDOW_SIZE:
                self._uploads.set_stream_window(value, self._calls.values())
        self.write(frame(frames.SETTINGS, frames.ACK, 0))
        self.settings_received.set()
        self._uploads.resume()
        self._client.stream_ended()  # a higher stream limit may let waiting calls start

    def _goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.draining = True
        text = debug.decode("utf-8", "replace") or f"HTTP/2 error {code}"
        self.reason = f"the server is going away ({text})" if code else "the server is going away"
        for stream_id in [stream_id for stream_id in self._calls if stream_id > last_id]:
            # The server says it never saw these: starting them elsewhere repeats nothing.
            self._client.restart(self._calls.pop(stream_id), self.reason)
        if not self._calls:
            self.close("UNAVAILABLE", self.reason)

    def _window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._uploads.window += increment
        elif (call := self._calls.get(stream_id)) is not None:
            call.send_window += increment
        self._uploads.resume()
