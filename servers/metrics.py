"""Prometheus metrics of one arm replica, served over HTTP when a port is given."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server


class FrontMetrics:
    """Counters and gauges of the gRPC front, each labelled with arm and replica."""

    def __init__(self, arm: str, replica: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"arm": arm, "replica": replica}
        self.requests = self._counter("tailgate_requests", "Requests ended, by gRPC status.", "status")
        self.tokens = self._counter("tailgate_output_tokens", "Tokens generated.")
        self.compile_events = self._counter("tailgate_compile_events", "Compile events.", "kind", "phase")
        self.in_flight: Gauge = Gauge(
            "tailgate_in_flight", "Requests queued or running.", ["arm", "replica"], registry=self.registry
        ).labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> LabelledCounter:
        counter = Counter(name, text, ["arm", "replica", *labels], registry=self.registry)
        return LabelledCounter(counter, self._labels)

    def serve(self, host: str, port: int) -> None:
        """Answer `GET /metrics` on host:port from a thread of its own."""
        start_http_server(port, addr=host, registry=self.registry)


class LabelledCounter:
    """A counter whose arm and replica are already filled in."""

    def __init__(self, counter: Counter, fixed: dict[str, str]) -> None:
        self._counter = counter
        self._fixed = fixed

    def labels(self, **labels: str) -> Counter:
        """The child counter for `labels`."""
        return self._counter.labels(**self._fixed, **labels)

    def inc(self, amount: float = 1) -> None:
        """Add to the counter that has no further labels."""
        self._counter.labels(**self._fixed).inc(amount)
