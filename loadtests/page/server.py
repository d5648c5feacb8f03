"""The live page over HTTP: the page itself, its stream of events, and the report once there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from tailgate.loadtests.page.serving import Handler, Server
from tailgate.loadtests.page.updates import REPORT, Updates

_EVERY_S = 1.0
_MOST_BROWSERS = 16  # each has the directory read
_HTML = "text/html; charset=utf-8"


class PageServer(Server):
    """Serves the page of the run in `run_dir`."""

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        super().__init__(host, port, _Handler)
        self.run_dir = run_dir
        self.ending = threading.Event()
        self.browsers = 0
        self.reports_sent = 0
        self._counting = threading.Lock()

    @cached_property
    def page(self) -> tuple[bytes, str]:
        """(the page, its Content-Security-Policy)."""
        from tailgate.loadtests.page.document import page  # Jinja2 is imported for the first browser

        return page()

    @property
    def report(self) -> Path:
        """Where the report is, or will be."""
        return self.run_dir / REPORT

    @contextmanager
    def watching(self) -> Iterator[bool]:
        """Count a browser until the end of the block; False where there are too many."""
        with self._counting:
            admitted = self.browsers < _MOST_BROWSERS
            self.browsers += admitted
        try:
            yield admitted
        finally:
            with self._counting:
                self.browsers -= admitted

    def finish(self, within_s: float) -> None:
        """Send every browser the last state, and wait until it has fetched the report, `within_s` at most."""
        deadline = time.monotonic() + within_s
        expected = self.reports_sent + self.browsers
        self.ending.set()
        has_report = self.report.exists() if self.browsers else False
        while (self.browsers or (has_report and self.reports_sent < expected)) and time.monotonic() < deadline:
            time.sleep(0.02)


class _Handler(Handler):
    server: PageServer

    def get(self) -> None:
        server, headers = self.server, self.headers
        try:
            address = urlsplit(self.path)
        except ValueError:
            self.answer(HTTPStatus.BAD_REQUEST, "That is no address: the page is at /.\n")
            return
        if not server.knows_host(headers.get("Host", "")):
            self.answer(HTTPStatus.FORBIDDEN, "This page is served to this machine alone, under its own names.\n")
        elif headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            self.answer(HTTPStatus.FORBIDDEN, "Another site asked for this.\n")
        elif address.path == "/":
            body, policy = server.page
            self.answer(HTTPStatus.OK, body, Content_Type=_HTML, Content_Security_Policy=policy)
        elif address.path == "/events":
            self._stream()
        elif address.path == "/report.html":
            self._report()
        else:
            self.answer(HTTPStatus.NOT_FOUND, "There is nothing here: the page is at /.\n")

    def _report(self) -> None:
        try:
            body = self.server.report.read_bytes()
        except OSError:
            self.answer(HTTPStatus.NOT_FOUND, "There is no report yet: the run is not judged.\n")
            return
        # A browser that has fetched it shows it also when this server is gone. The report brings its own policy.
        policy, kept = "frame-ancestors 'none'", "private, max-age=3600"
        self.answer(HTTPStatus.OK, body, Content_Type=_HTML, Cache_Control=kept, Content_Security_Policy=policy)
        self.server.reports_sent += self.command == "GET"

    def _stream(self) -> None:
        """Send events, a second apart, until the browser leaves or the run ends."""
        self.close_connection = True
        server = self.server
        with server.watching() as admitted:
            if not admitted:
                self.answer(HTTPStatus.SERVICE_UNAVAILABLE, "Too many browsers show this run.\n")
                return
            self.begin(HTTPStatus.OK, {"Content-Type": "text/event-stream", "Connection": "close"})
            if self.command == "HEAD":
                return
            updates = Updates(server.run_dir)
            self.wfile.write(b"retry: 1000\n\n")
            last = False
            while not last:
                last = server.ending.is_set()  # read first: the last event has what was written before the end
                self.wfile.write(updates.event(last=last))
                self.wfile.flush()
                server.ending.wait(_EVERY_S)
