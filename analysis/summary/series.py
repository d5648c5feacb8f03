"""Latency over time: each arm's quantiles in bins of a second or more, by when requests were due."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.run.run import Run
from analysis.run.trials import SECOND
from analysis.statistics.quantiles import grouped_quantiles

MOST_BINS = 1200


def latency_series(run: Run) -> dict[str, Any]:
    """The bins of every arm and trial that hold requests, in order of time; `bin_s` is their width."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / MOST_BINS)))
    requests = run.requests
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm in run.arms:
        points: list[dict[str, Any]] = []
        for trial in run.trials:
            own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
            at = (requests.start_ns[own] - trial.start_ns) // int(bin_s * SECOND)
            numbers, bins, counts = np.unique(at, return_inverse=True, return_counts=True)
            failed = np.bincount(bins[requests.failed[own]], minlength=len(numbers))
            ttft = grouped_quantiles(requests.ttft_ms[own], bins, len(numbers), (0.5, 0.99))
            e2e = grouped_quantiles(requests.e2e_ms[own], bins, len(numbers), (0.5, 0.99, 1.0))
            points += [
                {
                    "trial": trial.number,
                    "t_s": int(number) * bin_s,
                    "n": int(counts[place]),
                    "ttft_p50_ms": float(ttft[place, 0]),
                    "ttft_p99_ms": float(ttft[place, 1]),
                    "e2e_p50_ms": float(e2e[place, 0]),
                    "e2e_p99_ms": float(e2e[place, 1]),
                    "e2e_max_ms": float(e2e[place, 2]),
                    "failed": int(failed[place]),
                }
                for place, number in enumerate(numbers.tolist())
            ]
        arms[arm] = points
    return {"bin_s": bin_s, "arms": arms}


def binned(values: Floats, place: Ints, bins: int, *, of: np.ufunc | None = None) -> list[float | None]:
    """The mean of the values in each bin, or their least or largest by `of`; None where none is known."""
    known = np.isfinite(values)
    if of is not None:
        out = np.full(bins, math.inf if of is np.minimum else -math.inf)
        of.at(out, place[known], values[known])
    else:
        counts = np.bincount(place[known], minlength=bins)
        sums = np.bincount(place[known], weights=values[known], minlength=bins)
        out = np.divide(sums, counts, out=np.full(bins, math.inf), where=counts > 0)
    return [value if math.isfinite(value) else None for value in out.tolist()]
