"""The page over HTTP: the page itself, its stream of events, and the report once there is one."""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from loadtests.page.access import Access
from servers.address import joined

if TYPE_CHECKING:
    from loadtests.page.feed import Feed

_SILENCE_S = 10.0  # after which a comment shows whether the browser is still there
_IDLE_S = 30.0  # that a connection may say nothing
_MOST_CONNECTIONS = 256  # each is a thread and a file
_FRAMELESS = "frame-ancestors 'none'"


class PageServer(ThreadingHTTPServer):
    """Listens on (host, port) from now on and answers once `serve_forever` runs.

    Nothing but this is imported until the first browser comes: a run that nobody watches pays for a socket.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, run_dir: Path, host: str, port: int, *, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.run_dir = run_dir
        self.access = Access(token, port=self.port)
        self.reports_sent = 0
        self._feed: Feed | None = None
        self._making = threading.Lock()
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Whoever comes when there is no room is let go at once: nobody takes all threads and files of the machine."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def server_bind(self) -> None:
        """As any TCP server: HTTPServer would ask the name service who it is."""
        TCPServer.server_bind(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, host: str) -> str:
        """The page's address, as one who reaches this machine under `host` writes it."""
        return f"http://{joined(host, self.port)}/"

    @property
    def feed(self) -> Feed:
        """What browsers listen to; made for the first of them."""
        with self._making:
            if self._feed is None:
                from loadtests.page.feed import Feed
                from loadtests.page.preview import Preview
                from loadtests.page.state import RunState

                self._feed = Feed(RunState(self.run_dir), preview=Preview(self.run_dir))
            return self._feed

    @cached_property
    def page(self) -> tuple[bytes, str]:
        """(the page, its Content-Security-Policy)."""
        from loadtests.page.document import page

        return page()

    @property
    def report(self) -> Path:
        """Where the report is, or will be."""
        from loadtests.page.state import REPORT, judged_folder

        return judged_folder(self.run_dir) / REPORT

    def finish(self, within_s: float) -> None:
        """Whoever listens has the last state and the report, or `within_s` have passed."""
        feed = self._feed
        if feed is None or not feed.listeners:
            return
        deadline = time.monotonic() + within_s
        sent, listening = self.reports_sent, feed.listeners
        feed.finish()
        feed.ended.wait(within_s)
        has_report = self.report.exists()
        while time.monotonic() < deadline:
            is_fetched = not has_report or self.reports_sent - sent >= listening
            if is_fetched and not feed.listeners:
                return
            time.sleep(0.02)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error; a fault of the page is in its log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "tailgate"
    sys_version = ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "That is no address: the page is at /.")
            return
        if not self.server.access.knows_host(self.headers.get("Host")):
            self._refuse(HTTPStatus.FORBIDDEN, "This page is served to this machine alone, under its own names.")
            return
        if self.headers.get("Sec-Fetch-Site") == "cross-site" and self.headers.get("Sec-Fetch-Mode") != "navigate":
            self._refuse(HTTPStatus.FORBIDDEN, "Another site asked for this.")
            return
        given = parse_qs(address.query).get("token", [""])[0]
        if self.server.access.is_token(given):
            # The token leaves the address, and with it the history and what is shared of the screen.
            self._answer(
                HTTPStatus.SEE_OTHER, b"", {"Location": "/", "Set-Cookie": self.server.access.set_cookie()}, _FRAMELESS
            )
            return
        if not self.server.access.allows(
            cookie=self.headers.get("Cookie"), authorization=self.headers.get("Authorization")
        ):
            self._refuse(HTTPStatus.UNAUTHORIZED, "Open the address with its token, as the terminal of the run has it.")
            return
        match address.path:
            case "/":
                body, policy = self.server.page
                self._answer(HTTPStatus.OK, body, {"Content-Type": "text/html; charset=utf-8"}, policy)
            case "/events":
                self._stream()
            case "/report.html":
                self._report()
            case _:
                self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here: the page is at /.")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _report(self) -> None:
        try:
            body = self.server.report.read_bytes()
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no report yet: the run is not judged.")
            return
        # A browser that has fetched it shows it also when this server is gone. The report brings its own policy.
        headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "private, max-age=3600"}
        self._answer(HTTPStatus.OK, body, headers, _FRAMELESS)
        self.server.reports_sent += self.command == "GET"

    def _stream(self) -> None:
        """Server-sent events until the browser leaves or the run has ended."""
        self.close_connection = True
        if self.command == "HEAD":
            self._answer(HTTPStatus.OK, b"", {"Content-Type": "text/event-stream"}, _FRAMELESS)
            return
        feed = self.server.feed
        with feed.listening() as listener:
            if listener is None:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "Too many browsers watch this run.")
                return
            self.send_response(HTTPStatus.OK)
            self._send_headers({"Content-Type": "text/event-stream", "Connection": "close"}, _FRAMELESS)
            self.end_headers()
            self.wfile.write(b"retry: 1000\n\n")
            self.wfile.flush()
            while not listener.lost:
                message = listener.next(_SILENCE_S)
                if message == b"":  # it was the last one
                    return
                self.wfile.write(message or b": still here\n\n")
                self.wfile.flush()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, f"{why}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"}, _FRAMELESS)

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str], policy: str) -> None:
        self.send_response(status)
        self._send_headers({"Content-Length": str(len(body)), **headers}, policy)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):
                self.wfile.write(body)

    def _send_headers(self, headers: dict[str, str], policy: str) -> None:
        fixed = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged: the first one's address holds the token."""
