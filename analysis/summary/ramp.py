"""What became of a ramp, and how weights changed, as parts of the summary."""

from __future__ import annotations

from typing import Any

from analysis.judging.ramp_account import ramp_of
from analysis.run.run import Run


def ramp_row(run: Run) -> dict[str, Any] | None:
    """The `ramp` part of the summary; None where the run was none."""
    account = ramp_of(run)
    names = ("candidate", "outcome", "exposed", "hurt", "rollback_s", "reason")
    return None if account is None else {name: getattr(account, name) for name in names}


def weight_rows(run: Run) -> list[dict[str, Any]]:
    """The changes of weights in order, also those after the run. Offsets are seconds from the start of the trial."""
    return [
        {
            "offset_s": run.offset_s(change.trial, change.at_ns),
            "action": change.action,
            "weights": dict(change.weights),
            "shadows_pct": dict(change.shadows),
            "reason": change.why,
        }
        for change in run.records.weights
    ]
