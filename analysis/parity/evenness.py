"""Whether a quantised arm errs alike everywhere: a graph that computes nonsense at one size does not.

Its error is many times the control's by design, and a mean over texts does not see one prompt of many. What weights of
fewer bits cost is about the same at every size, so that the arm's own typical error is the yardstick of its worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from analysis.arrays import Floats
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.parity.finding import Finding
from analysis.parity.flips import Places
from analysis.parity.measures import EPSILON, Measures, median
from analysis.wording import counted

# An arm of int8 that is right: 1.6 and 4.7 at most over 40 prompts of 12 tokens or fewer, random weights.
PROMPT_LIMIT = 3.0
POSITION_LIMIT = 10.0
# Logits of something else are as far away as they are long. What is uneven and less far than this may be the weights.
_NONSENSE = 0.5
_LEAST_POSITIONS = 6  # of a prompt: the median of fewer is a matter of luck, and their positions are judged one by one


def judge_evenness(name: str, own: Measures, control: Measures | None, place: Places, dtype: str) -> Iterator[Finding]:
    """No prompt, and no position, errs much more than is typical of the arm `name`.

    The yardstick is the median of the arm's own errors over all positions, or one rounding of the dtype where that is
    less. Where the control itself errs more than is typical of it, the question is a sensitive one, and the arm may err
    more in proportion; `control` is None without a float64 reference. Errors must be finite.
    """
    by_position = _multiples(own.error, control.error if control is not None else None, dtype)
    at = int(np.argmax(by_position))
    groups = [np.flatnonzero(place.request == number) for number in range(len(place.lengths))]
    whole = [group for group in groups if len(group) >= _LEAST_POSITIONS]
    if whole:
        errors = np.array([median(own.error[group]) for group in whole])
        calm = np.array([median(control.error[group]) for group in whole]) if control is not None else None
        by_prompt = _multiples(errors, calm, dtype)
        worst = int(np.argmax(by_prompt))
        request = int(place.request[whole[worst][0]])
        where = f"request {request} (prompt of {counted(place.prompts[request], 'token')})"
        seen = f"The typical error of {name} at {where}"
        yield _finding("worst prompt", seen, by_prompt[worst], PROMPT_LIMIT, errors[worst])
    yield _finding(
        "worst position", f"The error of {name} at {place.text(at)}", by_position[at], POSITION_LIMIT, own.error[at]
    )


def _multiples(errors: Floats, control: Floats | None, dtype: str) -> Floats:
    """Each error as a multiple of what is typical, and of the control's own excess there."""
    typical = max(median(errors), EPSILON[dtype])
    if control is None or not np.isfinite(control).all():
        return np.asarray(errors / typical)
    calm = median(control)
    return np.asarray(errors / typical / (np.maximum(1.0, control / calm) if calm > 0 else 1.0))


def _finding(name: str, seen: str, value: float, limit: float, error: float) -> Finding:
    ok = float(value) <= limit and not math.isnan(value)
    return Finding(
        name=name,
        verdict=PASS if ok else INCONCLUSIVE if error < _NONSENSE else FAIL,
        value=float(value),
        limit=limit,
        reason=f"{seen} is {value:.3g} times what is typical of it, and no other is more, limit {limit:g}"
        + ("." if ok else ": what runs at that size may compute something else."),
    )
