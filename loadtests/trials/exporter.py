"""One address at which Prometheus finds a run, its arms and its splitter, whose own ports are free ones on loopback.

`/metrics` is the run, `/metrics/<process>` the page of one of its processes as that process gives it, and `/targets`
the list of all of them for Prometheus' HTTP service discovery.
"""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from loadtests.trials.progress import MetricsPage, Status
from loadtests.trials.run_metrics import RunCollector
from servers.address import host_port, joined
from servers.fields import ConfigError
from servers.splitter.admin import open_connection

METRICS, TARGETS, RUN = "/metrics", "/targets", "run"
_PAGE_S: Final = 5.0
_CLIENT_S: Final = 10.0
_JSON = "application/json; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]  # status, content type, body


class Exporter:
    """While entered, the run behind `status` is shown at `host`:`port`. ConfigError where nothing can listen there."""

    def __init__(self, status: Status, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(status))
        try:
            server = _Server6 if ":" in host else _Server
            self._server = server((host, port), partial(_Handler, partial(answer, status, registry)))
        except OSError as error:
            raise ConfigError(
                f"--metrics {joined(host, port)} cannot be used ({error.strerror or error}): give another address"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)


def exporting(status: Status, address: str) -> AbstractContextManager[object]:
    """The run behind `status` is shown at `address`, "host:port"; nowhere where that is empty."""
    if not address:
        return nullcontext()
    return Exporter(status, *host_port(address, f'--metrics "{address}" is not HOST:PORT: give 127.0.0.1:9465'))


def answer(status: Status, registry: CollectorRegistry, path: str, host: str) -> Answer:
    """What is said at `path` to a client that knows this address as `host`."""
    place = urlsplit(path).path
    pages = status.pages
    if place == METRICS:
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)
    if place == TARGETS:
        return HTTPStatus.OK, _JSON, json.dumps(_targets(pages.keys(), host), indent=1).encode()
    page = pages.get(unquote(place.removeprefix(f"{METRICS}/")))
    if page is None:
        return HTTPStatus.NOT_FOUND, "text/plain", f"there is {METRICS}, {METRICS}/<process> and {TARGETS}\n".encode()
    try:
        return _fetched(page)
    except (OSError, http.client.HTTPException) as error:
        return HTTPStatus.BAD_GATEWAY, "text/plain", f"its page does not answer ({error})\n".encode()


def _targets(processes: Iterable[str], host: str) -> list[dict[str, Any]]:
    """Every page, each with the name of its process, so that no two are taken for one."""
    paths = {RUN: METRICS, **{name: f"{METRICS}/{quote(name, safe='')}" for name in processes}}
    return [{"targets": [host], "labels": {"process": name, "__metrics_path__": path}} for name, path in paths.items()]


def _fetched(page: MetricsPage) -> Answer:
    connection = open_connection(page.address, timeout_s=_PAGE_S)
    try:
        connection.request("GET", page.path)
        response = connection.getresponse()
        body = response.read()
        return HTTPStatus(response.status), response.getheader("Content-Type", CONTENT_TYPE_LATEST), body
    finally:
        connection.close()


class _Server(socketserver.ThreadingTCPServer):  # http.server's own asks the name server for its name
    allow_reuse_address = True
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """GET alone."""

    timeout = _CLIENT_S

    def __init__(self, answer: Callable[[str, str], Answer], *args: Any) -> None:
        self._answer = answer
        super().__init__(*args)

    def do_GET(self) -> None:
        status, kind, body = self._answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the run."""
