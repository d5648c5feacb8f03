"""One address at which Prometheus finds a run, its arms and its splitter, whose own ports are free ones on loopback.

`/metrics` is the run, `/metrics/<process>` the page of one of its processes as that process gives it, and `/targets`
the list of all of them for Prometheus' HTTP service discovery.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, unquote, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from loadtests.page.serving import Handler, Server
from loadtests.trials.progress import MetricsPage, Status
from loadtests.trials.run_metrics import RunCollector
from servers.address import host_port, joined
from servers.fields import ConfigError
from servers.splitter.admin import open_connection

METRICS, TARGETS, RUN = "/metrics", "/targets", "run"
_PAGE_S: Final = 5.0
_JSON = "application/json; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]  # status, content type, body


class _Server(Server):
    def __init__(self, status: Status, host: str, port: int) -> None:
        super().__init__(host, port, _Handler)
        self.status = status
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(RunCollector(status))


class Exporter:
    """While entered, the run behind `status` is shown at `host`:`port`. ConfigError where nothing can listen there."""

    def __init__(self, status: Status, host: str, port: int) -> None:
        try:
            self._server = _Server(status, host, port)
        except OSError as error:
            raise ConfigError(
                f"--metrics {joined(host, port)} cannot be used ({error.strerror or error}): give another address"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

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


class _Handler(Handler):
    server: _Server

    def get(self) -> None:
        status, kind, body = answer(self.server.status, self.server.registry, self.path, self.headers.get("Host", ""))
        self.answer(status, body, Content_Type=kind)
