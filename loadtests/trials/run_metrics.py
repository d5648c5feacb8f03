"""The page of a run for Prometheus: its state, the load of this trial and how late it was, and the pages of its
processes.

All is what the status knows when it is asked for: a scrape costs the load nothing. Counters begin anew with each trial.
No label has more values than the experiment has arms, replicas and load processes.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tailgate.loadtests.generator.histogram import BOUNDS_S
from tailgate.loadtests.trials.status import Load, Status
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
    host, port = host_port(address, f'--metrics "{address}" is not HOST:PORT: give 127.0.0.1:9465', listens=True)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(status))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics {address} cannot be used ({reason}): give another, or 0 as the port") from None
    status.exported = True
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2.0)


_Samples = Iterable[tuple[Sequence[str], float]]  # with the values of the labels


class RunCollector(Collector):
    """The metrics of the run behind `status`."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics now."""
        for kind, name, text, labels, samples in (*_of_run(self._status), *_of_load(self._status.load)):
            family = kind(f"tailgate_{name}", text, labels=labels)
            for values, sample in samples:
                family.add_metric(values, sample)
            yield family
        accounts = self._status.load.accounts
        for metric, (name, text) in HISTOGRAMS.items():
            yield _histogram(name, text, [account.get("histograms", {}) for account in accounts.values()], metric)
        for key, (name, text) in _LAGS.items():
            lag = Metric(name, text, "summary")  # the type to which the label quantile belongs
            for worker, account in accounts.items():
                for quantile, label in _QUANTILES.items():
                    lag.add_sample(name, {"worker": worker, "quantile": label}, _at(account, key, quantile) / 1e3)
            yield lag
        yield from _pages(self._status.pages.values())


_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
_Family = tuple[_Kind, str, str, Sequence[str], _Samples]


def _of_run(status: Status) -> Iterator[_Family]:
    gauge, replicas = GaugeMetricFamily, list(status.replicas.items())
    yield gauge, "run_phase", "1 for the phase in which the run is.", ["phase"], [([status.phase], 1)]
    for name, text, value in (
        ("trial", "Number of the trial, from 1.", status.trial),
        ("trials", "Trials planned.", status.trials),
        ("planned_requests", "Requests planned in this trial; 0 where none are.", status.planned),
        ("traffic_seconds", "Since the traffic of this trial began.", status.load.t_s),
        ("planned_traffic_seconds", "How long the traffic is to last.", status.duration_s),
    ):
        yield gauge, f"run_{name}", text, (), [((), value)]
    ready = [([name], state.stage in ("ready", "serving")) for name, state in replicas]
    yield gauge, "run_replica_ready", "1 where a replica serves.", ["replica"], ready
    text = "Compile events since the replica's start; absent for a server that does not report them."
    compiles = [([name], state.compiles) for name, state in replicas if state.compiles is not None]
    yield CounterMetricFamily, "run_replica_compile_events", text, ["replica"], compiles


def _of_load(load: Load) -> Iterator[_Family]:
    gauge, counter, accounts = GaugeMetricFamily, CounterMetricFamily, load.accounts
    started = sum(_at(account, "started") for account in accounts.values())
    yield counter, "load_requests_started", "Requests started, each copy by itself.", (), [((), started)]
    ended = [([arm, "failed"], row.failed) for arm, row in load.arms.items()]
    ended += [([arm, "ok"], row.finished - row.failed) for arm, row in load.arms.items()]
    yield counter, "load_requests", "Requests ended, each copy by itself.", ["arm", "outcome"], ended
    inflight = [([arm], row.inflight) for arm, row in load.arms.items()]
    yield gauge, "load_in_flight", "Requests under way to a pinned arm.", ["arm"], inflight
    for kind, name, text, keys, scale in (
        (gauge, "records_waiting_bytes", "Records that wait for the disk.", ("records", "waiting_bytes"), 1.0),
        (counter, "cpu_seconds", "Processor time.", ("cpu_s",), 1.0),
        (counter, "busy_seconds", "Seconds in which a core was used up.", ("cpu", "busy_s"), 1.0),
        (counter, "gc_seconds", "Time in the garbage collector.", ("gc_ms",), 1e-3),
        (counter, "records_written", "Records written.", ("records", "written"), 1.0),
        (counter, "records_dropped", "Records lost.", ("records", "dropped"), 1.0),
    ):
        samples = [([worker], scale * _at(account, *keys)) for worker, account in accounts.items()]
        yield kind, f"load_{name}", text, ["worker"], samples


def _histogram(name: str, text: str, accounts: Sequence[Mapping[str, Any]], metric: str) -> Metric:
    """Return the answers of each arm by latency, those of all load processes together; "*" is no known arm."""
    family = HistogramMetricFamily(name, text, labels=["arm"])
    for arm in dict.fromkeys(arm for account in accounts for arm in account):
        rows = [account[arm][metric] for account in accounts if arm in account]
        edges = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        counts = map(sum, zip(*(row["counts"] for row in rows), strict=True))
        family.add_metric([arm], [*zip(edges, accumulate(counts), strict=True)], sum(row["sum_s"] for row in rows))
    return family


def _at(account: Mapping[str, Any], *keys: str) -> float:
    """Return the figure at `keys`; 0 in an account that lacks it, as those of production traffic do."""
    found: Any = account
    for key in keys:
        found = found.get(key) or {}
    return found or 0.0


def _pages(pages: Iterable[tuple[str, str]]) -> Iterable[Metric]:
    """Return what replicas and splitter show of themselves, without a process that does not answer."""
    families: dict[str, Metric] = {}
    for address, path in pages:
        with suppress(OSError, http.client.HTTPException, ValueError):
            _, text = Admin(address).fetch("GET", path, timeout_s=_PAGE_S)
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
    return families.values()
