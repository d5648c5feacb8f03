"""How far what shows from outside agrees with what the server's own telemetry says of its compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.blackbox.stalls import COMPILE, FLOOR_NS, Stall
from analysis.blackbox.view import Outside
from analysis.run.spikes import BACKGROUND, CompileEvent, Windows, windows_of


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


_CLOCKS_NS = 50_000_000  # that clocks and the network may differ by


def agreement_of(outside: Outside, events: Sequence[CompileEvent], hits: Sequence[int]) -> Agreement:
    """The agreement on the arm; `hits` is how many requests each of `events` held up.

    A stall and a compile are the same when they overlap in time, in one trial and on one replica.
    """
    own = [
        (event, hit)
        for event, hit in zip(events, hits, strict=True)
        if event.arm == outside.arm and event.serving and event.stalls
    ]
    every = _merged([event for event, _ in own])
    compiles = _merged([event for event, hit in own if hit > 0])
    visible = [event for event in compiles if event.end_ns - event.start_ns >= FLOOR_NS]
    called = [stall for stall in outside.stalls if stall.cause == COMPILE]
    errors = []
    for stall in outside.stalls:
        first = min((event.start_ns for event in visible if _meet(event, stall)), default=None)
        if first is not None:
            errors.append(abs(stall.start_ns - first) / 1e6)
    return Agreement(
        telemetry=len(visible),
        seen=sum(any(_meet(event, stall) for stall in outside.stalls) for event in visible),
        called=sum(any(_meet(event, stall) for stall in called) for event in visible),
        # A compile too short to show may still have made a stall.
        extra=sum(not any(_meet(event, stall) for event in every) for stall in called),
        onset_error_ms=float(np.median(errors)) if errors else math.nan,
    )


def is_explained(stall: Stall, events: Sequence[CompileEvent]) -> bool:
    """Whether compiles of the arm lasted for most of the stall: for half of it, or for all but what is too short to be
    looked at."""
    windows = compile_windows(events, stall.arm, stall.trial, stall.replica)
    start, end = np.array([stall.start_ns]), np.array([stall.end_ns])
    left = (stall.end_ns - stall.start_ns) - float(windows.overlap_ns(start, end)[0])
    return left <= max(FLOOR_NS, 0.5 * (stall.end_ns - stall.start_ns))


def compile_windows(events: Sequence[CompileEvent], arm: str, trial: int, replica: str | None) -> Windows:
    """When the arm compiled, by its events of any phase, and of any kind that may hold a request up; with `replica`, on
    that one or on one not named."""
    return windows_of(
        (event.start_ns, event.end_ns)
        for event in events
        if (event.arm, event.trial) == (arm, trial)
        and (replica is None or event.replica in (None, replica))
        and event.kind != BACKGROUND
    )


def _meet(event: CompileEvent, stall: Stall) -> bool:
    same = stall.trial == event.trial and (not event.replica or stall.replica in (None, event.replica))
    return same and min(stall.end_ns, event.end_ns) - max(stall.start_ns, event.start_ns) > _CLOCKS_NS


def _merged(events: Sequence[CompileEvent]) -> list[CompileEvent]:
    """The events, those of one replica that overlap as one."""
    merged: dict[tuple[int, str | None], list[CompileEvent]] = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        own = merged.setdefault((event.trial, event.replica), [])
        if own and event.start_ns < own[-1].end_ns:
            own[-1] = replace(own[-1], end_ns=max(own[-1].end_ns, event.end_ns))
        else:
            own.append(event)
    return [event for own in merged.values() for event in own]
