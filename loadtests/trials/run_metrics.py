"""The page of a run for Prometheus: its state, what the load did and how late it was, and the pages of its processes.

Everything is read when it is asked for, from the status and from the small files that the load processes rewrite each
second: a scrape costs the load nothing. Counters count over all trials of the run. No label has more values than the
experiment has arms, replicas and load processes.
"""

from __future__ import annotations

import http.client
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tailgate.analysis.records.plain_values import mapping, number
from tailgate.loadtests.trials.status import MetricsPage, Status, read_accounts
from tailgate.servers.address import host_port
from tailgate.servers.complaint import ConfigError
from tailgate.servers.splitter.admin import Admin

HISTOGRAMS: Final = {
    "ttft": ("tailgate_load_time_to_first_token_seconds", "From the scheduled start to the first token."),
    "tpot": ("tailgate_load_time_per_output_token_seconds", "Mean time between a request's tokens."),
    "e2e": ("tailgate_load_e2e_request_latency_seconds", "From the scheduled start to the end."),
}
_LAGS: Final = {
    "lag_ms": ("tailgate_load_schedule_lag_seconds", "How late requests were started in this trial."),
    "loop_lag_ms": ("tailgate_load_loop_lag_seconds", "How late a waiting greenlet ran in this trial."),
}
_QUANTILES: Final = {"p50": "0.5", "p99": "0.99", "max": "1"}
_PAGE_S: Final = 2.0


@contextmanager
def exporting(status: Status, address: str) -> Iterator[int]:
    """Show the run behind `status` at `address`, "host:port", and yield the port. Raises ConfigError where nothing can
    listen there."""
    host, port = host_port(address, f'--metrics "{address}" is not HOST:PORT: give 127.0.0.1:9465', lowest=0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(status))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics {address} cannot be used ({reason}): give another address") from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2.0)


class RunCollector(Collector):
    """The metrics of the run behind `status`."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics now."""
        yield from _standing(self._status)
        run_dir = self._status.run_dir
        trials = [] if run_dir is None else [read_accounts(folder) for folder in sorted(run_dir.glob("trial-*"))]
        yield from _load(trials)
        yield from _load_processes(trials)
        yield from _pages(self._status.pages.values())


_Accounts = Mapping[str, Mapping[str, Any]]  # of the load processes of one trial, by their numbers
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def _filled(family: _Family, values: Mapping[tuple[str, ...], float]) -> _Family:
    """Return the family with a sample for each of `values`, by its labels."""
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family


def _standing(status: Status) -> Iterator[Metric]:
    phase = GaugeMetricFamily("tailgate_run_phase", "1 for the phase in which the run is.", labels=["phase"])
    yield _filled(phase, {(status.phase,): 1.0})
    for name, text, value in (
        ("trial", "Number of the trial, from 1.", status.trial),
        ("trials", "Trials planned.", status.trials),
        ("planned_requests", "Requests planned in this trial; 0 where none are.", status.planned),
        ("traffic_seconds", "Since the traffic of this trial began.", status.load.t_s),
        ("planned_traffic_seconds", "How long the traffic is to last.", status.duration_s),
    ):
        yield GaugeMetricFamily(f"tailgate_run_{name}", text, value=value)
    states, labels = list(status.replicas.items()), ["replica"]
    ready = GaugeMetricFamily("tailgate_run_replica_ready", "1 where a replica serves.", labels=labels)
    yield _filled(ready, {(name,): float(state.stage in ("ready", "serving")) for name, state in states})
    name, text = "tailgate_run_replica_compile_events", "Compile events since the replica's start."
    yield _filled(CounterMetricFamily(name, text, labels=labels), {(name,): state.compiles for name, state in states})


def _load(trials: Sequence[_Accounts]) -> Iterator[Metric]:
    """Yield how the requests ended, by arm."""
    reports = [report for trial in trials for report in trial.values()]
    started = sum(number(report.get("started")) or 0.0 for report in reports)
    yield CounterMetricFamily("tailgate_load_requests_started", "Requests started, each copy by itself.", value=started)
    ended: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for arm, row in _rows(reports, "arms"):
        failed = number(row.get("failed")) or 0.0
        ended[arm, "failed"] += failed
        ended[arm, "ok"] += (number(row.get("n")) or 0.0) - failed
    yield _filled(
        CounterMetricFamily(
            "tailgate_load_requests", "Requests ended, each copy by itself.", labels=["arm", "outcome"]
        ),
        ended,
    )
    under_way: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for arm, row in _rows(trials[-1].values() if trials else (), "arms"):
        under_way[arm,] += number(row.get("inflight")) or 0.0
    in_flight = GaugeMetricFamily("tailgate_load_in_flight", "Requests under way to a pinned arm.", labels=["arm"])
    yield _filled(in_flight, under_way)
    for metric, (name, text) in HISTOGRAMS.items():
        yield _histogram(name, text, reports, metric)


def _rows(reports: Iterable[Mapping[str, Any]], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each arm's part of each report; requests whose arm is not known are those of arm "*"."""
    for report in reports:
        for arm, row in mapping(report.get(key)).items():
            yield str(arm), mapping(row)


def _histogram(name: str, text: str, reports: Iterable[Mapping[str, Any]], metric: str) -> HistogramMetricFamily:
    """Add up the histograms of all reports for each arm. Of boundaries that differ those of the first count."""
    family = HistogramMetricFamily(name, text, labels=["arm"])
    counts: dict[str, list[int]] = {}
    bounds: dict[str, list[float]] = {}
    sums: defaultdict[str, float] = defaultdict(float)
    for arm, row in _rows(reports, "histograms"):
        own = mapping(row.get(metric))
        if not own or list(own["bounds_s"]) != bounds.setdefault(arm, list(own["bounds_s"])):
            continue
        known = counts.setdefault(arm, [0] * len(own["counts"]))
        counts[arm] = [one + other for one, other in zip(known, own["counts"], strict=True)]
        sums[arm] += own["sum_s"]
    for arm in sorted(counts):
        edges = [*(f"{bound:g}" for bound in bounds[arm]), "+Inf"]
        family.add_metric([arm], [*zip(edges, accumulate(counts[arm]), strict=True)], sums[arm])
    return family


def _load_processes(trials: Sequence[_Accounts]) -> Iterator[Metric]:
    """Yield how the load processes themselves did, by their number."""
    newest = trials[-1] if trials else {}
    for key, (name, text) in _LAGS.items():
        family = Metric(name, text, "summary")  # the type to which the label quantile belongs
        for worker, account in newest.items():
            for quantile, label in _QUANTILES.items():
                lag_s = _at(account, (key, quantile)) / 1e3
                family.add_sample(name, {"worker": worker, "quantile": label}, lag_s)
        yield family
    waiting = GaugeMetricFamily(
        "tailgate_load_records_waiting_bytes", "Records that wait for the disk.", labels=["worker"]
    )
    yield _filled(waiting, {(worker,): _at(row, ("records", "waiting_bytes")) for worker, row in newest.items()})
    for name, text, path, scale in (
        ("cpu_seconds", "Processor time.", ("cpu_s",), 1.0),
        ("busy_seconds", "Seconds in which a core was used up.", ("cpu", "busy_s"), 1.0),
        ("gc_seconds", "Time in the garbage collector.", ("gc_ms",), 1e-3),
        ("records_written", "Records written.", ("records", "written"), 1.0),
        ("records_dropped", "Records lost.", ("records", "dropped"), 1.0),
    ):
        totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for worker, account in (item for trial in trials for item in trial.items()):
            totals[worker,] += scale * _at(account, path)
        yield _filled(CounterMetricFamily(f"tailgate_load_{name}", text, labels=["worker"]), totals)


def _at(account: Mapping[str, Any], path: Sequence[str]) -> float:
    *keys, last = path
    for key in keys:
        account = mapping(account.get(key))
    return number(account.get(last)) or 0.0


def _pages(pages: Iterable[MetricsPage]) -> Iterable[Metric]:
    """Return what replicas and splitter show of themselves, without a process that does not answer."""
    families: dict[str, Metric] = {}
    for page in pages:
        with suppress(OSError, http.client.HTTPException, ValueError):
            _, text = Admin(page.address).fetch("GET", page.path, timeout_s=_PAGE_S)
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
    return families.values()
