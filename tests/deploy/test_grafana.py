"""deploy/grafana and deploy/prometheus: a real Prometheus scrapes a real run, and no panel is without data."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from loadtests.generator.load_log import LoadLog
from loadtests.trials.progress import Status
from loadtests.trials.run_metrics import RunCollector
from loadtests.trials.trial import ENVOY_METRICS
from servers.clock import now_ns
from servers.engine.messages import MemoryReading
from servers.front.metrics import FrontMetrics
from tests.fakes.patience import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "tailgate.json").read_text(encoding="utf-8"))
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
EVERY_S = 1

EXPERIMENT = """
name = "shown"
[model]
id = "random:tiny"
[engine]
slots = 4
threads = 1
max_prompt_tokens = 64
max_new_tokens = 16
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "padded"
preset = "compiled-padded"
[traffic]
duration_s = 20
rate = 6.0
block_s = 5
length_scale = 0.03
[bed]
reference_s = 0
[slo]
p99_ttft_ms = 2000
"""


def test_the_dashboard_names_its_panels_once_and_describes_them() -> None:
    titles = [panel["title"] for panel in PANELS]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len(set(places)) == len(PANELS) > 15
    assert len(titles) == len(PANELS)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)


def test_each_expression_reads_by_arm_where_it_can_and_holds_no_address() -> None:
    for _, expression in EXPRESSIONS:
        assert "instance" not in expression
        assert ("arm" in expression) == ("$arm" in expression), expression


def test_the_configuration_asks_a_run_at_the_address_that_the_help_names() -> None:
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    (found,) = job["http_sd_configs"]
    assert found["url"] == "http://127.0.0.1:9465/targets"
    assert ENVOY_METRICS.startswith("/stats/prometheus")


def page_of_a_run(folder: Path) -> CollectorRegistry:
    trial = folder / "trial-01"
    trial.mkdir()
    log = LoadLog(trial, worker=0, planned=1, arms=["eager"])
    log.start_ns = now_ns()
    log.write()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(Status(phase="traffic", run_dir=folder)))
    return registry


def page_of_an_arm(_: Path) -> CollectorRegistry:
    metrics = FrontMetrics("eager", "eager-0")
    metrics.show_memory(MemoryReading(at_ns=1, memory_bytes=1, peak_bytes=2, allocator_retries=3, out_of_memory=4))
    return metrics.registry


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH: install Debian's package prometheus")
@pytest.mark.parametrize("page", [page_of_a_run, page_of_an_arm])
def test_prometheus_own_linter_has_nothing_to_say_of_the_names(
    page: Callable[[Path], CollectorRegistry], tmp_path: Path
) -> None:
    text = generate_latest(page(tmp_path))
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_each_name_says_its_unit_and_what_only_rises_ends_in_total(tmp_path: Path) -> None:
    for metric in (*page_of_a_run(tmp_path).collect(), *page_of_an_arm(tmp_path).collect()):
        kinds = {"_bytes" in sample.labels.get("what", "") for sample in metric.samples}
        assert kinds <= {False}, f"{metric.name}: the unit belongs into the name"
        if "since" in metric.documentation.lower() and metric.type == "gauge":
            assert metric.name.endswith("_seconds"), f"{metric.name} rises: it is a counter"


# --- With a real Prometheus -------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A running Prometheus, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: Any) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())["data"]

    def ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def numbers(self, expression: str, start: float, end: float) -> list[float]:
        """Every number that the expression had from `start` to `end`."""
        data = self.get("/api/v1/query_range", query=expression, start=start, end=end, step=EVERY_S)
        values = [float(value) for series in data["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]


@contextmanager
def prometheus(folder: Path, metrics_port: int) -> Iterator[Prometheus]:
    """The Debian package's, with the configuration of deploy/prometheus at a faster pace."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = f"{EVERY_S}s"
    (found,) = config["scrape_configs"][0]["http_sd_configs"]
    found |= {"url": found["url"].replace(":9465", f":{metrics_port}"), "refresh_interval": f"{EVERY_S}s"}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(port)
        wait_for(lambda: server.ready() or process.poll() is not None)
        assert process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
        yield server
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


@pytest.mark.timeout(1200)
@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH: install Debian's package of that name")
def test_no_panel_is_without_data(tmp_path: Path) -> None:
    (tmp_path / "shown.toml").write_text(EXPERIMENT)
    subprocess.run(["promtool", "check", "config", str(CONFIG)], check=True, capture_output=True)
    port = free_port()
    command = [sys.executable, "-m", "loadtests.commands.main", "run", "shown.toml", "--out", "out"]
    began = time.time()
    with prometheus(tmp_path, port) as server:
        done = subprocess.run(
            [*command, "--metrics", f"127.0.0.1:{port}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=900,  # arms compile, and share the machine with other tests
            check=False,
        )
        ended = time.time()
        assert done.returncode in (0, 3, 99), done.stderr[-3000:]
        summary = json.loads(done.stdout.splitlines()[-1])
        empty = [
            f"{title}: {expression}"
            for title, expression in EXPRESSIONS
            if not server.numbers(filled(expression), began, ended)
        ]
        assert empty == []
        # What it shows is what was judged.
        (arms,) = [json.loads((tmp_path / summary["run_dir"] / "summary.json").read_text())["arms"]]
        seen = {
            arm: max(server.numbers(f'sum(tailgate_load_requests_total{{arm="{arm}"}})', began, ended))
            for arm in ("eager", "padded")
        }
        assert seen == {arm["name"]: arm["requests"] for arm in arms}
        labels = {series["process"] for series in server.get("/api/v1/series", **{"match[]": "up"})}
        assert labels == {"run", "splitter", "eager-0", "padded-0"}
        check_labels(server)


def filled(expression: str) -> str:
    """As Grafana asks it."""
    return expression.replace("$__rate_interval", f"{8 * EVERY_S}s").replace("$arm", ".*")


def check_labels(server: Prometheus) -> None:
    """No label of tailgate's own has more values than there are arms, replicas, processes, or kinds in the code."""
    for name in server.get("/api/v1/label/__name__/values"):
        if not name.startswith("tailgate_"):
            continue
        series = server.get("/api/v1/series", **{"match[]": name})
        values: dict[str, set[str]] = {}
        for item in series:
            for label, value in item.items():
                values.setdefault(label, set()).add(value)
        for label, known in values.items():
            assert len(known) <= (30 if label == "le" else 20), f"{name} {label}: {sorted(known)}"
        assert re.fullmatch(r"tailgate_[a-z0-9_]+", name)
