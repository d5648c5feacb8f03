"""A streaming client for OpenAI-compatible servers under gevent, whose token times are those at which bytes came.

One greenlet a request: it takes an idle connection or opens one, sends, and stamps the clock right after each read;
every event in what was read has that time. Nothing here raises for a failed request: it ends the call with the same
status names as the gRPC client, so that arms of all kinds are recorded alike. HTTP/1.1 itself is parsed by
geventhttpclient (llhttp).
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Callable
from typing import Any, Final

import gevent
import gevent.socket
import gevent.ssl
from geventhttpclient.response import HTTPParseError, HTTPResponse

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.external.addresses import parse_address
from tailgate.loadtests.external.arms import ExternalArm, OpenAiOptions
from tailgate.loadtests.external.client_security import bearer_token, client_context, explain, server_name
from tailgate.loadtests.external.openai_wire import (
    DONE,
    LARGEST_ERROR,
    MEDIA_HEADERS,
    EventStream,
    error_of_body,
    is_event_stream,
    media_type,
    read_event,
    request_path,
    shortened,
)
from tailgate.servers.clock import now_ns
from tailgate.servers.metadata import trailing_key

_LARGEST_HEADERS: Final = 256 * 1024
_READ_BYTES: Final = 65_536
_DRAIN_S: Final = 1.0  # for what follows the end mark, so that the connection can be used again
_LOCAL_LIMITS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)

# A kept connection that the server had closed shows it at once. What fails later was the server's own doing.
_STALE_NS: Final = 250_000_000


class OpenAiClient:
    """Requests to one server over kept-alive HTTP/1.1 connections. Not thread-safe: use it from one gevent hub.

    A request has a connection to itself; afterwards the connection waits for the next. A connection that the server
    closed meanwhile costs one more attempt, and only while nothing of an answer has come. After a failed connect,
    requests fail at once with UNAVAILABLE until `retry_s` has passed.
    """

    def __init__(
        self,
        config: ExternalArm,
        address: str,
        *,
        connect_timeout_s: float = 10.0,
        retry_s: float = 0.1,
        most_idle: int = 4096,
    ) -> None:
        assert isinstance(config.options, OpenAiOptions)
        self.address = parse_address(address, "openai")
        self.target = self.address.target
        self._connect_timeout_s = connect_timeout_s
        self._retry_ns = int(retry_s * 1e9)
        self._most_idle = most_idle
        token = self._token = bearer_token(config)
        lines = [
            f"POST {request_path(config.options, self.address)} HTTP/1.1",
            f"Host: {self.address.host_header}",
            "User-Agent: tailgate",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
        ]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        self._head = "\r\n".join(lines).encode("ascii") + b"\r\n"
        self._tls: ssl.SSLContext | None = None
        if self.address.tls:
            self._tls = client_context(config, protocols=("http/1.1",), kind=gevent.ssl.SSLContext)
        self._tls_name = server_name(config, self.address.host)
        self._idle: list[Any] = []
        self._calls: set[OpenAiCall] = set()
        self._refused_until_ns = 0
        self._refusal = ""
        self._closed = False

    def start(
        self,
        body: bytes,
        *,
        headers: bytes = b"",
        timeout_s: float | None = None,
        on_done: Callable[[OpenAiCall], None] | None = None,
        tag: Any = None,
    ) -> OpenAiCall:
        """Start a call. `body` is JSON, `headers` are whole header lines; `on_done` must neither block nor raise."""
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, headers, len(body), body)
        call = OpenAiCall(
            request=request, timeout_s=timeout_s, on_done=on_done, tag=tag, calls=self._calls, token=self._token
        )
        if self._closed:
            call.finish("UNAVAILABLE", "the client is closed", now_ns())
        else:
            call.greenlet = gevent.spawn(self._serve, call)
        return call

    def connect(self, timeout_s: float | None = None) -> str:
        """Open a connection unless one is idle, and return "", or the reason why there is none."""
        if self._closed:
            return "the client is closed"
        if self._idle:
            return ""
        with gevent.Timeout(timeout_s, False):
            try:
                self._idle.append(self._connect())
            except OSError as problem:
                return str(problem)
            return ""
        return "still connecting"

    def close(self) -> None:
        """End every call, CANCELLED if it was running, and close every idle socket."""
        self._closed = True
        for call in list(self._calls):
            call.cancel(error="the client was closed")
        while self._idle:
            _shut(self._idle.pop())

    def _serve(self, call: OpenAiCall) -> None:
        sock: Any = None
        kept = False
        try:
            while sock is None:
                sock, reused = self._take()
                try:
                    kept = self._exchange(call, sock, reused)
                except _StaleConnectionError:
                    _shut(sock)
                    sock = None
        except OSError as problem:
            call.finish("UNAVAILABLE", str(problem), now_ns())
        finally:
            if sock is not None:
                if kept and not self._closed and len(self._idle) < self._most_idle:
                    self._idle.append(sock)
                else:
                    _shut(sock)
            # Killed, or an error of this program: the call has ended either way.
            call.finish("INTERNAL", "the client gave up", now_ns())

    def _take(self) -> tuple[Any, bool]:
        """Return an idle connection that still is one, and True, or a new one and False. Raises OSError with the reason
        why there is none."""
        while self._idle:
            sock = self._idle.pop()
            if not _is_closed(sock):
                return sock, True
            _shut(sock)
        if now_ns() < self._refused_until_ns:
            raise OSError(self._refusal)
        try:
            return self._connect(), False
        except OSError as problem:
            self._refusal, self._refused_until_ns = str(problem), now_ns() + self._retry_ns
            raise

    def _connect(self) -> Any:
        """Return a new connection. Raises OSError with the reason why there is none."""
        sock: Any = None
        try:
            sock = gevent.socket.create_connection(
                (self.address.host, self.address.port), timeout=self._connect_timeout_s
            )
            sock.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._tls_name)
            sock.settimeout(None)  # deadlines are the calls'
        except BaseException as problem:
            if sock is not None:
                _shut(sock)
            if isinstance(problem, OSError) and problem.errno in _LOCAL_LIMITS:
                limits = f"({problem.strerror}): raise its limits (ulimit -n)"
                raise OSError(f"this machine can open no more connections {limits}") from None
            if isinstance(problem, OSError):
                why = explain(problem, self._tls_name) if isinstance(problem, ssl.SSLError) else problem
                raise OSError(f"cannot connect to {self.target}: {why}") from None
            raise
        return sock

    def _exchange(self, call: OpenAiCall, sock: Any, reused: bool) -> bool:
        """Send the request and read until the call has ended. Return whether the connection can serve another."""
        call.sent_ns = now_ns()
        broken: OSError | None = None
        try:
            sock.sendall(call.request)
        except OSError as problem:
            broken = problem  # a server that refuses a request early has said why
        response, silent = call.response, True
        while not call.status or (call.status == "OK" and not response.message_complete):
            if call.ended_ns or call.status:
                sock.settimeout(_DRAIN_S)  # an answer is whole with its finish_reason: do not wait for [DONE]
            try:
                data = sock.recv(_READ_BYTES)
            except TimeoutError:
                call.break_off("", now_ns())
                return False
            except OSError as problem:
                data, broken = b"", broken or problem
            at_ns = now_ns()
            if not data and silent:
                if reused and at_ns - call.sent_ns < _STALE_NS:
                    raise _StaleConnectionError
                why = f": {broken}" if broken is not None else ""
                call.finish("UNAVAILABLE", f"the server closed the connection without an answer{why}", at_ns)
                return False
            silent = False
            call.feed(data, at_ns)
            if not data:
                return False
        return broken is None and not response.should_close()


class _StaleConnectionError(Exception):
    """The server had closed the kept connection before it saw the request."""


def _is_closed(sock: Any) -> bool:
    """Return whether the server closed an idle connection, or sent bytes that belong to no request. Never waits."""
    try:
        sock.setblocking(False)
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        sock.settimeout(None)
        return False
    except OSError:
        return True
    return True


def _shut(sock: Any) -> None:
    with contextlib.suppress(OSError):
        sock.close()


class _Response(HTTPResponse):
    """llhttp's view of one answer; `pieces` are the parts of its body since they were last taken."""

    def __init__(self) -> None:
        super().__init__("POST")
        self.pieces: list[bytes] = []

    def _on_body(self, buf: bytearray) -> None:
        self.pieces.append(bytes(buf))

    def header(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ",".join(value) if value else ""


class OpenAiCall(Call):
    """One request. Its connection is closed when it is cancelled.

    `token_ns` has one time for each event that carried text, so for each chunk and not for each token, unless the
    server tells how many tokens a chunk brought (usage in every event): then a chunk's tokens all have its time.
    `output_tokens` is the server's count where it gave one.
    """

    __slots__ = (
        *("_body", "_calls", "_counts", "_events", "_head_bytes", "_is_stream"),
        *("chunks", "counted_tokens", "ended_ns", "greenlet", "request", "response"),
    )

    def __init__(self, *, request: bytes, calls: set[OpenAiCall], token: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.token = token
        self.response = _Response()
        self.ended_ns = 0  # when the finish_reason came; 0: not yet
        self._events = EventStream()
        self._is_stream: bool | None = None  # None: headers have not come
        self._counts = True  # every event with text so far had a count of tokens
        self._body = b""
        self._head_bytes = 0  # before the end of the headers
        self.chunks = 0
        self.counted_tokens: int | None = None  # by the server
        self.request = request
        self.greenlet: gevent.Greenlet[..., None] | None = None
        self._calls = calls  # of the client, while they run
        calls.add(self)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer by the server's count, else the chunks that carried text."""
        return len(self.token_ns) if self.counted_tokens is None else self.counted_tokens

    def _withdraw(self) -> None:
        """Close its connection."""
        if self.greenlet is not None and self.greenlet is not gevent.getcurrent():
            self.greenlet.kill(block=False)

    def _release(self) -> None:
        self.request = b""
        self._calls.discard(self)

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take what was read at `at_ns`; empty means that the server closed its side."""
        response = self.response
        try:
            response.feed(data)
        except HTTPParseError as problem:
            where = "inside its answer" if response.message_begun else "instead of an answer"
            what = "closed the connection" if not data else f"does not speak HTTP/1.1 ({shortened(str(problem))})"
            self.finish("UNAVAILABLE", f"the server {what} {where}", at_ns)
            return
        if not response.headers_complete or response.get_code() < 200:
            self._head_bytes += len(data)
            if not data or self._head_bytes > _LARGEST_HEADERS:
                self.finish("UNAVAILABLE", "the server closed the connection without an answer", at_ns)
            return
        if self._is_stream is None:
            kind = media_type(*map(response.header, MEDIA_HEADERS))
            self._is_stream = response.get_code() == 200 and is_event_stream(kind)
        pieces, response.pieces = response.pieces, []
        if self._is_stream:
            for piece in pieces:
                try:
                    events = self._events.feed(piece)
                except ValueError as error:
                    self.finish("INTERNAL", str(error), at_ns)
                    break
                for event in events:
                    self._event(event, at_ns)
        else:
            self._body += b"".join(pieces)
        if response.message_complete or len(self._body) >= LARGEST_ERROR:
            self._complete(at_ns)
        elif not data:
            self.break_off("the server closed the connection inside its answer", at_ns)

    def break_off(self, error: str, at_ns: int) -> None:
        """End a call of which no more will come: its answer is whole if its finish_reason came, and ended then."""
        if self.ended_ns:
            self.finish("OK", "", self.ended_ns)
        else:
            self.finish("UNAVAILABLE", error, at_ns)

    def _event(self, data: bytes, at_ns: int) -> None:
        if self.status:
            return
        if data == DONE or data.strip() == DONE:
            self._end_stream(at_ns)
            return
        try:
            chunk = read_event(data)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as problem:
            what = shortened(data[:200].decode("utf-8", "replace"))
            self.finish("INTERNAL", f"an event has an unknown form ({type(problem).__name__}): {what}", at_ns)
            return
        if chunk.failed is not None:
            self.finish(*chunk.failed, at_ns)
            return
        if chunk.ended and not self.ended_ns:
            self.ended_ns = at_ns
        total = chunk.completion_tokens
        if chunk.text:
            self.chunks += 1
            # A count in each event says how many tokens this chunk brought. One at the end alone does not, nor does one
            # below the number of chunks.
            self._counts = (
                self._counts and total is not None and total >= self.chunks and (self.chunks > 1 or not chunk.ended)
            )
            self.add_tokens(total - len(self.token_ns) if total is not None and self._counts else 1, at_ns)
        elif total is not None and self._counts and total > len(self.token_ns) and (self.chunks or chunk.goes_on):
            # The model made tokens whose text the server holds back.
            self.add_tokens(total - len(self.token_ns), at_ns)
        if total is not None:
            self.counted_tokens = total
        if chunk.prompt_tokens is not None:
            self.trailing_metadata[trailing_key("prompt_tokens")] = str(chunk.prompt_tokens)

    def _complete(self, at_ns: int) -> None:
        """End the call with the whole answer."""
        if self.status:
            return
        code = self.response.get_code()
        if not self._is_stream:
            location, kind = self.response.header("location"), media_type(*map(self.response.header, MEDIA_HEADERS))
            self.finish(*error_of_body(code, self._body, location, kind), at_ns)
        elif self.ended_ns or self._events.close() == DONE:
            self._end_stream(at_ns)
        else:
            self.finish("UNAVAILABLE", "the stream ended without a finish_reason and without [DONE]", at_ns)

    def _end_stream(self, at_ns: int) -> None:
        """End the call with its stream."""
        if self.ended_ns or self.chunks or self.token_ns:
            self.finish("OK", "", at_ns)
        else:
            self.finish("INTERNAL", "the stream held neither text nor a finish_reason", at_ns)
