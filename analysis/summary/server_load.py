"""The load of external arms by their own account, as a part of the summary: over time, and in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from analysis.records.plain_values import number
from analysis.run.run import Run
from analysis.run.server_load import GAUGES, LoadSamples, meanwhile
from analysis.run.trials import SECOND
from analysis.summary.machines import MOST_POINTS
from analysis.summary.series import binned


def server_load_row(run: Run, samples: Sequence[LoadSamples]) -> dict[str, Any] | None:
    """The most of each gauge, and the preemptions, in bins of one width; and what came of each arm's pages. None where
    no page was to be read."""
    arms = [_arm(run, arm, samples) for arm in run.arms if run.account(arm).scrapes or _of(arm, samples)]
    if not arms:
        return None
    longest = max((trial.seconds for trial in run.trials), default=0.0)
    bin_s = float(max(1, math.ceil(longest / MOST_POINTS)))
    starts = {trial.number: trial.start_ns for trial in run.trials}
    return {"bin_s": bin_s, "arms": arms, "rows": [_row(item, starts[item.trial], bin_s) for item in samples]}


def _of(arm: str, samples: Sequence[LoadSamples]) -> list[LoadSamples]:
    return [item for item in samples if item.arm == arm]


def _row(item: LoadSamples, start_ns: int, bin_s: float) -> dict[str, Any]:
    numbers, place = np.unique((item.at_ns - start_ns) // int(bin_s * SECOND), return_inverse=True)
    place = place.astype(np.int64)
    known = np.isfinite(item.preemptions)
    rises = np.bincount(place[known], weights=item.preemptions[known], minlength=len(numbers))
    return {
        **{"trial": item.trial, "arm": item.arm, "replica": item.replica, "t_s": (numbers * bin_s).tolist()},
        **{name: binned(getattr(item, name), place, len(numbers), of=np.maximum) for name in GAUGES},
        "preemptions": rises.tolist() if known.any() else [None] * len(numbers),
    }


def _arm(run: Run, arm: str, samples: Sequence[LoadSamples]) -> dict[str, Any]:
    """The arm's figures over all trials, and how often its pages answered."""
    seen = [
        meanwhile(samples, arm=arm, trial=trial.number, start_ns=trial.start_ns, end_ns=trial.end_ns)
        for trial in run.trials
    ]
    columns: dict[str, list[float]] = {name: [] for name in (*GAUGES, "preemptions")}
    for item in filter(None, seen):
        for name, value in asdict(item).items():
            columns[name] += [] if value is None else [value]
    pages = run.account(arm).scrapes
    counts = {key: sum(int(number(page.get(key)) or 0) for page in pages) for key in ("answered", "failed", "late")}
    return {
        "arm": arm,
        **{f"most_{name}": max(columns[name], default=None) for name in GAUGES},
        "preemptions": sum(columns["preemptions"]) if columns["preemptions"] else None,
        **counts,
        "why": next((str(page["why"]) for page in pages if page.get("why")), None),
    }
