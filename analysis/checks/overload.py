"""Whether the arms were offered more than they can serve: what they left undone grew through a whole trial.

Overload raises the fewest requests under way, or turned away, from window to window (docs/explanation/method.md,
"Overload").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints, counts_of, parts
from tailgate.analysis.checks.check import OVERLOADED, Check, Evidence, rule
from tailgate.analysis.run.run import Run
from tailgate.analysis.wording import counted, digits, listed

WINDOWS = 8  # the first is left out: it fills the server
FEWEST = 10  # the fewest requests in a window that count
LEAST_UNDONE = 0.05  # share of what was offered that must be left undone
_BINS = 40  # times in a window at which requests under way are counted
_MOST_FALLS = 1  # of the floor, from window to window
_MOST_AT_ONCE = 0.5  # of the whole rise in one window: more is a jam or a stall
_SLOWER = 1.5  # how much longer answers take in the last window than in the first two
_LEAST_SHED = 0.02  # share of requests turned away in each window
_HANGING = 4.0  # a request that took so many times the median without an answer hung, whatever the load
# Of a trial too short for windows: the fewest requests, and shares without an answer when the traffic ends.
_SHORT_FEWEST = 30
_SHORT_UNDONE, _SHORT_STUCK = 1 / 3, 1 / 2
_SHORT_SLOWER = 2.0  # how much longer the last third of the requests takes than the first
_BELOW = 0.8  # of what the arms answered: a rate at which a queue stays short


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one arm was offered and what it answered in one trial, in requests/s, without the first window."""

    offered_rps: float
    answered_rps: float
    overloaded: bool


def load_of(start_s: Floats, end_s: Floats, answered: Bools, shed: Bools, *, seconds: float) -> Load | None:
    """Return the load on one arm in one trial of `seconds`, from arrays of shape (n,) in seconds since its first
    request.

    `shed` marks requests that the server refused for lack of space or time (RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED).
    None if there are too few.
    """
    if seconds <= 0 or len(start_s) < WINDOWS * FEWEST:
        return _short_load(start_s, end_s, answered, shed, seconds=seconds)
    width = seconds / WINDOWS
    went = _bins(end_s, width, WINDOWS)
    arrivals = counts_of(_bins(start_s, width, WINDOWS), WINDOWS + 1)[:WINDOWS]
    answers = counts_of(went[answered], WINDOWS + 1)[:WINDOWS]
    if arrivals.min() < FEWEST or not answers[0]:
        return _short_load(start_s, end_s, answered, shed, seconds=seconds)
    age = end_s - start_s
    medians = np.empty(WINDOWS)
    for window in range(WINDOWS):
        own = answered & (went == window)
        medians[window] = float(np.median(age[own])) if answers[window] else medians[window - 1]
    # Requests that hung are no sign of load, nor are those that failed for other reasons.
    turned = shed & (went < WINDOWS)
    turned[turned] &= age[turned] <= _HANGING * medians[went[turned]]
    undone = _undone(start_s, end_s, turned, width)
    floors = undone.reshape(WINDOWS, _BINS).min(axis=1)[1:]
    rises = np.diff(floors)
    total = float(floors[-1] - floors[0])
    away = np.bincount(went[turned], minlength=WINDOWS)[:WINDOWS]
    grew = (
        int((rises <= 0).sum()) <= _MOST_FALLS
        and total >= max(FEWEST, LEAST_UNDONE * float(arrivals[2:].sum()))
        and float(rises.max()) <= _MOST_AT_ONCE * total
    )
    slower = medians[-1] >= _SLOWER * medians[:2].min()
    throughout = bool((away[1:] >= _LEAST_SHED * arrivals[1:]).all())
    span = seconds - width
    return Load(
        offered_rps=float(arrivals[1:].sum()) / span,
        answered_rps=float(answers[1:].sum()) / span,
        overloaded=bool(grew and (slower or throughout)),
    )


def _short_load(start_s: Floats, end_s: Floats, answered: Bools, shed: Bools, *, seconds: float) -> Load | None:
    """Return the load of a trial that is too short for windows; None if it has too few requests to tell."""
    own = np.flatnonzero(answered | shed)
    if seconds <= 0 or len(own) < _SHORT_FEWEST or not answered.any():
        return None
    own = own[np.argsort(start_s[own])]
    age, third = (end_s - start_s)[own], len(own) // 3
    undone = float((shed[own] | (end_s[own] > seconds)).mean())
    slower = np.median(age[-third:]) >= _SHORT_SLOWER * np.median(age[:third])
    stuck = np.median(age) >= seconds
    overloaded = bool((undone >= _SHORT_UNDONE and slower) or (undone >= _SHORT_STUCK and stuck))
    answered_rps = float(answered.sum()) / max(seconds, float(end_s[answered].max()))
    return Load(offered_rps=len(own) / seconds, answered_rps=answered_rps, overloaded=overloaded)


def _bins(at_s: Floats, width: float, most: int) -> Ints:
    """Return the bin of each time, `most` for times beyond the trial."""
    found = np.empty(len(at_s), dtype=np.int16)
    for part in parts(len(at_s)):
        found[part] = np.clip(at_s[part] / width, 0, most)
    return found


def _undone(start_s: Floats, end_s: Floats, turned: Bools, width: float) -> Ints:
    """Count requests in flight or turned away by the end of each bin, shape (WINDOWS * _BINS,)."""
    bins = WINDOWS * _BINS
    each = width / _BINS

    def counted(at_s: Floats) -> Ints:
        return np.cumsum(counts_of(_bins(at_s, each, bins), bins + 1)[:bins])

    return counted(start_s) - counted(end_s) + counted(end_s[turned])


# The ratio of two growing queues says nothing of the arms, nor does an objective that a short queue still keeps. One
# that is missed stays missed.
@rule(
    "overload",
    sees="The control and the arm were offered more than they can serve, in at least half of the trials. A missed "
    "objective stays missed.",
    remedy='Lower the rate, or search for what the arms hold (traffic.arrivals = "saturation").',
    opens=("noninferiority", "slo"),
    keeps=("recompile", "error", "slo"),
    rank=OVERLOADED,
    in_search=False,  # a search overloads the arms on purpose
)
def overload(seen: Evidence) -> Iterator[Check]:
    """An arm that is overloaded while the control is not is the weaker one."""
    if seen.run.reported_open_loop is False:
        return  # a closed loop cannot overload
    control = seen.run.control
    of_control = _loads(seen.run, control)
    for arm in seen.run.treatments:
        pairs = zip(of_control, _loads(seen.run, arm), strict=True)
        both = [(base, own) for base, own in pairs if base is not None and own is not None]
        over = [pair for pair in both if pair[0].overloaded and pair[1].overloaded]
        if not over:
            yield from [overload.found([])] if both else []
            continue
        offered = fmean(load.offered_rps for pair in over for load in pair)
        answered = [fmean(load.answered_rps for load in of_arm) for of_arm in zip(*over, strict=True)]
        fault = (
            f"{control} and {arm} were overloaded in {len(over)} of {counted(len(both), 'trial')}: of "
            f"{digits(offered)} requests/s they answered {listed([digits(rate) for rate in answered])}"
        )
        yield overload.found(
            [fault] if 2 * len(over) >= len(both) else [],
            arm=arm,
            remedy=f"Lower the rate to {digits(_BELOW * min(answered), 2)} requests/s or less, or search for what the "
            'arms hold (traffic.arrivals = "saturation").',
        )


def _loads(run: Run, arm: str) -> list[Load | None]:
    requests = run.requests
    own = run.of_arm(arm) & ~requests.broken
    loads = []
    for trial in run.trials:
        rows = requests.rows(own, trial.number)
        start_s, end_s = ((column[rows] - trial.first_ns) / 1e9 for column in (requests.start_ns, requests.end_ns))
        seconds = trial.seconds - (trial.first_ns - trial.start_ns) / 1e9
        loads.append(load_of(start_s, end_s, requests.ok[rows], requests.shed[rows], seconds=seconds))
    return loads
