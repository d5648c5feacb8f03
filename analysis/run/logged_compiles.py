"""Compiles of which a log reports no length: they last as long as the stall in which their line lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.run.attribution import attribute
from analysis.run.client_stalls import HOST, Stall, client_stalls
from analysis.run.compile_events import CompileEvent
from analysis.run.run import Run

LENGTH_FROM = "length_from"  # the column of such an event that says where its length is from
STALL = "stall"

# A line is written when the compile begins or ends, and may arrive a little later, its own time in whole seconds.
_NEAR_NS = 1_000_000_000
_NO_COMPILE = frozenset({"limit_hit", "eager_fallback"})


def with_lengths(run: Run) -> Run:
    """The run in which every such compile has the length of the stall that it lies in.

    One that lies in no stall delayed no request for long enough to show, and keeps no length.
    """
    external = {arm for arm in run.arms if run.account(arm).external}
    unreported = [event.arm in external and _has_no_length(event) for event in run.events]
    if not any(unreported):
        return run
    seen = client_stalls(run.requests, external)
    events = tuple(
        _timed(event, seen[event.arm].stalls) if without else event
        for event, without in zip(run.events, unreported, strict=True)
    )
    events = tuple(sorted(events, key=lambda event: (event.trial, event.start_ns, event.arm, event.event_id)))
    return replace(run, events=events, attribution=attribute(run.requests, events))


def _has_no_length(event: CompileEvent) -> bool:
    return event.serving and event.start_ns == event.end_ns and event.kind not in _NO_COMPILE


def _timed(event: CompileEvent, stalls: Sequence[Stall]) -> CompileEvent:
    near = [
        stall
        for stall in stalls
        if stall.trial == event.trial
        and (event.replica is None or stall.replica in (None, event.replica))
        and stall.cause != HOST
        and stall.start_ns - _NEAR_NS <= event.start_ns <= stall.end_ns + _NEAR_NS
    ]
    if not near:
        return event
    longest = max(near, key=lambda stall: stall.seconds)
    row = {**event.row, LENGTH_FROM: STALL}
    return replace(event, start_ns=longest.start_ns, end_ns=longest.end_ns, row=row)
