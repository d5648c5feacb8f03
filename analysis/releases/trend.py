"""How the judged figures went over many runs: each earlier run in order of time, and the candidate at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.releases.release import Release, ReleaseArm
from analysis.settings.release_limits import FIGURES, LARGEST_LOG, Figure, ReleaseLimits, bound_of, ratio_of
from analysis.statistics.unpaired import Difference, level_of


def trends(
    arms: Mapping[str, str], *, history: Sequence[Release], candidate: Release, limits: ReleaseLimits
) -> list[dict[str, Any]]:
    """One series for each judged figure of each arm that any run has.

    A point is the typical trial of a run, with limits from the luck of its own trials; a day's luck is what the points
    show together. `limit` is the value from which on the candidate is beyond what it may be, by the newest earlier run.
    """
    series = []
    for name, other in arms.items():
        runs = [*((release, release.arms[name]) for release in history), (candidate, candidate.arms[other])]
        for figure in FIGURES:
            allowed = limits.limit_of(figure)
            if allowed is None:
                continue
            points = [point for release, arm in runs if (point := _point(release, arm, figure, limits)) is not None]
            if not points:
                continue
            before = [point for point in points if point["run_id"] != candidate.run_id]
            series.append(
                {
                    "arm": other,
                    "figure": figure.key,
                    "label": figure.label,
                    "unit": figure.unit,
                    "less_is_better": figure.less_is_better,
                    "limit": _limit(figure, allowed, before[-1]["value"]) if before else None,
                    "points": points,
                }
            )
    return series


def _point(release: Release, arm: ReleaseArm, figure: Figure, limits: ReleaseLimits) -> dict[str, Any] | None:
    trials = arm.figures.values.get(figure.key) or {}
    values = np.array([value for value, _ in trials.values()], dtype=np.float64)
    if not values.size:
        return None
    point: dict[str, Any] = {
        "run_id": release.run_id,
        "created": release.created,
        "value": float(values.mean()),
        "low": None,
        "high": None,
        "trials": len(values),
    }
    if figure.counted or values.min() <= 0:
        return point
    lucks = [luck for _, luck in trials.values()]
    level = level_of(np.log(values), lucks, restart_spread=figure.luck * arm.start_spread(limits))
    point["value"] = math.exp(level.mean)
    low, high = Difference(effect=level.mean, part=level.part).limits(limits.alpha)
    if low is not None and high is not None and max(-low, high) < LARGEST_LOG:
        point["low"], point["high"] = math.exp(low), math.exp(high)
    return point


def _limit(figure: Figure, allowed: float, value: float) -> float:
    if figure.counted:
        return value + allowed
    return max(value, figure.least) * ratio_of(figure, bound_of(figure, allowed))
