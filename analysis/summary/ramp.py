"""What became of a ramp, and how weights changed in any other run, as parts of the summary."""

from __future__ import annotations

from typing import Any

from analysis.judging.ramp_account import ramp_of
from analysis.run.run import Run


def ramp_row(run: Run) -> dict[str, Any]:
    """The `ramp` part of the summary; empty where the run was none. Offsets are seconds from the start of the trial."""
    account = ramp_of(run)
    if account is None:
        return {}
    return {
        "candidate": account.candidate,
        "steps_pct": list(account.limits.steps),
        "outcome": account.outcome,
        "reason": account.why,
        "exposed": account.exposed,
        "hurt": account.hurt,
        "rollback_s": account.rollback_s,
        "changes": _changes(run),
    }


def weights_row(run: Run) -> dict[str, Any]:
    """The `weights` part of the summary; empty where they never changed, and where a ramp's steps say how they did."""
    return {} if ramp_of(run) is not None or not run.records.weights else {"changes": _changes(run)}


def _changes(run: Run) -> list[dict[str, Any]]:
    """The changes of weights in order, also those that were made past the run."""
    return [
        {
            "offset_s": run.offset_s(change.trial, change.at_ns),
            "trial": change.trial,
            "action": change.action,
            "step": change.step,
            "weights": dict(change.weights),
            "shadows_pct": dict(change.shadows),
            "reason": change.why,
            "took_s": None if change.done_ns is None else (change.done_ns - change.at_ns) / 1e9,
        }
        for change in run.records.weights
    ]
