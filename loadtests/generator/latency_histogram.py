"""Latencies counted by bucket since the start: what a monitoring system reads, a few numbers for any run.

Boundaries are in seconds. Those of time to first token and of time per token are vLLM's, which continue OpenTelemetry's
for generative AI, with three finer ones for tokens; those of whole requests are OpenTelemetry's, each twice the one
before, continued to eleven minutes.
Percentiles of a verdict never come from here: they come from the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from analysis.arrays import Floats

BOUNDS_S: Final[dict[str, tuple[float, ...]]] = {
    "ttft": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(20.0, 40.0, 80.0, 160.0, 640.0),
    ),
    "tpot": (
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
        *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "e2e": tuple(0.01 * 2**power for power in range(17)),
}


class LatencyHistogram:
    """Latencies in buckets, each up to and with its boundary; the last has none."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = np.asarray(bounds_s, dtype=np.float64)
        self._counts = np.zeros(len(self._bounds_s) + 1, dtype=np.int64)
        self._sum_s = 0.0

    def add(self, latencies_s: Floats) -> None:
        """Latencies of shape (n,); a negative one counts as 0."""
        taken_s = np.maximum(latencies_s, 0.0)
        places = np.searchsorted(self._bounds_s, taken_s, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum_s += float(taken_s.sum())

    def summary(self) -> dict[str, Any]:
        """{"bounds_s", "counts" (one more, of each bucket alone), "sum_s"}."""
        return {
            "bounds_s": self._bounds_s.round(6).tolist(),
            "counts": self._counts.tolist(),
            "sum_s": round(self._sum_s, 6),
        }
