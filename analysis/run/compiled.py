"""How many engine steps of an arm that compiles ran compiled code."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from analysis.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSteps:
    """The steps of one replica in one trial of which it is known whether they ran compiled code."""

    trial: int
    replica: str
    compiled: int
    steps: int


def compiled_steps(run: Run, arm: str) -> list[CompiledSteps]:
    """Of each replica and trial, after the trial's first request; empty where nothing is known, or the arm asks for no
    compiling."""
    steps = run.steps(arm) if run.account(arm).compiles else None
    if steps is None:
        return []
    known = steps.filter(pc.is_valid(steps.column("compiled")))
    counted = pa.table(
        {
            "trial": pc.fill_null(known.column("trial"), 1),
            "replica": pc.fill_null(known.column("replica"), arm),
            "compiled": pc.cast(known.column("compiled"), pa.int64()),
        }
    )
    groups = counted.group_by(["trial", "replica"]).aggregate([("compiled", "sum"), ("compiled", "count")])
    rows = sorted(groups.to_pylist(), key=lambda row: (row["trial"], row["replica"]))
    return [
        CompiledSteps(
            trial=row["trial"], replica=row["replica"], compiled=row["compiled_sum"], steps=row["compiled_count"]
        )
        for row in rows
    ]


def eager_pct(counts: list[CompiledSteps]) -> float | None:
    """Of 100 steps, those that ran as plain Python; None without steps."""
    total = sum(count.steps for count in counts)
    return 100.0 * (total - sum(count.compiled for count in counts)) / total if total else None
