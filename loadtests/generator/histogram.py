"""Durations as a histogram that stays small however long a load process runs.

Verdicts never read it: records are exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

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
        """Count one more."""
        self._new.append(duration_ns)
        if len(self._new) >= _AT_ONCE:
            self.counts()

    def counts(self) -> Counts:
        """Return the counts by bin until now."""
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
        """Return {"p50", "p99", "max"} in ms."""
        quantiles = {"p50": self.quantile_ms(0.50), "p99": self.quantile_ms(0.99), "max": self.max_ms}
        return {key: round(value, 4) for key, value in quantiles.items()}

    def buckets(self, bounds_s: Sequence[float]) -> dict[str, Any]:
        """Return {"bounds_s", "counts" (one more, of each bucket alone), "sum_s"} for a monitoring system.

        A duration within 1 % of a boundary may count as above or below it.
        """
        below = np.cumsum(self.counts())
        edges = _bins_of(np.asarray(bounds_s, dtype=np.float64) * 1e9)
        counts = np.diff(below[edges], prepend=0, append=below[-1])
        return {"bounds_s": list(bounds_s), "counts": counts.tolist(), "sum_s": round(self._sum_ns / 1e9, 6)}


def quantile_ms(counts: Counts, q: float) -> float | None:
    """Return the upper edge (ms) of the bin up to which a share `q` is counted; None when there is none."""
    below = np.cumsum(counts)
    if not below[-1]:
        return None
    return math.exp(int(np.searchsorted(below, max(1, math.ceil(q * int(below[-1]))))) / _BINS_PER_E) / 1e3


def _bins_of(durations_ns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    bins = (np.log(np.maximum(durations_ns / 1e3, 1e-3)) * _BINS_PER_E).astype(np.int64) + 1
    return np.where(durations_ns <= 1000, 0, np.minimum(bins, _BINS - 1))
