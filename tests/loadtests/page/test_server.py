from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tailgate.loadtests.page.server import PageServer
from tailgate.loadtests.page.serving import Handler, Server
from tests.fakes.live_runs import WatchedRun
from tests.loadtests.page.conftest import Serve

TOKEN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    return WatchedRun(folder=tmp_path / "run")


@contextmanager
def asked(server: PageServer, path: str, method: str = "GET", **headers: str) -> Iterator[HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        yield connection.getresponse()
    finally:
        connection.close()


def status_of(server: PageServer, path: str, method: str = "GET", **headers: str) -> int:
    with asked(server, path, method, **headers) as answer:
        return answer.status


def test_only_what_is_there_is_served(run: WatchedRun, serve: Serve) -> None:
    server = serve(run.folder)
    assert status_of(server, "/report.html") == 404
    for path in ("/status.json", "/../experiment.toml", "//etc/passwd", "/%2e%2e/x", "/report.html/"):
        assert status_of(server, path) == 404, path
    assert (status_of(server, "/", "POST"), status_of(server, "/", "PUT")) == (501, 501)
    run.end()
    with asked(server, "/report.html") as answer:
        assert b"The report" in answer.read()
        assert answer.headers["Cache-Control"] == "private, max-age=3600"


def test_neither_another_site_nor_a_name_bound_anew_to_this_machine_reads_the_page(
    run: WatchedRun, serve: Serve
) -> None:
    server = serve(run.folder)
    for host in ("evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "localhost.evil"):
        assert status_of(server, "/events", Host=host) == 403, host
    for host in (f"LOCALHOST:{server.port}", "[::1]:9999"):  # also through a tunnel
        assert status_of(server, "/", Host=host) == 200, host
    with Server("127.0.0.1", 0, Handler, token=TOKEN) as with_token:
        assert with_token.knows_host("bench-host:80")
    assert status_of(server, "/events", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors") == 403
    assert status_of(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate") == 200


def test_events_are_a_stream_that_ends_with_the_run(run: WatchedRun, serve: Serve) -> None:
    server = serve(run.folder)
    run.minutes(1)
    with asked(server, "/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.readline() == b"retry: 1000\n"
        assert answer.readline() == b"\n"
        first = json.loads(answer.readline()[6:])
        assert first["now"]["load"]["finished"] == 720
        run.end()
        finishing = threading.Thread(target=server.finish, args=(20.0,))
        finishing.start()
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
        assert events[-1]["last"]
        assert [one["now"] for one in events if "now" in one][-1]["ended"]["verdict"] == "FAIL"
        assert finishing.is_alive()  # until every viewer has the report
        assert status_of(server, "/report.html") == 200
        finishing.join(20)
        assert not finishing.is_alive()


def test_without_a_browser_the_end_is_at_once(run: WatchedRun, serve: Serve) -> None:
    # The time limit of a test is far below the wait for a browser.
    serve(run.folder).finish(60.0)


def test_a_browser_that_stops_reading_is_let_go(run: WatchedRun, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailgate.loadtests.page.server._Handler.timeout", 0.2)
    monkeypatch.setattr("tailgate.loadtests.page.server._EVERY_S", 0.01)
    server = serve(run.folder)
    run.notes = ["x" * 2000] * 60
    with socket.create_connection(("127.0.0.1", server.port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 60
        while not server.browsers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server.browsers:
            run.notes = [f"{time.monotonic()} {'x' * 1900}"] * 60
            run.status()
            assert time.monotonic() < deadline
        assert status_of(server, "/") == 200


def test_the_page_runs_its_own_script_alone_and_is_not_framed(run: WatchedRun, serve: Serve) -> None:
    with asked(serve(run.folder), "/") as answer:
        text = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    for kind in ("script", "style"):
        (source,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_more_connections_than_the_limit_are_closed(
    run: WatchedRun, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailgate.loadtests.page.serving._MOST_CONNECTIONS", 4)
    server = serve(run.folder)
    with ExitStack() as crowd:
        for _ in range(4):
            silent = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            silent.sendall(b"GET /")
        late = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        assert late.recv(1) == b""
