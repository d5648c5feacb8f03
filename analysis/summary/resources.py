"""What an arm took beside time: memory, as rows of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from analysis.run.memory import RunMemory


def memory_row(memory: RunMemory, arm: str) -> dict[str, Any] | None:
    """The arm's figures of memory by name, each of one replica; None where nothing was seen."""
    rows = {
        name: {"peak_bytes": max(peaks.values()), "peaks": _over_trials(list(peaks.values()))}
        for name, peaks in memory.arms[arm].items()
    }
    return rows or None


def _over_trials(values: Sequence[float]) -> dict[str, float | int | None]:
    """How one figure varies, a value a trial."""
    mean = fmean(values)
    sd = stdev(values) if len(values) > 1 else None
    return {
        "mean": mean,
        "sd": sd,
        "cv_pct": 100.0 * sd / mean if sd is not None and mean else None,
        "trials": len(values),
    }
