"""Live counts and latencies, as histograms that stay small however long a load process runs.

Verdicts never read them: records are exact.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tailgate.analysis.arrays import Ints
from tailgate.loadtests.generator.record import RequestRecord

_BINS = 2400  # 1 us * 1.01^2400 is about 6 hours
_BINS_PER_E = 100.5  # 1 / log(1.01)
_AT_ONCE = 4096  # logarithms of many at once cost a tenth of one by one


class Histogram:
    """Count durations in bins 1 % wide from a microsecond up. A negative one counts as 0."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, dtype=np.int64)
        self._new = array("q")
        self._max_ns = self._sum_ns = 0

    def add(self, duration_ns: int) -> None:
        self._new.append(duration_ns)
        if len(self._new) >= _AT_ONCE:
            self.counts()

    def counts(self) -> Ints:
        if self._new:
            durations, self._new = np.maximum(np.frombuffer(self._new, dtype=np.int64), 0), array("q")
            self._max_ns = max(self._max_ns, int(durations.max()))
            self._sum_ns += int(durations.sum())
            self._counts = self._counts + np.bincount(_bins_of(durations), minlength=_BINS)
        return self._counts

    @property
    def max_ms(self) -> float:
        """The largest (ms); 0.0 when there is none."""
        self.counts()
        return self._max_ns / 1e6

    def quantile_ms(self, q: float) -> float:
        """Return the duration (ms) that a share `q` does not exceed, at most 1 % too high; 0.0 when there is none."""
        return min(self.max_ms, quantile_ms(self.counts(), q) or 0.0)

    def summary(self) -> dict[str, float]:
        quantiles = {"p50": self.quantile_ms(0.50), "p99": self.quantile_ms(0.99), "max": self.max_ms}
        return {key: round(value, 4) for key, value in quantiles.items()}

    def buckets(self) -> dict[str, Any]:
        """Return {"counts", "sum_s"} for a monitoring system: of each bucket of `BOUNDS_S` alone, and of what is above.

        A duration within 1 % of a boundary may count as above or below it.
        """
        below = np.cumsum(self.counts())
        counts = np.diff(below[_EDGES], prepend=0, append=below[-1])
        return {"counts": counts.tolist(), "sum_s": round(self._sum_ns / 1e9, 6)}


def quantile_ms(counts: Ints, q: float) -> float | None:
    """Return the upper edge (ms) of the bin up to which a share `q` is counted; None when there is none."""
    below = np.cumsum(counts)
    if not below[-1]:
        return None
    return math.exp(int(np.searchsorted(below, max(1, math.ceil(q * int(below[-1]))))) / _BINS_PER_E) / 1e3


def _bins_of(durations_ns: npt.NDArray[Any]) -> Ints:
    bins = (np.log(np.maximum(durations_ns / 1e3, 1e-3)) * _BINS_PER_E).astype(np.int64) + 1
    return np.where(durations_ns <= 1000, 0, np.minimum(bins, _BINS - 1))


# Upper ends of the buckets that Prometheus reads, in seconds: five a decade, from 1 ms to a quarter of an hour.
BOUNDS_S: Final = tuple(float(f"{10 ** (step / 5 - 3):.2g}") for step in range(31))
_EDGES: Final = _bins_of(np.array(BOUNDS_S) * 1e9)


# --- Arms -------------------------------------------------------------------------------------------------------------


class ArmTally:
    """Counts and latencies of one arm since the start, and quantiles of its newest answers."""

    RECENT_NS = 10_000_000_000

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.inflight = 0
        self._latencies = {metric: Histogram() for metric in ("ttft", "tpot", "e2e")}
        self._before: deque[tuple[int, dict[str, Ints]]] = deque()  # counts at the last calls of `summary`

    def add(self, record: RequestRecord) -> None:
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
        """Return counts, and quantiles (1 % wide) of what was added within the last 10 s; None without any.

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
        return {metric: histogram.buckets() for metric, histogram in self._latencies.items()}
