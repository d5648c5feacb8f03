"""A streaming gRPC client for gevent whose token times are those at which bytes came, for many calls at once.

Nothing here raises for a failed request: a refused connection, a reset stream or a passed deadline ends the call with
a gRPC status name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
from gevent import get_hub

from tailgate.loadtests.clients.connection import Connection
from tailgate.loadtests.clients.frames import request_prefix
from tailgate.loadtests.clients.grpc_call import GENERATE_PATH, GrpcCall
from tailgate.loadtests.clients.tls import TlsError, TlsStream, connected
from tailgate.loadtests.external.addresses import parse_target
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig, bearer_token, client_context
from tailgate.servers.clock import now_ns


class InferenceClient:
    """Calls to one target over few HTTP/2 connections. Not thread-safe: use it from one gevent hub.

    A connection is opened when a call needs one. When the peer's MAX_CONCURRENT_STREAMS is reached, another opens, up
    to `max_connections`; then calls wait in order (their clock runs). After a failed connect, calls fail at once with
    UNAVAILABLE until `retry_s` has passed, so that a dead server costs no storm of connects.

    A target with https:// or grpcs:// is reached by TLS as `security` says, and HTTP/2 must be agreed on by ALPN. Its
    token goes with every call, whatever the scheme.
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
        call: Callable[..., GrpcCall] = GrpcCall,  # for a protocol whose messages are others
    ) -> None:
        self.address = parse_target(target)
        self.target = self.address.target
        self._call = call
        self._tls_context = client_context(security) if self.address.tls else None
        self._tls_name = security.tls_server_name or self.address.host
        self.stream_window = stream_window
        self.connection_window = connection_window
        self._token = bearer_token(security)
        self.header_prefix = request_prefix(path, self.target, tls=self.address.tls, token=self._token)
        self.loop = get_hub().loop
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._retry_ns = int(retry_s * 1e9)
        self.connections: list[Connection] = []
        self._waiting: deque[GrpcCall] = deque()
        self._connecting: gevent.Greenlet[[], None] | None = None
        self._refused_until_ns = 0
        self._refusal = ""

    def start(
        self,
        body: bytes,
        *,
        headers: bytes = b"",
        timeout_s: float | None = None,
        on_done: Callable[[Any], None] | None = None,
        tag: Any = None,
    ) -> GrpcCall:
        """Start a call. `body` is a serialised request of the method, `headers` are fields made by `literal`."""
        call = self._call(headers=headers, body=body, timeout_s=timeout_s, on_done=on_done, tag=tag)
        call.token = self._token
        self._assign(call)
        return call

    def connect(self, timeout_s: float | None = None) -> str:
        """Wait for a connection and return "", or the reason why there is none."""
        if self._usable() is None:
            if self._connecting is None:
                self._connecting = gevent.spawn(self._connect)
            self._connecting.join(timeout_s)
        return "" if self._usable() else self._refusal or "still connecting"

    def close(self) -> None:
        """End every call, CANCELLED if it was running, and close every socket."""
        if self._connecting is not None:
            self._connecting.kill()
        while self._waiting:
            self._waiting.popleft().cancel(error="the client was closed")
        for connection in list(self.connections):
            connection.close("CANCELLED", "the client was closed")

    def _usable(self) -> Connection | None:
        """Return the connection with the fewest streams of those that take one more."""
        best: Connection | None = None
        for connection in self.connections:
            if connection.usable and (best is None or connection.streams < best.streams):
                best = connection
        return best

    def _assign(self, call: GrpcCall) -> None:
        if (connection := self._usable()) is not None:
            connection.open(call)
        else:
            self._waiting.append(call)
            self._open_more()

    def _open_more(self) -> None:
        """Open one more connection, if one may be; else let calls wait, or fail while connects are refused."""
        alive = sum(not connection.draining for connection in self.connections)
        if self._connecting is None and alive < self._max_connections:
            if now_ns() >= self._refused_until_ns:
                self._connecting = gevent.spawn(self._connect)
            elif not alive:
                self._fail_waiting(self._refusal)

    def restart(self, call: GrpcCall, reason: str) -> None:
        """Resend a call that its server never processed; fail it the second time."""
        if call.status:
            return
        if call.restarted or call.answered:
            call.finish("UNAVAILABLE", reason, now_ns())
            return
        call.restarted, call.connection, call.position = True, None, 0
        self._assign(call)

    def _connect(self) -> None:
        try:
            refusal = self._new_connection()
        except OSError as problem:
            refusal = str(problem)
        finally:
            self._connecting = None
        if not refusal:
            return self.stream_ended()
        self._refusal = f"cannot connect to {self.target}: {refusal}"
        self._refused_until_ns = now_ns() + self._retry_ns
        if all(connection.draining for connection in self.connections):
            self._fail_waiting(self._refusal)
        return None

    def _new_connection(self) -> str:
        """Add a connection and return "", or why the server did not greet. Raises OSError."""
        sock = connected(self.address, self._connect_timeout_s)
        tls = None
        if self._tls_context is not None:
            too_late = TlsError(f"no TLS handshake in {self._connect_timeout_s} s")
            with gevent.Timeout(self._connect_timeout_s, too_late):
                tls = TlsStream(self._tls_context, self._tls_name)
                tls.shake_hands(sock)
        sock.setblocking(False)
        connection = Connection(self, sock, tls)
        if not connection.settings_received.wait(self._connect_timeout_s):
            connection.close("UNAVAILABLE", f"no HTTP/2 settings in {self._connect_timeout_s} s")
        if not connection.closed:
            self.connections.append(connection)
        return connection.reason if connection.closed else ""

    def stream_ended(self) -> None:
        """Start waiting calls as far as connections take them."""
        while self._waiting:
            if self._waiting[0].status:
                self._waiting.popleft()
                continue
            if self._usable() is None:
                return self._open_more()
            self._assign(self._waiting.popleft())

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        at_ns = now_ns()
        for call in waiting:
            call.finish("UNAVAILABLE", reason, at_ns)

    def connection_closed(self, connection: Connection) -> None:
        """Stop using the connection; waiting calls may open another."""
        if connection in self.connections:
            self.connections.remove(connection)
        self.stream_ended()
