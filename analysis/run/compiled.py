"""How many engine steps of an arm that compiles ran compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from analysis.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSteps:
    """The steps of one kind, of one replica in one trial, of which it is known whether they ran compiled code."""

    trial: int
    replica: str
    kind: str  # prefill | decode | encode
    compiled: int
    steps: int


def compiled_steps(run: Run, arm: str) -> list[CompiledSteps]:
    """Of each replica, trial and kind, after the trial's first request; empty where nothing is known, or the arm asks
    for no compiling."""
    steps = run.steps(arm) if run.account(arm).compiles else None
    if steps is None:
        return []
    known = steps.filter(pc.is_valid(steps.column("compiled")))
    counted = pa.table(
        {
            "trial": pc.fill_null(known.column("trial"), 1),
            "replica": pc.fill_null(known.column("replica"), arm),
            "kind": pc.fill_null(known.column("kind"), ""),
            "compiled": pc.cast(known.column("compiled"), pa.int64()),
        }
    )
    places = ["trial", "replica", "kind"]
    groups = counted.group_by(places).aggregate([("compiled", "sum"), ("compiled", "count")])
    return [
        CompiledSteps(**{name: row[name] for name in places}, compiled=row["compiled_sum"], steps=row["compiled_count"])
        for row in sorted(groups.to_pylist(), key=lambda row: [row[name] for name in places])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerSteps:
    """How many of an arm's steps of one kind ran as plain Python."""

    kind: str
    eager: int
    steps: int

    @property
    def pct(self) -> float:
        """Of 100 steps."""
        return 100.0 * self.eager / self.steps


def most_eager(counts: Sequence[CompiledSteps]) -> EagerSteps | None:
    """The kind of step with the largest share that ran eagerly; None without steps.

    By kind, since an answer has hundreds of decode steps and one prefill: if every prefill ran eagerly, that would be
    less than a per cent of all.
    """
    kinds = dict.fromkeys(count.kind for count in counts if count.steps)
    own = [[count for count in counts if count.kind == kind] for kind in kinds]
    found = [
        EagerSteps(
            kind=rows[0].kind,
            eager=sum(row.steps - row.compiled for row in rows),
            steps=sum(row.steps for row in rows),
        )
        for rows in own
    ]
    return max(found, key=lambda item: item.pct, default=None)
