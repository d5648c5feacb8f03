"""The engine steps of an arm under traffic that met no compile: kind, rows, tokens and length of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from analysis.arrays import Floats, Ints
from analysis.run.run import Run
from analysis.run.spikes import windows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietSteps:
    """Columns of the same length: `batch` rows before padding, `tokens` of all of them, `ms` from launch to result."""

    kind: npt.NDArray[Any]
    batch: Ints
    tokens: Ints
    ms: Floats


def quiet_steps(run: Run, arm: str) -> QuietSteps | None:
    """The arm's steps of a row and a token at least that no stalling compile touched; None where none is recorded."""
    steps = run.steps(arm)
    if steps is None or not steps.num_rows:
        return None
    trial, start, end, batch, tokens = (
        np.asarray(pc.fill_null(steps.column(name), 0).to_numpy(), dtype=np.int64)
        for name in ("trial", "start_ns", "end_ns", "batch", "tokens")
    )
    quiet = (batch >= 1) & (tokens >= 1) & (end > start)
    for number in np.unique(trial):
        events = [item for item in run.events if item.arm == arm and item.trial == number and item.stalls]
        met = windows_of((item.start_ns, item.end_ns) for item in events).touch(start, end)
        quiet &= ~((trial == number) & met)
    kind = np.asarray(steps.column("kind").to_pylist(), dtype=object)
    return QuietSteps(
        kind=kind[quiet],
        batch=batch[quiet],
        tokens=tokens[quiet],
        ms=(end - start)[quiet] / 1e6,
    )
