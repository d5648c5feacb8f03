"""The reference: what a device and its host did of a fixed piece of work before and after each trial.

A matrix product, a read of memory, small launches and plain Python say how fast the card and the host were, whatever
the servers did.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.records.plain_values import mapping, number, rows_of, text_of
from analysis.records.schemas import RUN_HOST
from analysis.run.placement import cards_of
from analysis.run.trials import Trial

# Figures of a reference that are of the card, and those that are of its host; of the last two less is better.
CARD_FIGURES = ("matmul_tflops", "read_gb_per_s")
PYTHON = "python_ms"
HOST_FIGURES = ("launch_us", PYTHON)
FIGURES = (*CARD_FIGURES, *HOST_FIGURES)


# How large the work behind each figure was, as the reference says; what it does not say is None.
_SIZES = {
    "matmul_tflops": ("matrix", "dtype", "rest_ms"),
    "read_gb_per_s": ("read_bytes",),
    "launch_us": ("launches", "processors"),
    PYTHON: ("processors",),
}
# No machine is so slow or so fast.
_LEAST, _MOST = 1e-9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a device and its host did of a fixed piece of work, before or after the traffic."""

    trial: int
    host: str
    device: str
    card: str  # its identity
    when: str  # before | after
    figures: Mapping[str, float]
    sizes: Mapping[str, tuple[Any, ...]]  # of the work behind each figure, as the reference says
    error: str | None


def speed_of(figure: str, value: float) -> float:
    """The speed that a figure of the reference means, as a logarithm: more is faster."""
    return -math.log(value) if figure in HOST_FIGURES else math.log(value)


def references_of(trials: Iterable[Trial]) -> tuple[Reference, ...]:
    """All references of the trials, in their order. Figures whose work was not of the usual size are left out."""
    return _of_one_host(_of_one_size([item for trial in trials for item in _of_trial(trial)]))


def _of_one_host(rows: Sequence[Reference]) -> tuple[Reference, ...]:
    """The references with Python's time taken together over the devices of a host, before a trial and after it.

    Where processors take turns, Python ran on all of them whichever device was measured: what two devices of one host
    differ by is the moment.
    """
    known: dict[tuple[int, str, str], list[float]] = {}
    for row in rows:
        if row.sizes[PYTHON] != (None,) and PYTHON in row.figures:
            known.setdefault((row.trial, row.host, row.when), []).append(math.log(row.figures[PYTHON]))
    together = {place: math.exp(sum(values) / len(values)) for place, values in known.items()}
    return tuple(
        replace(row, figures={**row.figures, PYTHON: together[row.trial, row.host, row.when]})
        if row.sizes[PYTHON] != (None,) and PYTHON in row.figures
        else row
        for row in rows
    )


def _of_one_size(rows: Sequence[Reference]) -> tuple[Reference, ...]:
    """The references without the figures whose work was not as large as most of the same device had: these do not
    compare. A card whose memory others hold is given a smaller read."""
    most = {
        (card, figure): Counter(str(row.sizes[figure]) for row in rows if row.card == card).most_common(1)[0][0]
        for card in dict.fromkeys(row.card for row in rows)
        for figure in FIGURES
    }
    kept = []
    for row in rows:
        figures = {name: value for name, value in row.figures.items() if str(row.sizes[name]) == most[row.card, name]}
        kept.append(replace(row, figures=figures))
    return tuple(kept)


def _of_trial(trial: Trial) -> Iterator[Reference]:
    monitor = mapping(trial.info.get("bed"))
    cards = cards_of(monitor)
    for row in rows_of(trial.info.get("references")):
        host, device = text_of(row, "host", RUN_HOST), text_of(row, "device")
        known = {figure: number(row.get(figure)) for figure in FIGURES}
        error = row.get("error")
        machine = mapping(mapping(monitor.get("machines")).get(host))
        card = cards.get((host, device))
        yield Reference(
            trial=trial.number,
            host=host,
            device=device,
            card=card.identity if card else f"{text_of(machine, 'machine', host)} {device}",
            when=text_of(row, "when"),
            figures={name: value for name, value in known.items() if value is not None and _LEAST < value < _MOST},
            sizes={figure: tuple(row.get(key) for key in keys) for figure, keys in _SIZES.items()},
            error=error if isinstance(error, str) and error else None,
        )
