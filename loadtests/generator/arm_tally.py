"""Live counts and latencies of one arm, from records as they are made."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from loadtests.generator.histogram import Counts, Histogram, quantile_ms
from loadtests.generator.record import RequestRecord

# Boundaries of the histograms that Prometheus reads, in seconds. Those of TTFT and TPOT are vLLM's, which continue
# OpenTelemetry's for generative AI, with three finer ones for TPOT; those of whole requests are OpenTelemetry's, each
# twice the one before, continued to eleven minutes.
BOUNDS_S: Final[dict[str, tuple[float, ...]]] = {
    "ttft": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(20.0, 40.0, 80.0, 160.0, 640.0),
    ),
    "tpot": (
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
        *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "e2e": tuple(round(0.01 * 2**power, 2) for power in range(17)),
}


class ArmTally:
    """Counts and latencies of one arm since the start, and quantiles of its newest answers."""

    RECENT_NS = 10_000_000_000

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.inflight = 0
        self._latencies = {metric: Histogram() for metric in BOUNDS_S}
        self._before: deque[tuple[int, dict[str, Counts]]] = deque()  # counts at the last calls of `summary`

    def add(self, record: RequestRecord) -> None:
        """Count one more answer."""
        self.finished += 1
        if record.status != "OK":
            self.failed += 1
            return
        self._latencies["e2e"].add(record.end_ns - record.scheduled_ns)
        if (first_ns := record.first_token_ns) is not None:
            self._latencies["ttft"].add(first_ns - record.scheduled_ns)
            if (tokens := record.output_tokens or 0) > 1:
                self._latencies["tpot"].add((record.end_ns - first_ns) // (tokens - 1))

    def summary(self, at_ns: int) -> dict[str, Any]:
        """Return counts, and quantiles (1 % wide) of what was added within the last 10 s; null without any.

        That is as exact as it is called often.
        """
        out: dict[str, Any] = {"n": self.finished, "failed": self.failed, "inflight": self.inflight}
        counts = {metric: self._latencies[metric].counts() for metric in ("ttft", "e2e")}
        self._before.append((at_ns, counts))
        while len(self._before) > 1 and self._before[1][0] <= at_ns - self.RECENT_NS:
            self._before.popleft()
        since_ns, before = self._before[0]
        for metric, until_now in counts.items():
            recent = until_now - before[metric] if since_ns <= at_ns - self.RECENT_NS else until_now
            for name, q in (("p50", 0.5), ("p99", 0.99)):
                ms = quantile_ms(recent, q)
                out[f"{metric}_{name}_ms"] = None if ms is None else round(ms, 3)
        return out

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return the answers since the start by latency, for each metric."""
        return {metric: self._latencies[metric].buckets(bounds_s) for metric, bounds_s in BOUNDS_S.items()}
