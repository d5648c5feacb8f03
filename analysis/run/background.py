"""Compiles that held nobody up: what the requests that ran meanwhile took, and their share of the tail.

While code compiles on another thread or in another process, the server goes on with code that is not compiled yet. No
request waits, so there is no spike to join an event to: latency stands on a plateau until the compiled code is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.run.compile_events import BACKGROUND, held_s, windows_of
from analysis.run.run import Run
from analysis.statistics.quantiles import quantile

_Q = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """The arm's background compiles while it served. NaN for what no request tells.

    `share_pct` is how much of p99 goes with them: what p99 is less over the requests that met none, as a share of p99
    over all. It is what went together and no proof of a cause: who came meanwhile may have been held up by more.
    """

    events: int
    seconds: float  # in which one ran
    requests: int  # that ran meanwhile
    of: int  # completed requests that are judged
    tail_pct: float  # of the slowest hundredth of them, those that ran meanwhile
    p99_ms: float
    p99_outside_ms: float  # over the requests that met none
    share_pct: float


def plateau(run: Run, arm: str, metric: str) -> Plateau:
    """What background compiles were to the arm's `metric` (ttft or e2e)."""
    events = [event for event in run.serving_events(arm) if event.kind == BACKGROUND]
    requests, own = run.requests, run.answered(arm)
    met = np.zeros(own.size, dtype=np.bool_)
    for trial, replica in {(event.trial, event.replica) for event in events}:
        spans = [(event.start_ns, event.end_ns) for event in events if (event.trial, event.replica) == (trial, replica)]
        here = requests.trial[own] == trial
        if replica in requests.replicas:
            place = requests.replica[own]
            here &= (place < 0) | (place == requests.replicas.index(replica or ""))
        met |= here & windows_of(spans).touch(requests.start_ns[own], requests.end_ns[own])
    values = requests.metric_ms(metric)[own]
    whole, outside = quantile(values, _Q), quantile(values[~met], _Q)
    slowest = values >= whole if own.size else met
    return Plateau(
        events=len(events),
        seconds=held_s(events),
        requests=int(met.sum()),
        of=int(own.size),
        tail_pct=100.0 * float(met[slowest].mean()) if slowest.any() else math.nan,
        p99_ms=whole,
        p99_outside_ms=outside,
        share_pct=max(0.0, 100.0 * (1.0 - outside / whole)) if whole > 0 and not math.isnan(outside) else math.nan,
    )
