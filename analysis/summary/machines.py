"""The machines as a part of the summary: their verdict, each of them in each trial, and samples over time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from analysis.arrays import Ints
from analysis.checks.machines import disturbances_of
from analysis.judging.judgement import Judgement
from analysis.run.machine_records import THROTTLES, DeviceTraffic
from analysis.run.machine_samples import Rows, Samples
from analysis.run.run import Run
from analysis.run.trials import SECOND, Trial
from analysis.statistics.quantiles import grouped_quantiles
from analysis.summary.series import binned

MOST_POINTS = 300  # of one device or host in one trial
_STRETCHES = 60  # of a trial, for its latency
_LEAST_STRETCH_S = 5


def machines_row(run: Run, judgement: Judgement) -> dict[str, Any]:
    """The key `machines`; without a machine monitor, the verdict alone."""
    machines, verdict = judgement.machines, judgement.machine_verdict
    row: dict[str, Any] = {"verdict": verdict.verdict, "line": verdict.line}
    if not machines.monitored:
        return row
    traffic = {(host.trial, host.host): asdict(host) for host in machines.hosts}
    return row | {
        "unknown": list(verdict.unknown),
        "disturbances": [{"check": check, **asdict(item)} for check, item in disturbances_of(judgement.checks)],
        "hosts": [
            {"trial": place[0], "host": place[1], **machines.facts.get(place, {}), **traffic.get(place, {})}
            for place in sorted({*machines.facts, *traffic})
        ],
        "devices": [_device(device) for device in machines.devices],
        "references": [{**asdict(row), "arms": machines.arms_on(row.trial, row.device)} for row in machines.references],
        **({"series": series} if (series := machine_series(run)) else {}),
    }


def _device(device: DeviceTraffic) -> dict[str, Any]:
    row = asdict(device)
    return {"trial": row.pop("trial"), **row.pop("card"), **row}


def machine_series(run: Run) -> dict[str, Any]:
    """The samples of each device and host during each trial's traffic, in bins of one width, as columns.

    The clock is the lowest of a bin, `throttled` the share of its samples, `foreign` the most processes at once; others
    are means. Empty where nothing was sampled.
    """
    samples = Samples(run.records.bed)
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
    requests = run.requests
    for arm in run.arms:
        own = np.flatnonzero(run.of_arm(arm) & (requests.trial == trial.number) & ~requests.broken)
        since = (requests.start_ns[own] - trial.start_ns) // int(stretch_s * SECOND)
        numbers, place = np.unique(since, return_inverse=True)
        tails = grouped_quantiles(requests.e2e_ms[own], place, len(numbers), (0.99,))
        if numbers.size:
            t_s = (numbers * stretch_s).tolist()
            yield {"trial": trial.number, "kind": "arm", "name": arm, "t_s": t_s, "e2e_p99_ms": tails[:, 0].tolist()}


def _device_columns(own: Rows, place: Ints, bins: int) -> dict[str, Any]:
    held = [math.nan if names is None else float(any(name in THROTTLES for name in names)) for names in own.reasons()]
    return {
        "sm_mhz": binned(own.column("sm_mhz"), place, bins, of=np.minimum),
        **{name: binned(own.column(name), place, bins) for name in ("power_w", "temperature_c", "utilisation_pct")},
        "throttled": binned(np.array(held, dtype=np.float64), place, bins),
        "foreign": binned(own.column("foreign_processes"), place, bins, of=np.maximum),
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
