"""How far what shows from outside agrees with what the server's own telemetry says of its compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.blackbox.stalls import COMPILE, FLOOR_NS, Stall
from analysis.blackbox.view import Outside
from analysis.run.spikes import CompileEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Compiles by telemetry against stalls from outside, on one arm.

    Compiles that overlap are one. Those too short to show, and those that met no request, are left out.
    """

    telemetry: int
    seen: int  # of them, those in which a stall of any cause was seen
    called: int  # of them, those in which a stall was called a compile
    extra: int  # calls in which the telemetry has no compile
    onset_error_ms: float  # median over the stalls that met a compile, to the first that each met; NaN for none

    @property
    def missed(self) -> int:
        """Compiles that were not called."""
        return self.telemetry - self.called


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compile:
    trial: int
    replica: str
    start_ns: int
    end_ns: int

    def meets(self, stall: Stall) -> bool:
        """Whether the stall overlaps it on its replica, for longer than clocks and the network may differ."""
        same = stall.trial == self.trial and (not self.replica or stall.replica in (None, self.replica))
        return same and min(stall.end_ns, self.end_ns) - max(stall.start_ns, self.start_ns) > _CLOCKS_NS


_CLOCKS_NS = 50_000_000


def agreement_of(outside: Outside, events: Sequence[CompileEvent], hits: Sequence[int]) -> Agreement:
    """The agreement on the arm; `hits` is how many requests each of `events` held up.

    A stall and a compile are the same when they overlap in time, in one trial and on one replica.
    """
    own = [
        (event, hit)
        for event, hit in zip(events, hits, strict=True)
        if event.arm == outside.arm and event.serving and event.stalls
    ]
    every = _compiles([event for event, _ in own])
    visible = [
        one for one in _compiles([event for event, hit in own if hit > 0]) if one.end_ns - one.start_ns >= FLOOR_NS
    ]
    called = [stall for stall in outside.stalls if stall.cause == COMPILE]
    errors = []
    for stall in outside.stalls:
        first = min((one.start_ns for one in visible if one.meets(stall)), default=None)
        if first is not None:
            errors.append(abs(stall.start_ns - first) / 1e6)
    return Agreement(
        telemetry=len(visible),
        seen=sum(any(one.meets(stall) for stall in outside.stalls) for one in visible),
        called=sum(any(one.meets(stall) for stall in called) for one in visible),
        # A compile too short to show may still have made a stall.
        extra=sum(not any(one.meets(stall) for one in every) for stall in called),
        onset_error_ms=float(np.median(errors)) if errors else math.nan,
    )


def _compiles(events: Sequence[CompileEvent]) -> list[_Compile]:
    """The events in order of time, those of one replica that overlap as one."""
    compiles = []
    for trial, replica in sorted({(event.trial, event.replica or "") for event in events}):
        spans: list[list[int]] = []
        for event in sorted(events, key=lambda event: event.start_ns):
            if (event.trial, event.replica or "") != (trial, replica):
                continue
            if spans and event.start_ns < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], event.end_ns)
            else:
                spans.append([event.start_ns, event.end_ns])
        compiles += [_Compile(trial=trial, replica=replica, start_ns=start, end_ns=end) for start, end in spans]
    return compiles
