"""The search for the load that arms hold: which rates come next, from the steps that were held and missed until now.

`tailgate run` with `traffic.arrivals = "saturation"`, `tailgate frontier` and the simulations search by `next_rates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tailgate.analysis.judging.load_steps import Step, steps_of, to_search
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.run.run import Run
from tailgate.loadtests.traffic.arrivals import HIGHEST_RATE, rounded, staircase

# How far a bracket that is open on one side is searched further, as a factor.
_FURTHER = 4.0
# Steps closer than this are within what one trial differs from the next: the ends of the bracket are tried again.
_CLOSEST = 1.02


def next_rates(arms: Sequence[str], known: Sequence[Step], count: int, *, low: float, high: float) -> tuple[float, ...]:
    """Return `count` rates for the next trial of these arms, rising: the staircase from `low` to `high` while nothing
    is known of any, then shared out over what the `known` steps leave open of each.

    An arm that failed everywhere is searched below the lowest rate tried, one that held everywhere above the highest.
    Arms whose knees lie in the same bracket share its steps. The same steps give the same rates.
    """
    brackets = [to_search(arm, known) for arm in arms]
    if all(bracket == (None, None) for bracket in brackets):
        return staircase(low, high, count)
    spans: set[tuple[float, float]] = set()
    for passed, failed in brackets:
        start, end = passed, failed
        if start is None:
            start = low if end is None else end / _FURTHER
        if end is None:
            end = high if passed is None else min(passed * _FURTHER, HIGHEST_RATE)
        spans.add((start, end))
    chosen = sorted(spans)[:count]
    rates: list[float] = []
    for index, (start, end) in enumerate(chosen):
        share = count // len(chosen) + (index < count % len(chosen))
        if end / start < _CLOSEST ** (share + 1):
            rates += [start if place % 2 == 0 else end for place in range(share)]
        else:
            rates += [start * (end / start) ** ((place + 1) / (share + 1)) for place in range(share)]
    return tuple(sorted(rounded(rate) for rate in rates))


def recorded_steps(run_dir: Path) -> list[Step]:
    """Return every step that the trials in `run_dir` hold; none where nothing was recorded yet."""
    try:
        return steps_of(Run.of(read_run(run_dir)))
    except RecordError:
        return []
