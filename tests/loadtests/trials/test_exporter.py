"""One address for Prometheus: the run, each of its processes, and where they are."""

from __future__ import annotations

import http.client
import json

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server

from loadtests.trials.exporter import Exporter, exporting
from loadtests.trials.progress import MetricsPage, Status
from servers.fields import ConfigError


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """(status, content type, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.getheader("Content-Type", ""), response.read().decode()


def page(name: str) -> MetricsPage:
    registry = CollectorRegistry()
    Counter(name, "Counts.", registry=registry).inc()
    server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
    return MetricsPage(address=f"127.0.0.1:{server.server_port}", path="/metrics", arm="eager")


def test_targets_are_this_address_with_a_page_for_each_process() -> None:
    status = Status(pages={"eager-0": page("steps"), "odd name/1": page("others")})
    with Exporter(status, "127.0.0.1", 0) as exporter:
        code, kind, body = get(exporter.port, "/targets")
        assert (code, kind.split(";")[0]) == (200, "application/json")
        rows = json.loads(body)
        assert {row["targets"][0] for row in rows} == {f"127.0.0.1:{exporter.port}"}
        paths = {row["labels"]["process"]: row["labels"]["__metrics_path__"] for row in rows}
        assert paths["run"] == "/metrics"
        assert "tailgate_run_phase" in get(exporter.port, paths["run"])[2]
        assert "steps_total 1.0" in get(exporter.port, paths["eager-0"])[2]
        assert "others_total 1.0" in get(exporter.port, paths["odd name/1"])[2]
        status.pages = {}
        assert len(json.loads(get(exporter.port, "/targets")[2])) == 1
        assert get(exporter.port, paths["eager-0"])[0] == 404


def test_a_process_that_is_gone_is_down_and_the_run_is_not() -> None:
    with Exporter(Status(), "127.0.0.1", 0) as other:
        gone = other.port
    status = Status(pages={"eager-0": MetricsPage(address=f"127.0.0.1:{gone}", path="/metrics")})
    with Exporter(status, "127.0.0.1", 0) as exporter:
        assert get(exporter.port, "/metrics/eager-0")[0] == 502
        assert get(exporter.port, "/metrics")[0] == 200
        assert get(exporter.port, "/")[0] == 404
        assert get(exporter.port, "/metrics/../etc/passwd")[0] == 404
        assert get(exporter.port, "/metrics", method="POST")[0] == 501


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with Exporter(Status(), "127.0.0.1", 0) as exporter:
        with pytest.raises(ConfigError, match=r"--metrics 127\.0\.0\.1:\d+ cannot be used \(.*: give another"):
            Exporter(Status(), "127.0.0.1", exporter.port)
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            exporting(Status(), "9465")
    with exporting(Status(), ""):
        pass
