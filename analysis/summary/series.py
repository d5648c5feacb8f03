"""What the chart of latency over time draws, by when requests were due."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.run.run import Run
from analysis.run.trials import SECOND
from analysis.statistics.quantiles import grouped_quantiles

MOST_BINS = 1200


def latency_series(run: Run) -> dict[str, Any]:
    """The bins of every arm that hold requests, as columns in order of trial and time; `bin_s` is their width."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / MOST_BINS)))
    return {"bin_s": bin_s, "arms": {arm: _bins(run, arm, bin_s) for arm in run.arms}}


def _bins(run: Run, arm: str, bin_s: float) -> dict[str, list[Any]]:
    requests = run.requests
    columns: dict[str, list[Any]] = {}
    for trial in run.trials:
        own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
        since = (requests.start_ns[own] - trial.start_ns) // int(bin_s * SECOND)
        numbers, place = np.unique(since, return_inverse=True)
        bins = len(numbers)
        ttft = grouped_quantiles(requests.ttft_ms[own], place, bins, (0.5, 0.99))
        e2e = grouped_quantiles(requests.e2e_ms[own], place, bins, (0.5, 0.99, 1.0))
        for name, values in {
            "trial": np.full(bins, trial.number),
            "t_s": numbers * bin_s,
            "n": np.bincount(place, minlength=bins),
            "failed": np.bincount(place[requests.failed[own]], minlength=bins),
            **dict(zip(("ttft_p50_ms", "ttft_p99_ms"), ttft.T, strict=True)),
            **dict(zip(("e2e_p50_ms", "e2e_p99_ms", "e2e_max_ms"), e2e.T, strict=True)),
        }.items():
            columns.setdefault(name, []).extend(values.tolist())
    return columns
