"""What charts draw over time: latency by when requests were due, and samples of the machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.run.machine_records import THROTTLES
from analysis.run.machine_samples import Rows, Samples
from analysis.run.run import Run
from analysis.run.trials import SECOND, Trial
from analysis.statistics.quantiles import grouped_quantiles

MOST_BINS = 1200
MOST_POINTS = 300  # of one device or host in one trial
_STRETCHES = 60  # of a trial, for its latency
_LEAST_STRETCH_S = 5


def latency_series(run: Run) -> dict[str, Any]:
    """The bins of every arm that hold requests, as columns in order of trial and time; `bin_s` is their width."""
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / MOST_BINS)))
    return {"bin_s": bin_s, "arms": {arm: _bins(run, arm, bin_s) for arm in run.arms}}


def _bins(run: Run, arm: str, bin_s: float) -> dict[str, list[Any]]:
    requests = run.requests
    columns: dict[str, list[Any]] = {}
    for trial in run.trials:
        own, numbers, place = _binned(run, arm, trial, bin_s)
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


def _binned(run: Run, arm: str, trial: Trial, width_s: float) -> tuple[Ints, Ints, Ints]:
    """The arm's requests of a trial by when they were due: rows, numbers of the bins that hold some, bin of each."""
    requests = run.requests
    own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
    since = (requests.start_ns[own] - trial.start_ns) // int(width_s * SECOND)
    numbers, place = np.unique(since, return_inverse=True)
    return own, numbers, place


# --- Machines --------------------------------------------------------------------------------------------------------


def machine_series(run: Run) -> dict[str, Any]:
    """The samples of each device and host during each trial's traffic, in bins of one width, as columns.

    Each is the mean of a bin, `throttled` the share of its samples. Empty where nothing was sampled.
    """
    samples = Samples(run.records.machines)
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / MOST_POINTS)))
    stretch_s = float(max(_LEAST_STRETCH_S, math.ceil(longest / _STRETCHES)))
    rows: list[dict[str, Any]] = []
    for trial in run.trials:
        rows += _latency_rows(run, trial, stretch_s)
        for kind, columns in (("device", _device_columns), ("host", _host_columns)):
            for own in samples.of(kind, trial):
                at_ns = own.at_ns[own.inside]
                if at_ns.size:
                    numbers, place = np.unique((at_ns - trial.start_ns) // int(bin_s * SECOND), return_inverse=True)
                    rows.append(
                        {
                            **{"trial": trial.number, "kind": kind, "host": own.host, "name": own.name},
                            "t_s": (numbers * bin_s).tolist(),
                            **columns(own, place.astype(np.int64), len(numbers)),
                        }
                    )
    if all(row["kind"] == "arm" for row in rows):
        return {}
    return {"bin_s": bin_s, "stretch_s": stretch_s, "rows": rows}


def _latency_rows(run: Run, trial: Trial, stretch_s: float) -> Iterator[dict[str, Any]]:
    """The p99 of each arm in stretches that hold enough requests to have one worth the name, wider than a bin."""
    for arm in run.arms:
        own, numbers, place = _binned(run, arm, trial, stretch_s)
        tails = grouped_quantiles(run.requests.e2e_ms[own], place, len(numbers), (0.99,))
        if numbers.size:
            t_s = (numbers * stretch_s).tolist()
            yield {"trial": trial.number, "kind": "arm", "name": arm, "t_s": t_s, "e2e_p99_ms": tails[:, 0].tolist()}


def _device_columns(own: Rows, place: Ints, bins: int) -> dict[str, Any]:
    held = [math.nan if names is None else float(any(name in THROTTLES for name in names)) for names in own.reasons()]
    return {
        **{
            name: binned(own.column(name), place, bins)
            for name in ("sm_mhz", "power_w", "temperature_c", "utilisation_pct")
        },
        "throttled": binned(np.array(held, dtype=np.float64), place, bins),
        "foreign": binned(own.column("foreign_processes"), place, bins),
    }


def _host_columns(own: Rows, place: Ints, bins: int) -> dict[str, Any]:
    cpus = own.column("cpus")
    took = np.append(np.nan, np.diff(own.at_ns[own.inside]) / 1e9)
    columns: dict[str, Any] = {}
    for key, counter, each in (
        ("steal_pct", "steal_s", cpus),
        ("busy_pct", "cpu_s", cpus),
        ("pressure_memory_pct", "pressure_memory_s", 1.0),
    ):
        rise = np.diff(own.column(counter), prepend=np.nan)
        columns[key] = binned(np.where((rise >= 0) & (took > 0), 100.0 * rise / (took * each), np.nan), place, bins)
    return columns


def binned(values: Floats, place: Ints, bins: int) -> list[float]:
    """The mean of the known values in each bin; NaN where none is known."""
    known = np.isfinite(values)
    counts = np.bincount(place[known], minlength=bins)
    sums = np.bincount(place[known], weights=values[known], minlength=bins)
    means: list[float] = np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0).tolist()
    return means
