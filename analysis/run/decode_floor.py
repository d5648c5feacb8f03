"""How near an arm's decode steps come to reading their weights, which no code makes shorter.

Every decode step reads all weights once, whatever its number of rows. Their bytes over the rate at which the card
itself reads (the reference, beside the traffic) are a floor of the step; keys and values come on top and are left out,
so that the share is a little too low. Of few rows, where little else is to do, the share says what the host and the
kernels cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from analysis.records.plain_values import mapping, number
from analysis.run.placement import alone_on
from analysis.run.quiet_steps import quiet_steps
from analysis.run.references import references_of
from analysis.run.run import Run

FEWEST = 20  # steps of so many rows, for their median to be told
_SMALLEST_BYTES = 256 << 20  # fewer may stay in a card's caches
_READ = "read_gb_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFloor:
    """Decode steps of `rows` rows, the fewest that the arm ran often, over all trials.

    `weights` are the bytes that each reads, `quantised` those of them that are held in fewer bits. `floor_ms` is what
    reading them takes at the card's own rate, None where no card was measured.
    """

    weights: int
    quantised: int
    rows: int
    step_ms: float
    floor_ms: float | None

    @property
    def bytes_a_token(self) -> float:
        """Bytes of weights that are read for each token."""
        return self.weights / self.rows

    @property
    def share(self) -> float | None:
        """The part of a step that its floor is: 1 is a step that does nothing but read its weights."""
        return None if self.floor_ms is None else self.floor_ms / self.step_ms


def decode_floor(run: Run, arm: str) -> DecodeFloor | None:
    """The floor of the arm's decode steps; None where its weights were not counted or no number of rows has
    `FEWEST` steps."""
    memories = [mapping(row.get("memory_bytes")) for row in run.account(arm).startups]
    memory = next(filter(None, memories), {})
    weights = number(memory.get("step_weights"))
    steps = quiet_steps(run, arm)
    if not weights or steps is None:
        return None
    is_decode = steps.kind == "decode"
    sizes, counts = np.unique(steps.batch[is_decode], return_counts=True)
    often = sizes[counts >= FEWEST]
    if not often.size:
        return None
    rate = _read_rate(run, arm) if weights >= _SMALLEST_BYTES else None
    return DecodeFloor(
        weights=int(weights),
        quantised=int(number(memory.get("quantised_weights")) or 0),
        rows=int(often[0]),
        step_ms=float(np.median(steps.ms[is_decode & (steps.batch == often[0])])),
        floor_ms=None if rate is None else weights / rate / 1e6,
    )


def _read_rate(run: Run, arm: str) -> float | None:
    """GB/s at which the arm's card reads, by the reference, in the trials in which it had the card to itself."""
    trials = {trial.number: device for trial in run.trials_of(arm) if (device := alone_on(trial, arm)) is not None}
    rates = [
        row.figures[_READ]
        for row in references_of(run.trials)
        if trials.get(row.trial) == row.device and _READ in row.figures
    ]
    return median(rates) if rates else None
