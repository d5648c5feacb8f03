"""A small HTTP server: for this machine alone, or for those who hold its token, on a bounded number of threads."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any

from tailgate.servers.security import is_bearer

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_IDLE_S = 30.0  # that a connection may say nothing
_MOST_CONNECTIONS = 64  # each is a thread and a file


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` is reachable from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Server(ThreadingTCPServer):
    """Listens on (host, port) from now on, and answers by `handler` between `open` and `close`. Raises OSError.

    Without a `token`, only requests to a name of this machine are answered: a foreign page whose name was bound anew to
    127.0.0.1 still sends its own name as Host.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], *, token: str = "") -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)
        self._token = token
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)

    def open(self) -> None:
        """Answer from now on, in threads of this process."""
        self._thread.start()

    def close(self) -> None:
        """Answer and listen no more."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def knows_host(self, host: str) -> bool:
        """Return whether the Host header names this server; with a token, any name does."""
        name = host.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        return bool(self._token) or name in _LOCAL_NAMES

    def allows(self, authorization: str, token: str = "") -> bool:
        """Return whether a request carries the token, in this header or as `token`, or needs none."""
        return not self._token or any(is_bearer(one, self._token) for one in (authorization, f"Bearer {token}"))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Have what comes beyond the limit closed: clients cannot take all threads and files of the machine."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report faults alone: a client that goes away in the middle is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers in whole, with headers that let no other page frame or read them."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "tailgate"
    sys_version = ""
    timeout = _IDLE_S

    def begin(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        """Send the head of an answer."""
        fixed = {
            "Content-Type": "text/plain; charset=utf-8",
            "Cache-Control": "no-store",
            "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status: HTTPStatus, body: str | bytes, **headers: str) -> None:
        """Send a whole answer; `headers` are named with _ for -."""
        content = body.encode() if isinstance(body, str) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.begin(status, {"Content-Length": str(len(content)), **named})
        with suppress(OSError):
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request: an address may hold the token."""
