"""A streaming client for OpenAI-compatible servers under gevent, whose token times are those at which bytes came.

One greenlet a request: it takes an idle connection or opens one, sends, and stamps the clock right after each read;
every event in what was read has that time. Nothing here raises for a failed request: it ends the call with the same
status names as the gRPC client, so that arms of all kinds are recorded alike.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import Any, Final

import gevent
import gevent.ssl

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.tls import connected
from tailgate.loadtests.external.addresses import parse_address
from tailgate.loadtests.external.arms import ExternalArm, OpenAiOptions
from tailgate.loadtests.external.client_security import bearer_token, client_context, explain
from tailgate.loadtests.external.openai_wire import DONE, EventStream, error_of_answer, read_event, request_path
from tailgate.servers.clock import now_ns
from tailgate.servers.metadata import trailing_key

_CONNECT_S: Final = 10.0
_READ_BYTES: Final = 65_536
_DRAIN_S: Final = 1.0  # for what follows the end mark, so that the connection can be used again

# A kept connection that the server had closed shows it at once. What fails later was the server's own doing.
_STALE_NS: Final = 250_000_000


class OpenAiClient:
    """Requests to one server over kept-alive HTTP/1.1 connections. Not thread-safe: use it from one gevent hub.

    A request has a connection to itself; afterwards the connection waits for the next. A connection that the server
    closed meanwhile costs one more attempt, and only while nothing of an answer has come.
    """

    def __init__(self, config: ExternalArm, address: str) -> None:
        assert isinstance(config.options, OpenAiOptions)
        self.address = parse_address(address, "openai")
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
        self._tls_name = config.tls_server_name or self.address.host
        self._idle: list[Any] = []

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
        call = OpenAiCall(request=request, timeout_s=timeout_s, on_done=on_done, tag=tag, token=self._token)
        call.greenlet = gevent.spawn(self._serve, call)
        return call

    def close(self) -> None:
        """Close every idle socket."""
        while self._idle:
            _shut(self._idle.pop())

    def _serve(self, call: OpenAiCall) -> None:
        sock: Any = None
        kept = False
        try:
            while self._idle and sock is None:
                sock = self._idle.pop()
                if not _is_quiet(sock):
                    _shut(sock)
                    sock = None
            if sock is not None:
                try:
                    kept = exchange(call, sock, reused=True)
                except _StaleConnectionError:
                    _shut(sock)
                    sock = None
            if sock is None:
                sock = self._connect()
                kept = exchange(call, sock, reused=False)
        except OSError as problem:
            call.finish("UNAVAILABLE", str(problem), now_ns())
        finally:
            if kept:
                self._idle.append(sock)
            elif sock is not None:
                _shut(sock)
            # Killed, or an error of this program: the call has ended either way.
            call.finish("INTERNAL", "the client gave up", now_ns())

    def _connect(self) -> Any:
        """Return a new connection. Raises OSError with the reason why there is none."""
        try:
            sock = connected(self.address, _CONNECT_S)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._tls_name)
        except OSError as problem:
            why = explain(problem, self._tls_name) if isinstance(problem, ssl.SSLError) else problem
            raise OSError(f"cannot connect to {self.address.target}: {why}") from None
        sock.settimeout(None)  # deadlines are the calls'
        return sock


class _StaleConnectionError(Exception):
    """The server had closed the kept connection before it saw the request."""


def exchange(call: OpenAiCall, sock: Any, reused: bool) -> bool:
    """Send the request and read until the call has ended. Return whether the connection can serve another."""
    call.sent_ns = now_ns()
    sent = False
    with contextlib.suppress(OSError):  # a server that refuses a request early has said why
        sock.sendall(call.request)
        sent = True
    response = HTTPResponse(sock, method="POST")
    try:
        response.begin()
        if (failed := error_of_answer(response)) is None:
            return _read_stream(call, sock, response) and sent
        call.finish(*failed, now_ns())
        # After an informational answer the one to this request would still come.
        return sent and response.status >= 200 and response.isclosed() and not response.will_close
    except OSError as problem:
        at_ns = now_ns()
        if reused and response.headers is None and at_ns - call.sent_ns < _STALE_NS:
            raise _StaleConnectionError from None
        call.finish("UNAVAILABLE", f"the server closed the connection without an answer: {problem}", at_ns)
    except (HTTPException, ValueError, OverflowError) as problem:
        why = f"the server does not speak HTTP/1.1 ({type(problem).__name__}: {problem})"
        call.finish("UNAVAILABLE", why, now_ns())
    finally:
        response.close()
    return False


def _read_stream(call: OpenAiCall, sock: Any, response: HTTPResponse) -> bool:
    while not call.status or call.status == "OK":
        if call.ended_ns or call.status:
            sock.settimeout(_DRAIN_S)  # an answer is whole with its finish_reason: do not wait for [DONE]
        try:
            piece = response.read1(_READ_BYTES)
        except TimeoutError:
            call.end_stream("", now_ns())
            return False
        except (OSError, HTTPException, ValueError, OverflowError):  # OverflowError: a chunk of less than -2^63
            piece, response.length = b"", -1
        at_ns = now_ns()
        if piece:
            call.take(piece, at_ns)
        elif response.length:
            call.end_stream("the server closed the connection inside its answer", at_ns)
            return False
        else:
            call.end_stream("the stream ended without a finish_reason and without [DONE]", at_ns)
            sock.settimeout(None)
            return call.status == "OK" and not response.will_close
    return False


def _is_quiet(sock: Any) -> bool:
    """Return whether an idle connection is open, and holds nothing that would pass for the next answer. Never waits."""
    try:
        sock.setblocking(False)
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        sock.settimeout(None)
        return True
    except OSError:
        pass
    return False


def _shut(sock: Any) -> None:
    with contextlib.suppress(OSError):
        sock.close()


class OpenAiCall(Call):
    """One request. Its connection is closed when it is cancelled.

    `token_ns` has one time for each event that carried text, so for each chunk and not for each token, unless the
    server tells how many tokens a chunk brought (usage in every event): then a chunk's tokens all have its time.
    `output_tokens` is the server's count where it gave one.
    """

    def __init__(self, *, request: bytes, token: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.token = token
        self.ended_ns = 0  # when the finish_reason came; 0: not yet
        self._events = EventStream()
        self._counts = True  # every event with text so far had a count of tokens
        self.chunks = 0
        self.counted_tokens: int | None = None  # by the server
        self.request = request
        self.greenlet: gevent.Greenlet[..., None] | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer by the server's count, else the chunks that carried text."""
        return len(self.token_ns) if self.counted_tokens is None else self.counted_tokens

    def _withdraw(self) -> None:
        if self.greenlet is not None and self.greenlet is not gevent.getcurrent():
            self.greenlet.kill(block=False)

    def _release(self) -> None:
        self.request = b""

    def take(self, piece: bytes, at_ns: int) -> None:
        """Take a piece of the answer that was read at `at_ns`."""
        try:
            for event in self._events.feed(piece):
                self._event(event, at_ns)
        except ValueError as error:
            self.finish("INTERNAL", str(error), at_ns)

    def end_stream(self, error: str, at_ns: int) -> None:
        """End a call of which no more will come: its answer is whole if its finish_reason came, and ended then."""
        if self.ended_ns:
            self.finish("OK", "", self.ended_ns)
        else:
            self.finish("UNAVAILABLE", error, at_ns)

    def _event(self, data: bytes, at_ns: int) -> None:
        if self.status:
            return
        if data.strip() == DONE:
            if self.ended_ns or self.chunks or self.token_ns:
                self.finish("OK", "", self.ended_ns or at_ns)
            else:
                self.finish("INTERNAL", "the stream held neither text nor a finish_reason", at_ns)
            return
        try:
            chunk = read_event(data)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as problem:
            what = data[:200].decode("utf-8", "replace")
            self.finish("INTERNAL", f"an event has an unknown form ({type(problem).__name__}): {what}", at_ns)
            return
        if chunk.failed is not None:
            self.finish(*chunk.failed, at_ns)
            return
        if chunk.ended and not self.ended_ns:
            self.ended_ns = at_ns
        total = chunk.completion_tokens
        if chunk.answers:
            self.chunks += 1
            # A count in each event says how many tokens this chunk brought. One at the end alone does not, nor does one
            # below the number of chunks.
            self._counts = (
                self._counts and total is not None and total >= self.chunks and (self.chunks > 1 or not chunk.ended)
            )
            self.add_tokens(total - len(self.token_ns) if total is not None and self._counts else 1, at_ns)
        elif total is not None and self._counts and total > len(self.token_ns) and self.chunks:
            # The model made tokens whose text the server holds back.
            self.add_tokens(total - len(self.token_ns), at_ns)
        if self.ended_ns and self.token_ns:
            self.ended_ns = max(self.ended_ns, self.token_ns[-1])  # no answer ends before its last token
        if total is not None:
            self.counted_tokens = total
        if chunk.prompt_tokens is not None:
            self.trailing_metadata[trailing_key("prompt_tokens")] = str(chunk.prompt_tokens)
