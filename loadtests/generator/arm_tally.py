"""Live counts and quantiles of one arm, from records as they are made."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from loadtests.generator.latency_histogram import BOUNDS_S, LatencyHistogram
from loadtests.generator.record import RequestRecord


class ArmTally:
    """Counts and histograms of one arm since the start, and exact quantiles of its newest answers (4,096 to 8,192)."""

    _NEWEST = 4096

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.inflight = 0
        self._scheduled_ns = array("q")
        self._first_ns = array("q")  # 0: no token came
        self._end_ns = array("q")
        self._tokens = array("q")
        self._counted = 0  # of these, those that are in the histograms
        self._histograms = {metric: LatencyHistogram(bounds_s) for metric, bounds_s in BOUNDS_S.items()}

    def add(self, record: RequestRecord) -> None:
        self.finished += 1
        if record.status != "OK":
            self.failed += 1
            return
        self._scheduled_ns.append(record.scheduled_ns)
        self._first_ns.append(record.first_token_ns or 0)
        ends = self._end_ns
        ends.append(record.end_ns)
        self._tokens.append(record.output_tokens or 0)
        if len(ends) > 2 * self._NEWEST:
            self._count()
            for values in (self._scheduled_ns, self._first_ns, ends, self._tokens):
                del values[: self._NEWEST]
            self._counted -= self._NEWEST

    def summary(self, since_ns: int) -> dict[str, Any]:
        """Counts, and quantiles of the answers that ended at `since_ns` or later (null when there are none)."""
        out: dict[str, Any] = {"n": self.finished, "failed": self.failed, "inflight": self.inflight}
        # Copies: an array whose buffer is shared cannot grow.
        scheduled, first, end = (np.array(values) for values in (self._scheduled_ns, self._first_ns, self._end_ns))
        recent = end >= since_ns
        answered = recent & (first > 0)
        for name, at, chosen in (("ttft", first, answered), ("e2e", end, recent)):
            taken_ms = (at[chosen] - scheduled[chosen]) / 1e6
            p50, p99 = np.percentile(taken_ms, (50, 99)) if len(taken_ms) else (None, None)
            out[f"{name}_p50_ms"] = None if p50 is None else round(float(p50), 3)
            out[f"{name}_p99_ms"] = None if p99 is None else round(float(p99), 3)
        return out

    def histograms(self) -> dict[str, dict[str, Any]]:
        """The answers since the start by latency, for each metric that they have."""
        self._count()
        return {metric: histogram.summary() for metric, histogram in self._histograms.items()}

    def _count(self) -> None:
        """Every answer is in the histograms."""
        columns = (self._scheduled_ns, self._first_ns, self._end_ns, self._tokens)
        scheduled, first, end, tokens = (np.array(values[self._counted :]) for values in columns)
        self._counted = len(self._end_ns)
        if not len(end):
            return
        answered, several = first > 0, (first > 0) & (tokens > 1)
        self._histograms["e2e"].add((end - scheduled) / 1e9)
        self._histograms["ttft"].add((first - scheduled)[answered] / 1e9)
        self._histograms["tpot"].add((end - first)[several] / (tokens[several] - 1) / 1e9)
