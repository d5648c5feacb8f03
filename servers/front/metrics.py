"""Prometheus metrics of one arm replica, served over HTTP when a port is given."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from servers.compiler.events import CompileEvent, CompilerFacts
from servers.engine.messages import Ready


class FrontMetrics:
    """Counters and gauges of the gRPC front, each labelled with arm and replica."""

    def __init__(self, arm: str, replica: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"arm": arm, "replica": replica}
        self.requests = self._counter("tailgate_requests", "Requests ended, by gRPC status.", "status")
        self.tokens = self._counter("tailgate_output_tokens", "Tokens generated.")
        self.steps = self._counter(
            "tailgate_steps", "Engine steps, and whether one that should run compiled ran eagerly.", "kind", "fell_back"
        )
        self.compile_events = self._counter("tailgate_compile_events", "Compile events.", "kind", "phase")
        self.compile_seconds = self._counter("tailgate_compile_seconds", "Time in compile events.", "kind", "phase")
        self.graph_breaks = self._counter("tailgate_graph_breaks", "Graph breaks, by place and cause.", "cause")
        self.cudagraph_skips = self._counter(
            "tailgate_cudagraph_skips", "Graphs that were to be CUDA graphs and are not, by cause.", "cause"
        )
        self.startup_seconds = self._gauge("tailgate_startup_seconds", "Time to serving, by part.", "part")
        self.memory_bytes = self._gauge("tailgate_memory_bytes", "Memory once warm, by owner.", "owner")
        self.in_flight: Gauge = Gauge(
            "tailgate_in_flight", "Requests queued or running.", ["arm", "replica"], registry=self.registry
        ).labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> LabelledCounter:
        counter = Counter(name, text, ["arm", "replica", *labels], registry=self.registry)
        return LabelledCounter(counter, self._labels)

    def _gauge(self, name: str, text: str, label: str) -> Gauge:
        return Gauge(name, text, ["arm", "replica", label], registry=self.registry)

    def count_compile(self, event: CompileEvent) -> None:
        """Add the event and its time."""
        labels = {"kind": event.kind, "phase": event.phase}
        self.compile_events.labels(**labels).inc()
        self.compile_seconds.labels(**labels).inc((event.end_ns - event.start_ns) / 1e9)

    def count_facts(self, now: CompilerFacts, before: CompilerFacts) -> None:
        """Add what `now` counts more than `before`."""
        for counter, counts, known in (
            (self.graph_breaks, now.graph_breaks, before.graph_breaks),
            (self.cudagraph_skips, now.cudagraph_skips, before.cudagraph_skips),
        ):
            for cause, count in counts.items():
                counter.labels(cause=cause).inc(count - known.get(cause, 0))

    def show_start(self, ready: Ready) -> None:
        """Show what the start took and what it left in memory."""
        for part, spent_ns in ready.startup_groups_ns.items():
            self.startup_seconds.labels(**self._labels, part=part).set(spent_ns / 1e9)
        for owner, size in ready.memory_bytes.items():
            self.memory_bytes.labels(**self._labels, owner=owner).set(size)

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
