"""What an arm took beside time: memory and energy, as rows of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from analysis.run.energy import TrialEnergy, energy_of
from analysis.run.memory import RunMemory
from analysis.run.run import Run
from analysis.run.variation import moments_of


def memory_row(memory: RunMemory, arm: str) -> dict[str, Any] | None:
    """The arm's figures of memory by name, each of one replica; None where nothing was seen."""
    rows = {
        name: {"peak_bytes": max(peaks.values()), "peaks": _over_trials(list(peaks.values()))}
        for name, peaks in memory.arms[arm].items()
    }
    return rows or None


def memory_events(run: Run, memory: RunMemory) -> dict[str, Any] | None:
    """Allocations in need; None where nobody looked."""
    if not any(memory.arms.values()):
        return None
    events = [asdict(event) | {"offset_s": run.offset_s(event.trial, event.at_ns)} for event in memory.events]
    return {"events": events}


def energy_row(run: Run, arm: str) -> dict[str, Any] | None:
    """The arm's energy over trials; None where no card was watched."""
    energy = energy_of(run, arm)
    if energy is None:
        return None
    taken = energy.trials
    above = [item for item in taken if item.above_idle_j is not None]
    return {
        "joules": _total([item.joules for item in taken]),
        "above_idle_joules": _total([item.above_idle_j or 0.0 for item in above]) if len(above) == len(taken) else None,
        "seconds": _total([item.seconds for item in taken]),
        "watts": _over_trials([item.joules / item.seconds for item in taken if item.seconds > 0]),
        "per_token_j": _over_trials(_each(taken, "tokens")),
        "per_request_j": _over_trials(_each(taken, "requests")),
        "above_idle_per_token_j": _over_trials(_each(above, "tokens", above_idle=True)),
        "above_idle_per_request_j": _over_trials(_each(above, "requests", above_idle=True)),
        "idle_w": _over_trials([item.idle_w for item in taken if item.idle_w is not None]),
        "others_seen": all(item.others_seen for item in taken) if taken else None,
        "integrated": any(item.integrated for item in taken),
        "obstacles": list(energy.obstacles),
    }


def _over_trials(values: Sequence[float]) -> dict[str, float | int | None]:
    """How one figure varies, a value a trial."""
    n, mean, sd, cv = moments_of(values)
    return {"mean": mean, "sd": sd, "cv_pct": None if cv is None else 100.0 * cv, "trials": n}


def _total(values: list[float]) -> float | None:
    return sum(values) if values else None


def _each(taken: tuple[TrialEnergy, ...] | list[TrialEnergy], what: str, *, above_idle: bool = False) -> list[float]:
    """Joules for each of `what` (requests, tokens), trial by trial; without trials that had none."""
    joules = [item.above_idle_j if above_idle else item.joules for item in taken]
    counts = [getattr(item, what) for item in taken]
    return [spent / count for spent, count in zip(joules, counts, strict=True) if spent is not None and count]
