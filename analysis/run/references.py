"""The speed of machines: what a device and its host did of a fixed piece of work before and after each trial.

A matrix product, a read of memory, small launches and plain Python say how fast the card and the host were, whatever
the servers did.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from analysis.records.plain_values import number, rows_of, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.placement import identity_of
from analysis.run.trials import Trial

PYTHON = "python_ms"
# Figures of the card, and those of its host, of which less is better.
CARD_FIGURES = ("matmul_tflops", "read_gb_per_s")
HOST_FIGURES = ("launch_us", PYTHON)
FIGURES = (*CARD_FIGURES, *HOST_FIGURES)
WORK = dict(zip(FIGURES, ("matrix products", "memory reads", "launches", "Python"), strict=True))

# The keys of a reference that say how large the work behind each figure was.
_SIZES = {
    "matmul_tflops": ("matrix", "dtype", "rest_ms"),
    "read_gb_per_s": ("read_bytes",),
    "launch_us": ("launches", "processors"),
    PYTHON: ("processors",),
}
_LEAST, _MOST = 1e-9, 1e12  # no machine is so slow or so fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One figure of a device, or of its host, before and after a trial. None was not measured."""

    trial: int
    device: str
    card: str  # what identifies the device in all trials
    figure: str
    size: str  # of the work
    before: float | None
    after: float | None

    @property
    def logs(self) -> list[float]:
        """The logarithms of what is known of before and after: more is faster."""
        sign = -1.0 if self.figure in HOST_FIGURES else 1.0
        return [sign * math.log(value) for value in (self.before, self.after) if value is not None]

    @property
    def mean(self) -> float:
        """The speed in the trial, as a logarithm."""
        return fmean(self.logs)


def speeds_of(trials: Iterable[Trial]) -> tuple[Speed, ...]:
    """All that was measured, in the order of trials and devices.

    A figure whose work was not as large as mostly on the same device does not compare and is left out: a card whose
    memory others hold is given a smaller read. Python ran on all processors of the host whichever device was measured,
    so its time is the geometric mean over devices.
    """
    measured = [item for trial in trials for item in _measured(trial)]
    sizes: dict[tuple[str, str], Counter[str]] = {}
    for item in measured:
        sizes.setdefault((item.card, item.figure), Counter())[item.size] += 1
    python: dict[tuple[int, str], list[float]] = {}
    known: dict[tuple[int, str, str], list[_Measured]] = {}
    for item in measured:
        if item.size == sizes[item.card, item.figure].most_common(1)[0][0]:
            known.setdefault((item.trial, item.device, item.figure), []).append(item)
            if item.figure == PYTHON:
                python.setdefault((item.trial, item.when), []).append(math.log(item.value))
    speeds = []
    for (trial, device, figure), items in known.items():
        values = {item.when: item.value for item in items}
        if figure == PYTHON:
            values = {when: math.exp(fmean(python[trial, when])) for when in values}
        speeds.append(
            Speed(
                trial=trial,
                device=device,
                card=items[0].card,
                figure=figure,
                size=items[0].size,
                before=values.get("before"),
                after=values.get("after"),
            )
        )
    return tuple(speeds)


class _Measured(NamedTuple):
    trial: int
    device: str
    card: str
    figure: str
    size: str
    when: str
    value: float


def _measured(trial: Trial) -> Iterator[_Measured]:
    for row in rows_of(trial.info.get("references")):
        device, when = text_of(row, "device"), text_of(row, "when")
        card = identity_of(trial, RUN_HOST, device)
        for figure in FIGURES:
            value = number(row.get(figure))
            if value is not None and _LEAST < value < _MOST and when in ("before", "after"):
                size = ", ".join(f"{key} {row.get(key)}" for key in _SIZES[figure])
                yield _Measured(trial.number, device, card, figure, size, when, value)
