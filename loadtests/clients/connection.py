"""A streaming gRPC client for gevent that reads HTTP/2 frames itself, so that token times are honest.

One reader greenlet a connection stamps the clock when bytes leave the socket and applies that stamp to every frame in
them; a consumer that runs late cannot move a token's time. Many calls share one connection. Nothing here raises for a
failed request: a refused connection, a reset stream or a passed deadline ends the call with a gRPC status name.

Why not a stock client or a general HTTP/2 state machine: docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol
from urllib.parse import unquote

import gevent
import gevent.socket
from gevent.event import Event
from google.protobuf.message import DecodeError

from loadtests.clients.headers import HeaderDecoder, HeaderError
from loadtests.external.tls import OPEN, SecurityConfig, TlsError, TlsStream, bearer_token, client_context, server_name
from servers.address import host_port, joined
from servers.clock import now_ns
from servers.config import ConfigError
from servers.metadata import INFERENCE_SERVICE
from servers.rpc.inference_pb2 import GenerateChunk, GenerateRequest

STATUS_NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
GENERATE_PATH: Final = f"/{INFERENCE_SERVICE}/Generate"

Metadata = Sequence[tuple[str, str]]

# RFC 9113, sections 6 and 7.
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    range(10)
)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _FRAME_SIZE_ERROR, _REFUSED_STREAM = 0x0, 0x1, 0x3, 0x6, 0x7
_CANCEL, _COMPRESSION_ERROR = 0x8, 0x9
_ENHANCE_YOUR_CALM, _INADEQUATE_SECURITY = 0xB, 0xC
_ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 0x2, 0x3, 0x4, 0x5
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DEFAULT_WINDOW: Final = 65_535
_LARGEST_WINDOW: Final = 2**31 - 1
_DEFAULT_FRAME: Final = 16_384
_LARGEST_STREAM_ID: Final = 2**31 - 1
_READ_BYTES: Final = 262_144
_MOST_PENDING: Final = 32  # writes that share one call to the kernel: about a quarter of a millisecond of requests
_LARGEST_MESSAGE: Final = 4 * 1024 * 1024
_NEVER: Final = 1 << 62
_LARGEST_HEADER_BLOCK: Final = 256 * 1024

_HEAD = struct.Struct(">BHBBI")
_UINT32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")

# How the gRPC protocol maps HTTP/2 error codes and bare HTTP statuses (grpc/doc/PROTOCOL-HTTP2.md and
# grpc/doc/http-grpc-status-mapping.md). Codes not listed are INTERNAL and UNKNOWN.
_RESET_STATUS: Final = {
    _REFUSED_STREAM: "UNAVAILABLE",
    _CANCEL: "CANCELLED",
    _ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    _INADEQUATE_SECURITY: "PERMISSION_DENIED",
}
_HTTP_STATUS: Final = {
    "400": "INTERNAL",
    "401": "UNAUTHENTICATED",
    "403": "PERMISSION_DENIED",
    "404": "UNIMPLEMENTED",
    "429": "UNAVAILABLE",
    "502": "UNAVAILABLE",
    "503": "UNAVAILABLE",
    "504": "UNAVAILABLE",
}


_LOST: Final = "the connection was lost"
_CLOSED: Final = "the server closed the connection"
_WITHOUT_A_WORD: Final = (_LOST, _CLOSED)


class ProtocolError(Exception):
    """The peer broke HTTP/2; the connection cannot be used any more. `code` is what the peer is told."""

    def __init__(self, message: str, code: int = _PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def parse_target(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`, `[v6]:port`, or either behind http://, grpc://, https:// or grpcs://.

    Raises ConfigError for anything else.
    """
    rest = text.strip()
    scheme, separator, after = rest.partition("://")
    if separator:
        if scheme.lower() not in ("http", "grpc", "https", "grpcs"):
            raise ConfigError(f'target "{text}" has the scheme "{scheme}": use host:port, http:// or https://')
        rest = after
    rest = rest.rstrip("/")
    return host_port(rest, f'target "{text}" is not host:port with a port from 1 to 65535: try localhost:50051')


def wants_tls(target: str) -> bool:
    """Whether `target` says https:// or grpcs://."""
    return target.strip().lower().startswith(("https://", "grpcs://"))


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def _literal(name: bytes, value: bytes, *, secret: bool = False) -> bytes:
    # A literal without indexing (RFC 7541, 6.2.2): header blocks then need no table, and equal headers equal bytes.
    # One that is never indexed (6.2.3) tells proxies, too, to keep it out of their tables.
    return (b"\x10" if secret else b"\x00") + _length(len(name)) + name + _length(len(value)) + value


def _length(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    out = bytearray((127,))
    value -= 127
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_GRPC_TIMEOUT: Final = b"\x00" + _length(len(b"grpc-timeout")) + b"grpc-timeout"


def encode_metadata(metadata: Metadata) -> bytes:
    """The header block fragment for `metadata`; ValueError for a key or value that HTTP/2 cannot carry."""
    out = []
    for key, value in metadata:
        if not key or key != key.lower() or not key.isascii() or key[0] == ":":
            raise ValueError(f'metadata key "{key}" is not usable: lower-case ASCII letters, digits and "-" only')
        if not value.isascii() or not value.isprintable():
            raise ValueError(f'metadata "{key}" has the value {value!r}: printable ASCII only')
        out.append(_literal(key.encode("ascii"), value.encode("ascii")))
    return b"".join(out)


class Carrier(Protocol):
    """Whatever a call is on its way on."""

    def abandon(self, stream_id: int, code: int) -> None:
        """The stream is gone on this side and the peer was told."""


class Call:
    """One Generate call: complete once `status` is set. Times are ns since the epoch on the client's clock.

    `token_ns` has one receive time per token. A chunk's last token has the time its frame was read; earlier tokens of
    a coalesced chunk are set back by the server's own emit gaps, but never before the previous chunk's arrival. All
    tokens of the first chunk have its arrival time, so that time to first token is what a user would see.
    """

    __slots__ = (
        "_arrived",
        "_body",
        "_chunks",
        "_connection",
        "_got_headers",
        "_headers",
        "_http_status",
        "_keep",
        "_last_chunk_ns",
        "_on_done",
        "_partial",
        "_position",
        "_retried",
        "_send_window",
        "_stream_id",
        "_timer",
        "_unacknowledged",
        "_wanted",
        "deadline_ns",
        "end_ns",
        "error",
        "first_token_ns",
        "initial_metadata",
        "sent_ns",
        "start_ns",
        "status",
        "tag",
        "token_ns",
        "trailing_metadata",
    )

    def __init__(
        self,
        *,
        headers: bytes,
        body: bytes,
        deadline_ns: int,
        on_done: Callable[[Call], None] | None,
        keep: bool,
        tag: Any,
    ) -> None:
        self.start_ns = now_ns()
        self.sent_ns = self.start_ns
        self.first_token_ns: int | None = None
        self.end_ns = 0
        self.token_ns = array("q")
        self.status = ""
        self.error = ""
        self.initial_metadata: dict[str, str] = {}
        self.trailing_metadata: dict[str, str] = {}
        self.deadline_ns = deadline_ns  # 0: none
        self.tag = tag
        self._headers = headers
        self._body = b"\x00" + _UINT32.pack(len(body)) + body
        self._on_done = on_done
        self._keep = keep
        if keep:
            self._chunks: deque[GenerateChunk] = deque()
        self._arrived = Event() if keep else None
        self._connection: Carrier | None = None
        self._stream_id = 0
        self._send_window = 0
        self._unacknowledged = 0
        self._partial: bytearray | None = None  # the beginning of a message
        self._position = 0  # bytes of the body already sent
        self._got_headers = False
        self._http_status = "200"
        self._last_chunk_ns = 0
        self._retried = False
        self._timer: Any = None

    _wanted: int  # bytes of `_partial` that make its message whole; set along with it

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return bool(self.status)

    @property
    def output_tokens(self) -> int:
        """Tokens received so far."""
        return len(self.token_ns)

    def cancel(self, status: str = "CANCELLED", error: str = "cancelled by the client") -> None:
        """The call has ended with `status` and its stream, if any, is reset; a call that has ended is left alone."""
        if self.status:
            return
        connection, stream_id = self._connection, self._stream_id
        self._finish(status, error, now_ns())
        if connection is not None:
            connection.abandon(stream_id, _CANCEL)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the call ended within `timeout_s`. Only for calls made by `InferenceClient.generate`."""
        assert self._arrived is not None
        limit = None if timeout_s is None else now_ns() + int(timeout_s * 1e9)
        while not self.status:
            left = None if limit is None else (limit - now_ns()) / 1e9
            if left is not None and left <= 0:
                break
            self._arrived.clear()
            self._arrived.wait(left)
        return bool(self.status)

    def __iter__(self) -> Iterator[GenerateChunk]:
        """Chunks in order, each as soon as it came; ends with the call, whatever its status."""
        assert self._arrived is not None
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self.status:
                return
            self._arrived.clear()
            self._arrived.wait()

    def _on_data(self, payload: bytes, at_ns: int) -> None:
        if self._partial is not None:
            if self._wanted == _NEVER:
                return
            self._partial += payload
            if len(self._partial) < self._wanted:
                return
            payload, self._partial = bytes(self._partial), None
        position, size = 0, len(payload)
        while size - position >= 5:
            length = _UINT32.unpack_from(payload, position + 1)[0]
            if payload[position] or length > _LARGEST_MESSAGE:
                return self._refuse(payload[position], length, at_ns)
            end = position + 5 + length
            if end > size:
                break
            self._on_message(payload[position + 5 : end], at_ns)
            if self.status:
                return
            position = end
        if position < size:
            # Joined only once the message is whole: it may come in hundreds of frames.
            self._partial = bytearray(payload[position:])
            self._wanted = 5 + _UINT32.unpack_from(payload, position + 1)[0] if size - position >= 5 else 5

    def _refuse(self, flag: int, length: int, at_ns: int) -> None:
        """The bytes cannot be a message of this call: a proxy's page, a compressed message or one that is too large."""
        if self._http_status != "200":
            self._wanted = _NEVER  # the body of an error page says nothing: the status decides at the end
            self._partial = bytearray(1)
            return
        kind = self.initial_metadata.get("content-type", "application/grpc")
        if not kind.startswith("application/grpc"):
            self._broken(f'the answer is "{kind}" and not gRPC: is the target a gRPC server?', at_ns)
        elif flag:
            self._broken("a message is compressed although no compression was offered", at_ns)
        else:
            self._broken(f"a message has {length} bytes; the limit is {_LARGEST_MESSAGE}", at_ns)

    def _on_message(self, message: bytes, at_ns: int) -> None:
        try:
            chunk = GenerateChunk.FromString(message)
        except DecodeError as problem:
            return self._broken(f"a message is not a GenerateChunk: {problem}", at_ns)
        count = len(chunk.token_ids)
        if count:
            if self.first_token_ns is None:
                self.first_token_ns = at_ns
                for _ in range(count):
                    self.token_ns.append(at_ns)
            elif count == 1:
                self.token_ns.append(at_ns)
            else:
                self._spread(chunk, count, at_ns)
            self._last_chunk_ns = at_ns
        if self._keep:
            assert self._arrived is not None
            self._chunks.append(chunk)
            self._arrived.set()
        return None

    def _spread(self, chunk: GenerateChunk, count: int, at_ns: int) -> None:
        emitted = chunk.emit_ns
        if len(emitted) != count:
            self.token_ns.extend([at_ns] * count)
            return
        last = emitted[-1]
        earliest = self._last_chunk_ns
        for emit in emitted:
            earliest = min(at_ns, max(earliest, at_ns - (last - emit)))
            self.token_ns.append(earliest)

    def _broken(self, error: str, at_ns: int) -> None:
        connection, stream_id = self._connection, self._stream_id
        self._finish("INTERNAL", error, at_ns)
        if connection is not None:
            connection.abandon(stream_id, _CANCEL)

    def _on_headers(self, fields: dict[str, str], ended: bool, at_ns: int) -> None:
        http_status = fields.pop(":status", "")
        if not self._got_headers:
            if http_status.startswith("1"):
                return  # an informational response; the real one follows
            self._got_headers = True
            if self._position == len(self._body):
                self._body, self._position = b"", 0  # kept until here for a server that goes away unread
            self._http_status = http_status
            self.initial_metadata = fields
        elif not ended:
            return self._broken("a second header block came before the end of the stream", at_ns)
        if ended:
            self.trailing_metadata = fields
            self._end(at_ns)
        return None

    def _end(self, at_ns: int) -> None:
        """The server closed the stream: the status is in the trailers, or must be guessed from HTTP."""
        code = self.trailing_metadata.get("grpc-status")
        if code is not None:
            status = STATUS_NAMES[int(code)] if code.isdigit() and int(code) < len(STATUS_NAMES) else "UNKNOWN"
            error = self.trailing_metadata.get("grpc-message", "")
            if error:
                # Percent-encoded ASCII by the protocol; servers that send UTF-8 as it is are understood too.
                error = unquote(error.encode("latin-1").decode("utf-8", "replace"), errors="replace")
            if status == "OK" and self._partial:
                status, error = "INTERNAL", f"the stream ended inside a message ({len(self._partial)} bytes left over)"
            self._finish(status, error, at_ns)
        elif self._http_status != "200":
            self._finish(_HTTP_STATUS.get(self._http_status, "UNKNOWN"), f"HTTP status {self._http_status}", at_ns)
        else:
            self._finish("UNKNOWN", "the stream ended without grpc-status", at_ns)

    def _finish(self, status: str, error: str, at_ns: int) -> None:
        if self.status:
            return
        self.status, self.error, self.end_ns = status, error, at_ns
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None
        self._connection = None
        self._body = self._headers = b""
        self._partial = None
        on_done, self._on_done = self._on_done, None
        if self._arrived is not None:
            self._arrived.set()
        if on_done is not None:
            on_done(self)

    def _on_deadline(self) -> None:
        self.cancel("DEADLINE_EXCEEDED", "the deadline passed")


class _Connection:
    """One HTTP/2 connection: a reader greenlet, the streams on it, and flow control both ways."""

    def __init__(self, client: InferenceClient, sock: gevent.socket.socket, tls: TlsStream | None = None) -> None:
        self._client = client
        self._sock = sock
        self._tls = tls
        self._decoder = HeaderDecoder(largest_list=_LARGEST_HEADER_BLOCK)
        self._calls: dict[int, Call] = {}
        self._blocked: deque[Call] = deque()  # requests whose body waits for the peer's window
        self._next_id = 1
        self._left = b""  # the beginning of a frame
        self._pending: list[bytes] = []  # written since the last flush
        self._flush_is_due = False
        self._writing = False  # a greenlet waits for the kernel to take what it did not take at once
        self._send_window = _DEFAULT_WINDOW
        self._peer_stream_window = _DEFAULT_WINDOW
        self._peer_frame = _DEFAULT_FRAME
        self._peer_streams = 2**31
        self._unacknowledged = 0
        self._block: tuple[int, bool, bytearray] | None = None  # an unfinished header block
        self.settings_received = Event()
        self.greeted = False  # the server's SETTINGS have come
        self.draining = False
        self.closed = False
        self.reason = ""
        self._last_read_ns = now_ns()
        self._asked_ns = 0  # when the server was last asked whether it is there; 0: it has answered
        self._keepalive: Any = None
        stream_window, connection_window = client.stream_window, max(client.connection_window, _DEFAULT_WINDOW)
        settings = _SETTING.pack(_ENABLE_PUSH, 0) + _SETTING.pack(_INITIAL_WINDOW_SIZE, stream_window)
        opening = _PREFACE + _frame(_SETTINGS, 0, 0, settings)
        if connection_window > _DEFAULT_WINDOW:
            opening += _frame(_WINDOW_UPDATE, 0, 0, _UINT32.pack(connection_window - _DEFAULT_WINDOW))
        self._stream_refill = max(1, stream_window // 2)
        self._connection_refill = connection_window // 2
        self._write(opening)
        self._reader = gevent.spawn(self._read)
        if client.keepalive_s:
            self._watch_in(client.keepalive_s)

    @property
    def usable(self) -> bool:
        """Whether one more stream may be opened now."""
        return not self.draining and not self.closed and len(self._calls) < self._peer_streams

    @property
    def streams(self) -> int:
        """Streams open now."""
        return len(self._calls)

    def open(self, call: Call) -> None:
        """The request is on its way: headers at once, the body as far as the peer's window allows."""
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > _LARGEST_STREAM_ID:
            self.draining = True
        call._connection, call._stream_id, call._send_window = self, stream_id, self._peer_stream_window
        self._calls[stream_id] = call
        block = self._client.header_prefix + call._headers
        at_ns = now_ns()
        if not call._retried:
            call.sent_ns = at_ns
        if call.deadline_ns:
            left_ms = max(1, (call.deadline_ns - at_ns) // 1_000_000)
            text = b"%dm" % left_ms if left_ms < 10**8 else b"%dS" % min(left_ms // 1000, 10**8 - 1)
            block += b"%b%c%b" % (_GRPC_TIMEOUT, len(text), text)
        size, body = self._peer_frame, call._body
        if len(block) <= size:
            out = _frame(_HEADERS, _END_HEADERS, stream_id, block)
        else:
            out = _frame(_HEADERS, 0, stream_id, block[:size])
            for start in range(size, len(block), size):
                last = _END_HEADERS if start + size >= len(block) else 0
                out += _frame(_CONTINUATION, last, stream_id, block[start : start + size])
        if (
            len(body) <= size
            and len(body) <= self._send_window
            and len(body) <= call._send_window
            and not self._blocked
        ):
            self._send_window -= len(body)
            call._position = len(body)
            self._write(out + _frame(_DATA, _END_STREAM, stream_id, body))
        else:
            self._write(out)
            self._blocked.append(call)
            self._send_bodies()

    def abandon(self, stream_id: int, code: int) -> None:
        """The stream is gone on this side and the peer was told; its slot is free."""
        if self._calls.pop(stream_id, None) is None:
            return
        if not self.closed:
            self._write(_frame(_RST_STREAM, 0, stream_id, _UINT32.pack(code)))
        self._stream_ended()

    def close(self, status: str, reason: str) -> None:
        """The socket is closed and every call still on it has ended with `status`."""
        if self.closed:
            return
        self.flush()
        self.closed, self.draining, self.reason = True, True, reason
        self._stop_watching()
        # This wakes the reader, which owns the descriptor; closing it here would leave the reader waiting for ever.
        with contextlib.suppress(OSError):
            self._sock.shutdown(gevent.socket.SHUT_RDWR)
        self.settings_received.set()
        calls, self._calls = list(self._calls.values()), {}
        self._blocked.clear()
        at_ns = now_ns()
        for call in calls:
            call._finish(status, reason, at_ns)
        self._client._connection_closed(self)

    def _stream_ended(self) -> None:
        if self.draining and not self._calls:
            self.close("UNAVAILABLE", self.reason or "the connection was drained")
        else:
            self._client._stream_ended()

    def _write(self, data: bytes) -> None:
        """The bytes go out when the greenlet that runs now lets go, together with all that others add until then.

        A call to the kernel costs twice as much as starting a request does; under load this shares it among many. A
        greenlet that writes much without letting go, a dispatcher that is late, shares it among a few only.
        """
        if self.closed:
            return
        self._pending.append(data)
        if len(self._pending) >= _MOST_PENDING:
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._client.loop.run_callback(self.flush)

    def flush(self) -> None:
        """What was written is with the kernel, as far as it takes it; the rest follows by itself."""
        self._flush_is_due = False
        if self.closed or self._writing or not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        try:
            if self._tls is not None:
                data = self._tls.sealed(data)
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            # The reader sees the same loss and ends the calls.
            self.reason = self.reason or f"{_LOST}: {problem}"
            self.draining = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(gevent.socket.SHUT_RDWR)
            return
        if sent < len(data):
            self._writing = True
            gevent.spawn(self._write_rest, data[sent:])

    def _write_rest(self, data: bytes) -> None:
        try:
            while data and not self.closed:
                gevent.socket.wait_write(self._sock.fileno())
                if self.closed:
                    break
                with contextlib.suppress(BlockingIOError):
                    data = data[self._sock.send(data) :]
        except OSError as problem:
            self.close("UNAVAILABLE", f"{_LOST}: {problem}")
        finally:
            self._writing = False
        self.flush()

    def _send_bodies(self) -> None:
        """Bodies of waiting requests are sent as far as connection and stream windows allow, in order."""
        short: deque[Call] = deque()  # their own stream's window is used up
        while self._blocked and self._send_window > 0:
            call = self._blocked.popleft()
            if call.status or call._connection is not self:
                continue
            whole = len(call._body)
            while call._position < whole and self._send_window > 0 and call._send_window > 0:
                size = min(whole - call._position, self._peer_frame, self._send_window, call._send_window)
                piece = call._body[call._position : call._position + size]
                call._position += size
                self._send_window -= size
                call._send_window -= size
                self._write(_frame(_DATA, _END_STREAM if call._position == whole else 0, call._stream_id, piece))
            if call._position < whole:
                short.append(call)
        self._blocked.extendleft(reversed(short))

    def _watch_in(self, seconds: float) -> None:
        self._stop_watching()
        self._keepalive = gevent.get_hub().loop.timer(max(0.001, seconds))
        self._keepalive.start(self._check_alive)

    def _stop_watching(self) -> None:
        if self._keepalive is not None:
            self._keepalive.stop()
            self._keepalive.close()
            self._keepalive = None

    def _check_alive(self) -> None:
        """A server from which nothing came for a while is asked with a PING; without a sign of life it is dead.

        Only while calls are open, since servers count idle pings as abuse. Any byte counts as an answer.
        """
        client = self._client
        keepalive_s, timeout_s = client.keepalive_s, client.keepalive_timeout_s
        at_ns = now_ns()
        if self._asked_ns and self._last_read_ns < self._asked_ns:
            waited_s = (at_ns - self._asked_ns) / 1e9
            if waited_s >= timeout_s and not self._something_to_read():
                silent_s = (at_ns - self._last_read_ns) / 1e9
                self.close("UNAVAILABLE", f"the server was silent for {silent_s:.1f} s and answered no ping")
            else:
                self._watch_in(min(keepalive_s, max(0.0, timeout_s - waited_s)))
            return
        self._asked_ns = 0
        quiet_s = (at_ns - self._last_read_ns) / 1e9
        if quiet_s < keepalive_s:
            self._watch_in(keepalive_s - quiet_s)
        elif self._calls:
            self._asked_ns = at_ns
            self._write(_frame(_PING, 0, 0, b"tailgate"))
            self._watch_in(min(keepalive_s, timeout_s))
        else:
            self._watch_in(keepalive_s)

    def _something_to_read(self) -> bool:
        """Whether the answer is here and this process was too slow to look: a timer may run before the reader does."""
        try:
            self._sock.recv(1, gevent.socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the reader will see it too
        return True

    def _read(self) -> None:
        sock, fd, tls = self._sock, self._sock.fileno(), self._tls
        watcher = gevent.get_hub().loop.io(fd, 1)
        try:
            if tls is not None:
                # The server's first frames may have come with the end of the handshake: nothing more need follow.
                self.feed(tls.opened(b""), now_ns())
            while not self.closed:
                # Through the hub before every read, even when bytes wait: a busy connection must not starve timers.
                gevent.socket.wait(watcher)
                if self.closed:
                    return
                try:
                    data = sock.recv(_READ_BYTES)
                except BlockingIOError:
                    continue
                self._last_read_ns = at_ns = now_ns()
                ended = not data
                if tls is not None:
                    data = tls.opened(data)
                    ended = ended or tls.ended
                    if tls.has_to_say:
                        self._write(b"")
                if data:
                    self.feed(data, at_ns)
                if ended:
                    self.close("UNAVAILABLE", self.reason or _CLOSED)
        except ProtocolError as problem:
            self._write(_frame(_GOAWAY, 0, 0, struct.pack(">II", 0, problem.code)))
            self.close("UNAVAILABLE", str(problem))
        except TlsError as problem:
            self.close("UNAVAILABLE", str(problem))
        except OSError as problem:
            self.close("UNAVAILABLE", f"{_LOST}: {problem}")
        finally:
            watcher.close()
            sock.close()

    def feed(self, data: bytes, at_ns: int) -> None:
        """Bytes that were read at `at_ns` are handled, as far as they make whole frames; the rest waits for more."""
        self._left = self._frames(self._left + data if self._left else data, at_ns)

    def _frames(self, data: bytes, at_ns: int) -> bytes:
        """Every whole frame in `data` is handled; returns the bytes left over."""
        position, size = 0, len(data)
        unpack, calls = _HEAD.unpack_from, self._calls
        while size - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            length = high << 16 | low
            stream_id &= 0x7FFFFFFF
            if length > _DEFAULT_FRAME:
                raise ProtocolError(
                    self._not_http2(data, f"a frame has {length} bytes; the limit is {_DEFAULT_FRAME}"),
                    _FRAME_SIZE_ERROR,
                )
            end = position + 9 + length
            if end > size:
                break
            if kind == _DATA and self._block is None:
                payload = data[position + 9 : end]
                if flags & _PADDED:
                    payload = _without_padding(payload)
                call = calls.get(stream_id)
                if call is not None:
                    call._on_data(payload, at_ns)
                    if flags & _END_STREAM:
                        self._forget(stream_id, call)
                        call._end(at_ns)
                        self._stream_ended()
                    else:
                        call._unacknowledged += length
                        if call._unacknowledged >= self._stream_refill and not call.status:
                            self._refill(call)
                else:
                    self._check_stream(stream_id, data)
                self._unacknowledged += length
                if self._unacknowledged >= self._connection_refill:
                    self._write(_frame(_WINDOW_UPDATE, 0, 0, _UINT32.pack(self._unacknowledged)))
                    self._unacknowledged = 0
            else:
                self._control(kind, flags, stream_id, data[position + 9 : end], at_ns, data)
            if self.closed:
                return b""
            position = end
        return data[position:]

    def _refill(self, call: Call) -> None:
        if call._unacknowledged > self._client.stream_window:
            self._fail_stream(call, "the server sent more than the stream's window", _FLOW_CONTROL_ERROR)
            return
        self._write(_frame(_WINDOW_UPDATE, 0, call._stream_id, _UINT32.pack(call._unacknowledged)))
        call._unacknowledged = 0

    def _fail_stream(self, call: Call, reason: str, code: int) -> None:
        """The peer broke the rules of one stream: it is reset and its call has failed."""
        stream_id = call._stream_id
        call._finish("INTERNAL", reason, now_ns())
        self.abandon(stream_id, code)

    def _check_stream(self, stream_id: int, data: bytes) -> None:
        """Frames may still come for streams that are gone, but not for those that never were (RFC 9113, 5.1)."""
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
        if not self.settings_received.is_set() and kind != _SETTINGS:
            raise ProtocolError(self._not_http2(data, "the first frame is not SETTINGS"))
        if self._block is not None and (kind != _CONTINUATION or self._block[0] != stream_id):
            raise ProtocolError("a header block was interrupted by another frame")
        try:
            if kind == _HEADERS:
                if flags & _PADDED:
                    payload = _without_padding(payload)
                if flags & _PRIORITY_FLAG:
                    payload = payload[5:]
                self._header_block(stream_id, bool(flags & _END_STREAM), payload, flags, at_ns)
            elif kind == _CONTINUATION:
                if self._block is None:
                    raise ProtocolError("CONTINUATION without a header block")
                _, ended, block = self._block
                block += payload
                if len(block) > _LARGEST_HEADER_BLOCK:
                    raise ProtocolError(f"a header block has more than {_LARGEST_HEADER_BLOCK} bytes")
                self._header_block(stream_id, ended, block, flags, at_ns)
            elif kind == _RST_STREAM:
                self._check_stream(stream_id, data)
                self._reset(stream_id, _UINT32.unpack(payload)[0], at_ns)
            elif kind == _SETTINGS:
                if stream_id:
                    raise ProtocolError(f"SETTINGS came on stream {stream_id}")
                if not flags & _ACK:
                    self._settings(payload)
            elif kind == _PING:
                if len(payload) != 8:
                    raise ProtocolError(f"a PING has {len(payload)} bytes and not 8", _FRAME_SIZE_ERROR)
                if not flags & _ACK:
                    self._write(_frame(_PING, _ACK, 0, payload))
            elif kind == _GOAWAY:
                last_id, code = struct.unpack_from(">II", payload)
                self._goaway(last_id & 0x7FFFFFFF, code, payload[8:])
            elif kind == _WINDOW_UPDATE:
                self._window_update(stream_id, _UINT32.unpack(payload)[0] & 0x7FFFFFFF, data)
            elif kind == _PUSH_PROMISE:
                raise ProtocolError("the server pushed although push is off")
            # Other kinds, PRIORITY among them, carry nothing for this client; RFC 9113 says to ignore unknown ones.
        except struct.error:
            wrong = f"a frame of type {kind} has the wrong size ({len(payload)} bytes)"
            raise ProtocolError(wrong, _FRAME_SIZE_ERROR) from None

    def _header_block(self, stream_id: int, ended: bool, block: bytes | bytearray, flags: int, at_ns: int) -> None:
        if not flags & _END_HEADERS:
            self._block = (stream_id, ended, block if isinstance(block, bytearray) else bytearray(block))
            return
        self._block = None
        try:
            # Decoded even for a stream that is gone: the compression state is the connection's.
            fields = self._decoder.decode(bytes(block))
        except HeaderError as problem:
            raise ProtocolError(f"a header block cannot be decoded: {problem}", _COMPRESSION_ERROR) from None
        call = self._calls.get(stream_id)
        if call is None:
            self._check_stream(stream_id, b"")
            return
        if ended:
            self._forget(stream_id, call)
        call._on_headers(fields, ended, at_ns)
        if ended:
            call._finish("UNKNOWN", "the stream ended with an informational response", at_ns)
            self._stream_ended()

    def _forget(self, stream_id: int, call: Call) -> None:
        """The stream is gone before its call ends, so that a callback may start the next one in its place."""
        self._calls.pop(stream_id, None)
        if call._position < len(call._body):
            # The server answered before it had the whole request: close this side too.
            self._write(_frame(_RST_STREAM, 0, stream_id, _UINT32.pack(_NO_ERROR)))

    def _reset(self, stream_id: int, code: int, at_ns: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        reason = f"the server reset the stream (HTTP/2 error {code})"
        if code == _REFUSED_STREAM:
            # RFC 9113, 8.7: refused means that nothing was done with it, so starting it again repeats nothing.
            self._client._restart(call, reason)
        else:
            call._finish(_RESET_STATUS.get(code, "INTERNAL"), reason, at_ns)
        self._stream_ended()

    def _settings(self, payload: bytes) -> None:
        for key, value in _SETTING.iter_unpack(payload):
            if key == _MAX_CONCURRENT_STREAMS:
                self._peer_streams = value
            elif key == _INITIAL_WINDOW_SIZE:
                if value > _LARGEST_WINDOW:
                    raise ProtocolError(
                        f"the initial window is {value}; the limit is {_LARGEST_WINDOW}", _FLOW_CONTROL_ERROR
                    )
                change = value - self._peer_stream_window
                self._peer_stream_window = value
                for call in self._calls.values():
                    call._send_window += change
                    if call._send_window > _LARGEST_WINDOW:
                        raise ProtocolError("a stream's window overflowed by SETTINGS", _FLOW_CONTROL_ERROR)
            elif key == _MAX_FRAME_SIZE:
                if not _DEFAULT_FRAME <= value < 2**24:
                    raise ProtocolError(
                        f"the largest frame is {value}; the limits are {_DEFAULT_FRAME} and {2**24 - 1}"
                    )
                self._peer_frame = value
        self._write(_frame(_SETTINGS, _ACK, 0))
        self.greeted = True
        self.settings_received.set()
        self._send_bodies()
        self._client._stream_ended()  # a higher stream limit may let waiting calls start

    def _goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.draining = True
        text = debug.decode("utf-8", "replace") or f"HTTP/2 error {code}"
        if code == _ENHANCE_YOUR_CALM and debug == b"too_many_pings":
            self._client.slow_keepalive()
        self.reason = f"the server is going away ({text})" if code else "the server is going away"
        for stream_id in [stream_id for stream_id in self._calls if stream_id > last_id]:
            # The server says it never saw these: starting them elsewhere repeats nothing.
            self._client._restart(self._calls.pop(stream_id), self.reason)
        if not self._calls:
            self.close("UNAVAILABLE", self.reason)

    def _window_update(self, stream_id: int, increment: int, data: bytes) -> None:
        call = self._calls.get(stream_id)
        if stream_id == 0:
            if not increment:
                raise ProtocolError("the connection's window grows by 0")
            self._send_window += increment
            if self._send_window > _LARGEST_WINDOW:
                raise ProtocolError("the connection window overflowed", _FLOW_CONTROL_ERROR)
        elif call is None:
            self._check_stream(stream_id, data)
        elif not increment:
            self._fail_stream(call, "the server let the stream's window grow by 0", _PROTOCOL_ERROR)
        else:
            call._send_window += increment
            if call._send_window > _LARGEST_WINDOW:
                self._fail_stream(call, "the server let the stream's window overflow", _FLOW_CONTROL_ERROR)
        if self._blocked:
            self._send_bodies()


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


class InferenceClient:
    """Calls to one target over few HTTP/2 connections. Not thread-safe: use it from one gevent hub.

    A connection is opened when a call needs one. When the peer's MAX_CONCURRENT_STREAMS is reached, another opens, up
    to `max_connections`; then calls wait in order (their clock runs). After a failed connect, calls fail at once with
    UNAVAILABLE until `retry_s` has passed, so that a dead server costs no storm of connects.

    A target with https:// or grpcs:// is reached by TLS as `security` says, and HTTP/2 must be agreed on by ALPN. Its
    token goes with every call, whatever the scheme.

    `keepalive_s` above 0: a connection with open calls from which nothing came for so long is asked with a PING, and
    dead when nothing comes for `keepalive_timeout_s` more. Off by default: a stock gRPC server takes the third ping
    within five minutes in which it sent nothing (a long compile) for abuse and closes the connection. When one says
    so, the interval doubles.
    """

    def __init__(
        self,
        target: str,
        *,
        path: str = GENERATE_PATH,
        max_connections: int = 8,
        connect_timeout_s: float = 10.0,
        retry_s: float = 0.1,
        stream_window: int = 16 * 1024 * 1024,
        connection_window: int = 1024 * 1024 * 1024,
        security: SecurityConfig = OPEN,
        keepalive_s: float = 0.0,
        keepalive_timeout_s: float = 20.0,
        call: Callable[..., Call] = Call,  # for a protocol whose messages are others
    ) -> None:
        self._host, self._port = parse_target(target)
        self._call = call
        self._tls_context = client_context(security) if wants_tls(target) else None
        self._tls_name = server_name(security, self._host)
        token = bearer_token(security)
        self.keepalive_s = keepalive_s
        self.keepalive_timeout_s = keepalive_timeout_s
        self.target = joined(self._host, self._port)
        self.stream_window = stream_window
        self.connection_window = connection_window
        self.header_prefix = (
            # From the static table: ":method: POST", then ":scheme: http" or "https".
            (b"\x83\x86" if self._tls_context is None else b"\x83\x87")
            + _literal(b":path", path.encode("ascii"))
            + _literal(b":authority", self.target.encode("ascii"))
            + _literal(b"te", b"trailers")
            + _literal(b"content-type", b"application/grpc")
            + _literal(b"user-agent", b"tailgate")
            + (_literal(b"authorization", b"Bearer " + token.encode("ascii"), secret=True) if token else b"")
        )
        self.loop = gevent.get_hub().loop
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._retry_ns = int(retry_s * 1e9)
        self._connections: list[_Connection] = []
        self._waiting: deque[Call] = deque()
        self._connecting: gevent.Greenlet[[], None] | None = None
        self._refused_until_ns = 0
        self._refusal = ""
        self._closed = False

    def generate(self, request: GenerateRequest, *, metadata: Metadata = (), timeout_s: float | None = None) -> Call:
        """A started call whose chunks can be iterated; failures end the iteration and are in `status`."""
        return self._launch(request.SerializeToString(), encode_metadata(metadata), timeout_s, None, True, None)

    def start(
        self,
        body: bytes,
        *,
        headers: bytes = b"",
        timeout_s: float | None = None,
        on_done: Callable[[Call], None] | None = None,
        tag: Any = None,
    ) -> Call:
        """A started call that keeps token times but not tokens: the cheap way for load.

        `body` is a serialised GenerateRequest, `headers` comes from `encode_metadata`. `on_done` runs once, inside the
        reader, and may run before this returns; it must neither block nor raise.
        """
        return self._launch(body, headers, timeout_s, on_done, False, tag)

    def connect(self, timeout_s: float | None = None) -> str:
        """A connection is ready (returns ""), or the reason why there is none."""
        if self._closed:
            return "the client is closed"
        if not any(connection.usable for connection in self._connections):
            if self._connecting is None:
                self._connecting = gevent.spawn(self._connect)
            self._connecting.join(timeout_s)
        return "" if any(connection.usable for connection in self._connections) else self._refusal or "still connecting"

    def close(self) -> None:
        """Every call has ended (CANCELLED if it was running) and every socket is closed."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.kill()
        while self._waiting:
            self._waiting.popleft().cancel(error="the client was closed")
        for connection in list(self._connections):
            connection.close("CANCELLED", "the client was closed")

    def _launch(
        self,
        body: bytes,
        headers: bytes,
        timeout_s: float | None,
        on_done: Callable[[Call], None] | None,
        keep: bool,
        tag: Any,
    ) -> Call:
        deadline_ns = 0 if timeout_s is None else now_ns() + int(timeout_s * 1e9)
        call = self._call(headers=headers, body=body, deadline_ns=deadline_ns, on_done=on_done, keep=keep, tag=tag)
        if timeout_s is not None:
            call._timer = self.loop.timer(max(0.0, timeout_s))
            call._timer.start(call._on_deadline)
        self._assign(call)
        return call

    def _assign(self, call: Call) -> None:
        if self._closed:
            call._finish("UNAVAILABLE", "the client is closed", now_ns())
            return
        best: _Connection | None = None
        for connection in self._connections:
            if connection.usable and (best is None or connection.streams < best.streams):
                best = connection
        if best is not None:
            best.open(call)
            return
        alive = sum(not connection.draining for connection in self._connections)
        if self._connecting is None and alive < self._max_connections:
            if now_ns() < self._refused_until_ns:
                if not alive:
                    call._finish("UNAVAILABLE", self._refusal, now_ns())
                    return
            else:
                self._connecting = gevent.spawn(self._connect)
        self._waiting.append(call)

    def _restart(self, call: Call, reason: str) -> None:
        if call.status:
            return
        if call._retried or call._got_headers:
            call._finish("UNAVAILABLE", reason, now_ns())
            return
        call._retried, call._connection, call._position = True, None, 0
        self._assign(call)

    def _connect(self) -> None:
        refusal = ""
        sock: gevent.socket.socket | None = None
        connection: _Connection | None = None
        try:
            sock = gevent.socket.create_connection((self._host, self._port), timeout=self._connect_timeout_s)
            sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
            tls = self._secure(sock) if self._tls_context is not None else None
            sock.setblocking(False)
            connection = _Connection(self, sock, tls)
            if not connection.settings_received.wait(self._connect_timeout_s):
                connection.close("UNAVAILABLE", f"no HTTP/2 settings in {self._connect_timeout_s} s")
            if connection.closed:
                refusal = f"cannot connect to {self.target}: {connection.reason}"
                if tls is None and not connection.greeted and connection.reason.startswith(_WITHOUT_A_WORD):
                    refusal += " before it said anything: if its port speaks TLS: use https://"
            else:
                self._connections.append(connection)
        except (OSError, TlsError) as problem:
            refusal = f"cannot connect to {self.target}: {problem}"
        finally:
            self._connecting = None
            if sock is not None and connection is None:
                sock.close()
        if refusal:
            self._refusal, self._refused_until_ns = refusal, now_ns() + self._retry_ns
            if not any(not connection.draining for connection in self._connections):
                self._fail_waiting(refusal)
        else:
            self._refusal = ""
            self._stream_ended()

    def _secure(self, sock: gevent.socket.socket) -> TlsStream:
        """The TLS of a connection whose handshake is over. Raises TlsError with the remedy, or OSError."""
        assert self._tls_context is not None
        tls = TlsStream(self._tls_context, self._tls_name)
        with gevent.Timeout(self._connect_timeout_s, TlsError(f"no TLS handshake in {self._connect_timeout_s} s")):
            sock.sendall(tls.handshake(b""))
            while not tls.ready:
                received = sock.recv(_READ_BYTES)
                if not received:
                    raise TlsError("it ended the TLS handshake without a word: use the port that speaks TLS")
                sock.sendall(tls.handshake(received))
        return tls

    def slow_keepalive(self) -> None:
        """Pings come half as often: a server called them too many."""
        self.keepalive_s *= 2

    def _stream_ended(self) -> None:
        """Waiting calls start as far as there is room for them."""
        while self._waiting:
            if self._waiting[0].status:
                self._waiting.popleft()
                continue
            if not any(connection.usable for connection in self._connections):
                alive = sum(not connection.draining for connection in self._connections)
                if self._connecting is None and alive < self._max_connections:
                    if now_ns() >= self._refused_until_ns:
                        self._connecting = gevent.spawn(self._connect)
                    elif not alive:
                        self._fail_waiting(self._refusal)
                return
            self._assign(self._waiting.popleft())

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        at_ns = now_ns()
        for call in waiting:
            call._finish("UNAVAILABLE", reason, at_ns)

    def _connection_closed(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if not self._closed:
            self._stream_ended()
