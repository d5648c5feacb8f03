"""GPUs for a load and when an arm pays, from a run: `tailgate breakeven`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.foresight.costs import break_even_rows, break_evens
from analysis.judging.judgement import judge
from analysis.records.requests import read_run
from analysis.report.breakeven import RANGES, payoffs
from analysis.run.run import Run, mapping
from analysis.settings.rollout import Rollout
from loadtests.trials.terminal_table import aligned

SCHEMA = 1


def breakeven_of_run(directory: Path, *, load_rps: float | None, gpus_per_replica: int | None) -> dict[str, Any]:
    """The break-even of every arm as plain values; what is not given comes from the run's [rollout] table.

    RecordError where there is nothing to weigh.
    """
    run = Run.of(read_run(directory))
    rollout = Rollout.from_table(mapping(run.records.experiment.get("rollout")))
    if load_rps is not None:
        rollout = replace(rollout, load_rps=load_rps)
    if gpus_per_replica is not None:
        rollout = replace(rollout, gpus_per_replica=gpus_per_replica)
    found = break_even_rows(break_evens(run, judge(run), rollout), rollout)
    return {"schema": SCHEMA, "run_dir": str(directory), **found}


def breakeven_text(found: Mapping[str, Any]) -> str:
    """The break-even for people."""
    shown = payoffs({"break_even": found})
    table = aligned([["", *(row.arm for row in shown.arms), ""], *([*figures, ""] for figures in shown.figures)])
    reasons = [row.reason for row in shown.arms]
    return "\n".join([f"{found['run_dir']}: {shown.about}", "", *table, "", RANGES, *reasons])
