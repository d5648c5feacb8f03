"""The search for the load that arms hold: which rates come next, from the steps that were held and missed until now.

`tailgate run` with `traffic.arrivals = "saturation"`, `tailgate frontier` and the simulations search by `next_rates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.judging.load_steps import Step, steps_of, to_search
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from loadtests.traffic.rate_steps import closer, staircase


def next_rates(arms: Sequence[str], known: Sequence[Step], count: int, *, low: float, high: float) -> tuple[float, ...]:
    """Return `count` rates for the next trial of these arms: the staircase from `low` to `high` while nothing is known
    of any, then over what the `known` steps leave open of each. The same steps give the same rates."""
    brackets = [to_search(arm, known) for arm in arms]
    if all(bracket == (None, None) for bracket in brackets):
        return staircase(low, high, count)
    return closer(brackets, count, low=low, high=high)


def recorded_steps(run_dir: Path) -> list[Step]:
    """Return every step that the trials in `run_dir` hold; none where nothing was recorded yet."""
    try:
        return steps_of(Run.of(read_run(run_dir)))
    except RecordError:
        return []
