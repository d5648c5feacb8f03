"""Prometheus metrics of one arm replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from servers.compiler.events import CompileEvent, CompilerFacts
from servers.engine.messages import MemoryReading, Ready, startup_groups

M = TypeVar("M", Counter, Gauge)

# Of graph breaks and skips, by place and text: a label must have a bound.
MOST_CAUSES = 50
OTHER_CAUSES = "others"


class FrontMetrics:
    """Counters and gauges of the gRPC front, each labelled with arm and replica."""

    def __init__(self, arm: str, replica: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"arm": arm, "replica": replica}
        self.requests = self._labelled(Counter, "requests", "Requests ended, by gRPC status.", "status")
        self.tokens = self._labelled(Counter, "output_tokens", "Tokens generated.")()
        self.steps = self._labelled(
            Counter, "steps", "Engine steps, and whether one that should run compiled ran eagerly.", "kind", "fell_back"
        )
        self.compile_events = self._labelled(Counter, "compile_events", "Compile events.", "kind", "phase")
        self.compile_seconds = self._labelled(Counter, "compile_seconds", "Time in compile events.", "kind", "phase")
        self.graph_breaks = self._labelled(Counter, "graph_breaks", "Graph breaks, by place and cause.", "cause")
        self.cudagraph_skips = self._labelled(
            Counter, "cudagraph_skips", "Graphs that were to be CUDA graphs and are not, by cause.", "cause"
        )
        self.startup_seconds = self._labelled(Gauge, "startup_seconds", "Time to serving, by part.", "part")
        self.memory_bytes = self._labelled(Gauge, "memory_bytes", "Memory once warm, by owner.", "owner")
        self.memory_now = self._labelled(Gauge, "memory_now_bytes", "What the engine holds.", "what")
        self.failed_allocations = self._labelled(
            Counter, "failed_allocations", "Allocations that did not succeed at first, or at all.", "what"
        )
        self._failed: dict[str, int] = {}
        self.in_flight = self._labelled(Gauge, "in_flight", "Requests queued or running.")()

    def _labelled(self, kind: type[M], name: str, text: str, *labels: str) -> Callable[..., M]:
        """What gives the metric for values of `labels`, by name."""
        metric = kind(f"tailgate_{name}", text, [*self._labels, *labels], registry=self.registry)
        return partial(metric.labels, **self._labels)

    def count_compile(self, event: CompileEvent) -> None:
        """Add the event and its time."""
        self.compile_events(kind=event.kind, phase=event.phase).inc()
        self.compile_seconds(kind=event.kind, phase=event.phase).inc((event.end_ns - event.start_ns) / 1e9)

    def count_facts(self, now: CompilerFacts, before: CompilerFacts) -> None:
        """Add what `now` counts more than `before`."""
        for counter, counts, known in (
            (self.graph_breaks, now.graph_breaks, before.graph_breaks),
            (self.cudagraph_skips, now.cudagraph_skips, before.cudagraph_skips),
        ):
            named = dict.fromkeys(list(counts)[:MOST_CAUSES])  # they are reported in the order in which they came up
            for cause, count in counts.items():
                counter(cause=cause if cause in named else OTHER_CAUSES).inc(count - known.get(cause, 0))

    def show_memory(self, reading: MemoryReading) -> None:
        """Show what the engine holds now, and add what failed since the last reading."""
        for item in fields(reading):
            name, value = item.name, getattr(reading, item.name)
            if name == "at_ns" or value is None:
                continue
            if name.endswith("_bytes"):
                self.memory_now(what=name.removesuffix("_bytes")).set(value)
            else:
                self.failed_allocations(what=name).inc(max(0, value - self._failed.get(name, 0)))
                self._failed[name] = value

    def show_start(self, ready: Ready) -> None:
        """Show what the start took and what it left in memory."""
        for part, spent_ns in startup_groups(ready.startup_ns).items():
            self.startup_seconds(part=part).set(spent_ns / 1e9)
        for owner, size in ready.memory_bytes.items():
            self.memory_bytes(owner=owner).set(size)
