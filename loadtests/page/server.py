"""The live page over HTTP: the page itself, its stream of events, and the report once there is one."""

from __future__ import annotations

import threading
import time
from functools import cached_property
from http import HTTPStatus
from pathlib import Path

from tailgate.loadtests.page.serving import Handler, Server
from tailgate.loadtests.page.updates import REPORT, Updates

_EVERY_S = 1.0
_HTML = "text/html; charset=utf-8"


class PageServer(Server):
    """Serves the page of the run in `run_dir`."""

    def __init__(self, run_dir: Path, port: int) -> None:
        super().__init__("127.0.0.1", port, _Handler)
        self.run_dir = run_dir
        self.ending = threading.Event()
        self.counting = threading.Lock()
        self.browsers = self.reports_sent = 0

    @cached_property
    def page(self) -> tuple[bytes, str]:
        """(the page, its Content-Security-Policy)."""
        from tailgate.loadtests.page.document import page  # Jinja2 is imported for the first browser

        return page()

    def finish(self, within_s: float) -> None:
        """Send every browser the last state, and wait until it has fetched the report, `within_s` at most."""
        deadline = time.monotonic() + within_s
        expected = self.reports_sent + self.browsers * (self.run_dir / REPORT).exists()
        self.ending.set()
        while (self.browsers or self.reports_sent < expected) and time.monotonic() < deadline:
            time.sleep(0.02)


class _Handler(Handler):
    server: PageServer

    def do_GET(self) -> None:  # noqa: N802  (http.server's name)
        server, headers, path = self.server, self.headers, self.path.partition("?")[0]
        if not server.knows_host(headers.get("Host", "")):
            self.answer(HTTPStatus.FORBIDDEN, "This page is served to this machine alone, under its own names.\n")
        elif headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            self.answer(HTTPStatus.FORBIDDEN, "Another site asked for this.\n")
        elif path == "/":
            body, policy = server.page
            self.answer(HTTPStatus.OK, body, Content_Type=_HTML, Content_Security_Policy=policy)
        elif path == "/events":
            self._stream()
        elif path == f"/{REPORT}" and (server.run_dir / REPORT).exists():
            body = (server.run_dir / REPORT).read_bytes()
            # A browser that has fetched it shows it also when this server is gone. The report brings its own policy.
            policy, kept = "frame-ancestors 'none'", "private, max-age=3600"
            self.answer(HTTPStatus.OK, body, Content_Type=_HTML, Cache_Control=kept, Content_Security_Policy=policy)
            server.reports_sent += 1
        else:
            self.answer(HTTPStatus.NOT_FOUND, "There is nothing here yet: the page is at /.\n")

    def _stream(self) -> None:
        """Send events, a second apart, until the browser leaves or the run ends."""
        self.close_connection = True
        server = self.server
        self.begin(HTTPStatus.OK, {"Content-Type": "text/event-stream", "Connection": "close"})
        with server.counting:
            server.browsers += 1
        try:
            updates, last = Updates(server.run_dir), False
            self.wfile.write(b"retry: 1000\n\n")
            while not last:
                last = server.ending.is_set()  # read first: the last event has what was written before the end
                self.wfile.write(updates.event(last=last))
                self.wfile.flush()
                server.ending.wait(_EVERY_S)
        finally:
            with server.counting:
                server.browsers -= 1
