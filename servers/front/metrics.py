"""What one arm replica counts, as Prometheus metrics."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, MemoryReading

M = TypeVar("M", Counter, Gauge)


class FrontMetrics:
    """Counters and gauges of the gRPC front, each labelled with arm and replica."""

    def __init__(self, arm: str, replica: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"arm": arm, "replica": replica}
        self.counts: collections.Counter[str] = collections.Counter()  # as `Report.counts`
        self.requests = cache(self._labelled(Counter, "requests", "Requests ended, by gRPC status.", "status"))
        self.tokens = self._labelled(Counter, "output_tokens", "Tokens generated.")()
        self.steps = self._labelled(
            Counter, "steps", "Engine steps, and whether one that should run compiled ran eagerly.", "kind", "fell_back"
        )
        self.compile_events = self._labelled(Counter, "compile_events", "Compile events.", "kind", "phase")
        self.compile_seconds = self._labelled(Counter, "compile_seconds", "Time in compile events.", "kind", "phase")
        self.memory_now = self._labelled(Gauge, "memory_now_bytes", "What the engine holds.", "what")
        self.in_flight = self._labelled(Gauge, "in_flight", "Requests queued or running.")()

    def _labelled(self, kind: type[M], name: str, text: str, *labels: str) -> Callable[..., M]:
        """Register a metric, and return the function that gives its child for values of `labels`, by name."""
        metric = kind(f"tailgate_{name}", text, [*self._labels, *labels], registry=self.registry)
        return partial(metric.labels, **self._labels)

    def count_compile(self, event: CompileEvent) -> None:
        self.compile_events(kind=event.kind, phase=event.phase).inc()
        self.compile_seconds(kind=event.kind, phase=event.phase).inc((event.end_ns - event.start_ns) / 1e9)

    def show_memory(self, reading: MemoryReading) -> None:
        for item, value in reading.ListFields():
            if item.name != "at_ns":
                self.memory_now(what=item.name.removesuffix("_bytes")).set(value)

    def count(self, status: str, number: int = 1) -> None:
        """Count requests that ended with `status`, or tokens where it is empty."""
        self.counts[status] += number
        (self.requests(status=status) if status else self.tokens).inc(number)

    def totals(self) -> dict[str, int]:
        """Return each count, whatever its labels."""
        totals = dict.fromkeys(("requests", "output_tokens", "steps", "compile_events"), 0)
        for sample in (sample for metric in self.registry.collect() for sample in metric.samples):
            name = sample.name.removeprefix("tailgate_").removesuffix("_total")
            if name in totals:
                totals[name] += int(sample.value)
        return totals
