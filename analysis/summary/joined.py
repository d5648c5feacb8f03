"""Runs that were judged as one: which they were, and which trials are theirs."""

from __future__ import annotations

import datetime
from typing import Any

from analysis.records.joining import RecordedRun
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.run.trials import SECOND


def joined_facts(run: Run) -> dict[str, Any] | None:
    """The runs and the number of machines; None for a run that is judged by itself."""
    if not run.records.joined:
        return None
    return {
        "runs": [_run_row(one) for one in run.records.runs],
        "machines": len(run.machines),
        "differences": list(run.records.differences),
    }


def _run_row(run: RecordedRun) -> dict[str, Any]:
    versions = mapping(run.environment.get("versions"))
    started = min(run.starts_ns.values(), default=0)
    moment = datetime.datetime.fromtimestamp(started // SECOND, tz=datetime.UTC) if started > 0 else None
    return {
        "name": run.name,
        "started": None if moment is None else moment.isoformat(),
        "machine": run.machine or None,
        "trials": [run.trials[number] for number in sorted(set(run.numbers))],
        "missing": [joined for number, joined in run.trials.items() if number not in run.numbers],
        "seed": run.experiment.get("seed"),
        "git_commit": run.environment.get("git_commit"),
        "tailgate": versions.get("tailgate"),
    }
