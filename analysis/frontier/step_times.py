"""How long a step of the engine takes by its batch and length, of every arm over the control: where the gain turns.

Sizes are those before padding, so that one cell holds the same work for every arm. A cell's value is the median step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from analysis.arrays import Floats, Ints
from analysis.run.compile_events import windows_of
from analysis.run.run import Run

FEWEST = 5  # steps of a cell, for its median to be shown
KINDS = ("prefill", "extend", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell:
    """Steps of one kind with `batch[0]` to `batch[1]` rows of `length[0]` to `length[1]` tokens each.

    `ms` is the median of each arm with enough such steps, `steps` how many each had.
    """

    kind: str
    batch: tuple[int, int]
    length: tuple[int, int]
    ms: Mapping[str, float]
    steps: Mapping[str, int]

    def ratio(self, arm: str, control: str) -> float | None:
        """The arm's step over the control's; None where one of them is not known."""
        own, base = self.ms.get(arm), self.ms.get(control)
        return own / base if own is not None and base else None


def octave(sizes: Ints) -> Ints:
    """The upper end of the octave of each size: 1, 2, 4, 8, …; 3 lies in that of 4."""
    return np.asarray(2 ** np.ceil(np.log2(np.maximum(sizes, 1))), dtype=np.int64)


def step_cells(run: Run) -> list[StepCell]:
    """Every cell that any arm has steps in, by kind, batch and length; steps that met a compile are left out."""
    times: dict[tuple[str, int, int], dict[str, Floats]] = defaultdict(dict)
    for arm in run.arms:
        for key, ms in _of_arm(run, arm).items():
            times[key][arm] = ms
    cells = []
    for (kind, batch, length), own in sorted(times.items(), key=lambda item: (KINDS.index(item[0][0]), *item[0][1:])):
        known = {arm: float(np.median(ms)) for arm, ms in own.items() if len(ms) >= FEWEST}
        if known:
            cells.append(
                StepCell(
                    kind=kind,
                    batch=(batch // 2 + 1, batch),
                    length=(length // 2 + 1, length),
                    ms=known,
                    steps={arm: len(ms) for arm, ms in own.items()},
                )
            )
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuietSteps:
    """Columns of the same length: `batch` rows before padding, `tokens` of all of them, `ms` from launch to result."""

    kind: npt.NDArray[Any]
    batch: Ints
    tokens: Ints
    ms: Floats


def _quiet_steps(run: Run, arm: str) -> _QuietSteps | None:
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
    return _QuietSteps(
        kind=kind[quiet],
        batch=batch[quiet],
        tokens=tokens[quiet],
        ms=(end - start)[quiet] / 1e6,
    )


def _of_arm(run: Run, arm: str) -> dict[tuple[str, int, int], Floats]:
    """The times of the arm's steps in ms, by (kind, octave of the batch, octave of the tokens a row)."""
    steps = _quiet_steps(run, arm)
    if steps is None:
        return {}
    rows, lengths = octave(steps.batch), octave(-(-steps.tokens // steps.batch))
    found = {}
    for kind in KINDS:
        own = np.flatnonzero(steps.kind == kind)
        places = np.stack([rows[own], lengths[own]], axis=1)
        for place in np.unique(places, axis=0) if own.size else ():
            mine = own[(places == place).all(axis=1)]
            found[kind, int(place[0]), int(place[1])] = steps.ms[mine]
    return found


def turning_points(cells: Sequence[StepCell], arm: str, control: str, *, apart: float = 0.05) -> list[str]:
    """A sentence for each kind of step: where the arm's steps are shorter than the control's, and where longer.

    Medians within `apart` of each other count as neither.
    """
    sentences = []
    for kind in KINDS:
        known = [(cell, ratio) for cell in cells if cell.kind == kind and (ratio := cell.ratio(arm, control))]
        shorter = [cell for cell, ratio in known if ratio < 1.0 - apart]
        longer = [cell for cell, ratio in known if ratio > 1.0 + apart]
        if not known:
            continue
        steps = f"{kind} steps of {arm}"
        if not longer:
            words = "are shorter than" if len(shorter) == len(known) else "are nowhere longer than"
            sentences.append(
                f"The {steps} {words} {control}'s{' in every cell' if len(shorter) == len(known) else ''}."
            )
        elif not shorter:
            sentences.append(f"The {steps} are nowhere shorter than {control}'s.")
        else:
            sentences.append(
                f"The {steps} are shorter than {control}'s at {_places(shorter)}, and longer at {_places(longer)}."
            )
    return sentences


def _places(cells: Sequence[StepCell]) -> str:
    return ", ".join(f"{span(cell.batch)} × {span(cell.length)}" for cell in cells)


def span(ends: tuple[int, int]) -> str:
    """The sizes of a cell: "1", or "5–8"."""
    return str(ends[1]) if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}"
