"""Whether an arm was offered more than it can serve: what it left undone grew through a whole trial.

A queue that a burst or a stall makes comes and empties again. Under overload it never empties: arrivals outnumber
completions in every stretch of the trial. So the trial is cut into windows, and the lowest number of requests that were
under way or had been turned away is taken from each. A jam raises that floor in one window or two and lets it fall
again; overload raises it from window to window, and those who are answered wait longer and longer, or others are turned
away throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.arrays import Bools, Floats, Ints

WINDOWS = 8  # the first is left out: it fills the server
FEWEST = 10  # the fewest requests in a window that count
LEAST_UNDONE = 0.05  # share of what was offered that must be left undone
_BINS = 40  # times in a window at which requests under way are counted
_MOST_FALLS = 1  # of the floor, from window to window
_MOST_AT_ONCE = 0.5  # of the whole rise in one window: more is a jam or a stall
_SLOWER = 1.5  # how much longer answers take in the last window than in the first two
_LEAST_SHED = 0.02  # share of requests turned away in each window
_HANGING = 4.0  # a request that took so many times the median without an answer hung, whatever the load
_MOST_SAMPLED = 20_000  # requests whose times make a window's median
MOST_COUNTED = 400_000  # requests of an arm and a trial: of more, every k-th is enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one arm was offered and what it answered in one trial, the first window left out. Rates are requests/s.

    `waiting` counts the requests under way when the traffic ended, `shed` those that the server had no room or no time
    for.
    """

    offered_rps: float
    answered_rps: float
    waiting: int
    shed: int
    overloaded: bool


def load_of(
    start_s: Floats, end_s: Floats, answered: Bools, shed: Bools, *, seconds: float, every: int = 1
) -> Load | None:
    """The load on one arm in one trial of `seconds`, all arrays of shape (n,) in seconds from its first request.

    The arrays hold one request of `every`: a sample is enough where there are very many.
    A request that ended after the trial was under way when it ended. `shed` marks those that ended without an answer
    for want of room or time (RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED). None where a window has too few requests,
    or the first has no answer: n = 0 is such a case.
    """
    if seconds <= 0 or len(start_s) < WINDOWS * FEWEST:
        return None
    width = seconds / WINDOWS
    came = _window(start_s, width)
    went = _window(end_s, width)
    arrivals = np.bincount(came, minlength=WINDOWS)[:WINDOWS]
    answers = np.bincount(went[answered], minlength=WINDOWS)[:WINDOWS]
    if arrivals.min() < FEWEST or not answers[0]:
        return None
    age = end_s - start_s
    medians = np.empty(WINDOWS)
    for window in range(WINDOWS):
        own = answered & (went == window)
        medians[window] = _median(age[own]) if answers[window] else medians[window - 1]
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
        offered_rps=every * float(arrivals[1:].sum()) / span,
        answered_rps=every * float(answers[1:].sum()) / span,
        waiting=every * int(((start_s <= seconds) & (end_s > seconds)).sum()),
        shed=every * int(turned.sum()),
        overloaded=bool(grew and (slower or throughout)),
    )


def _window(at_s: Floats, width: float) -> Ints:
    """The window of each time; WINDOWS for what lies beyond the trial."""
    return np.clip((at_s / width).astype(np.int64), 0, WINDOWS)


def _undone(start_s: Floats, end_s: Floats, turned: Bools, width: float) -> Ints:
    """Requests under way or turned away by the end of each bin, shape (WINDOWS * _BINS,)."""
    bins = WINDOWS * _BINS
    each = width / _BINS

    def counted(at_s: Floats) -> Ints:
        place = np.clip((at_s / each).astype(np.int64), 0, bins)
        return np.cumsum(np.bincount(place, minlength=bins)[:bins])

    return counted(start_s) - counted(end_s[~turned])


def _median(values: Floats) -> float:
    return float(np.median(values[:: max(1, len(values) // _MOST_SAMPLED)]))
