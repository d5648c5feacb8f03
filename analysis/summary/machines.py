"""The machines as a part of the summary: their verdict, each of them in each trial, and samples over time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.judging.judgement import Judgement
from analysis.run.run import Run
from analysis.summary.series import machine_series


def machines_row(run: Run, judgement: Judgement) -> dict[str, Any]:
    """The key `machines`."""
    records = judgement.machines
    return {
        **asdict(judgement.machine_verdict),
        "hosts": [asdict(row) for row in records.hosts],
        "devices": [asdict(row) for row in records.devices],
        "speeds": [asdict(row) for row in records.speeds],
        "series": machine_series(run) if records.monitored else {},
    }
