"""The stretches of a run in which the splitter's weights stayed as they were, and the requests sent in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Bools
from analysis.records.weight_journal import WeightChange
from analysis.run.run import Run

# A request takes this long at most from its client to the splitter, which chooses its arm.
_ON_ITS_WAY_NS = 250_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStretch:
    """`rows` are the requests for which the splitter surely had these weights: those around a change are in none."""

    weights: Mapping[str, float]
    rows: Bools


def weight_stretches(run: Run) -> Sequence[WeightStretch]:
    """The stretches of every trial, in order: one a trial where the journal holds no change of it."""
    return [
        stretch
        for trial in run.trials
        for stretch in _of_trial(
            run, trial.number, [item for item in run.records.weights if item.trial == trial.number]
        )
    ]


def _of_trial(run: Run, number: int, changes: Sequence[WeightChange]) -> Iterator[WeightStretch]:
    usable = ~run.requests.broken & (run.requests.trial == number)
    if not changes:
        yield WeightStretch(weights=run.weights, rows=usable)
        return
    # What a client did not stamp when it sent it is taken to have been sent when it was due.
    sent = np.where(run.requests.sent_ns > 0, run.requests.sent_ns, run.requests.start_ns)
    for index, change in enumerate(changes):
        rows = usable.copy()
        if index:  # before the first change there was none
            rows &= sent >= (change.done_ns or change.at_ns)
        if index + 1 < len(changes):
            rows &= sent < changes[index + 1].at_ns - _ON_ITS_WAY_NS
        yield WeightStretch(weights=dict(change.weights), rows=rows)
