"""The speed of machines: what a device and its host did of a fixed piece of work before and after each trial.

A matrix product, a read of memory, small launches and plain Python say how fast the card and the host were, whatever
the servers did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from analysis.records.plain_values import number, rows_of, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.trials import Trial, described, identity_of

PYTHON = "python_ms"
WORK = {
    "matmul_tflops": "the speed of matrix products",
    "read_gb_per_s": "the speed of memory reads",
    "launch_us": "the speed of launches",
    PYTHON: "the speed of Python",
}
FIGURES = tuple(WORK)
CARD_FIGURES, HOST_FIGURES = FIGURES[:2], FIGURES[2:]  # of the card, and of its host, of which less is better

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
    model: str  # of a whole card, empty where it is unknown
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

    Only figures of work of one size compare: a card whose memory others hold is given a smaller read. Python ran on all
    processors of the host whichever device was measured, so its time is the geometric mean over devices.
    """
    python: dict[tuple[int, str], list[float]] = {}
    known: dict[tuple[int, str, str, str, str, str], dict[str, float]] = {}
    for trial, device, card, model, figure, size, when, value in (item for one in trials for item in _measured(one)):
        known.setdefault((trial, device, card, model, figure, size), {})[when] = value
        if figure == PYTHON:
            python.setdefault((trial, when), []).append(math.log(value))
    speeds = []
    for (trial, device, card, model, figure, size), values in known.items():
        both = {
            when: math.exp(fmean(python[trial, when])) if figure == PYTHON and when in values else values.get(when)
            for when in ("before", "after")
        }
        speeds.append(Speed(trial=trial, device=device, card=card, model=model, figure=figure, size=size, **both))
    return tuple(speeds)


def _measured(trial: Trial) -> Iterator[tuple[int, str, str, str, str, str, str, float]]:
    """(trial, device, card, model, figure, size, when, value) of each figure."""
    for row in rows_of(trial.info.get("references")):
        device, when = text_of(row, "device"), text_of(row, "when")
        card, facts = identity_of(trial, RUN_HOST, device), described(trial, RUN_HOST, device)
        model = "" if facts.get("mig") is True else text_of(facts, "name")
        for figure in FIGURES:
            value = number(row.get(figure))
            if value is not None and _LEAST < value < _MOST and when in ("before", "after"):
                size = ", ".join(f"{key} {row.get(key)}" for key in _SIZES[figure])
                yield trial.number, device, card, model, figure, size, when, value
