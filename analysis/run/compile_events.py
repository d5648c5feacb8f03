"""Compile events: which hold the device, when they ran, and the stretches of time that they cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.requests import Requests

# Work on another thread or in another process: other code serves meanwhile.
BACKGROUND = "background_compile"
# Kinds that do not hold the device while they last.
_RUNS_ON = frozenset({"eager_fallback", BACKGROUND})
# A kernel that another compiler than torch's built at its first call.
JIT = "jit"
# Kinds that say that a shape was not foreseen.
RECOMPILE_KINDS = frozenset({"compile", "recompile", "limit_hit", JIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """One row of compile_events."""

    event_id: str
    trial: int
    arm: str
    replica: str | None
    kind: str
    start_ns: int
    end_ns: int
    serving: bool
    stalls: bool  # it held the device while it lasted
    request_ids: tuple[str, ...]
    row: dict[str, object]  # the other columns, as they were

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def compile_events(table: pa.Table | None, requests: Requests) -> tuple[CompileEvent, ...]:
    """Return the placed events of `table` by time, each id once (a stream that resumes repeats events).

    An event without a phase is serving if it ends after the first request.
    """
    if table is None:
        return ()
    spans = requests.spans()
    events = []
    seen: set[tuple[int, str, str]] = set()
    for position, row in enumerate(table.to_pylist()):
        trial, phase, kind = row["trial"], row["phase"], row["kind"]
        identity = (trial, row["arm"], row["event_id"] or f"event-{position}")
        if identity in seen:
            continue
        seen.add(identity)
        events.append(
            CompileEvent(
                event_id=identity[2],
                trial=trial,
                arm=row["arm"],
                replica=row["replica"] or None,
                kind=kind,
                start_ns=row["start_ns"],
                end_ns=row["end_ns"],
                serving=phase == "serving" if phase else row["end_ns"] > spans.get(trial, (0, 0, 0))[0],
                stalls=kind not in _RUNS_ON,
                request_ids=tuple(name for name in row["request_ids"] or () if name is not None),
                row=row,
            )
        )
    return tuple(sorted(events, key=lambda event: (event.trial, event.start_ns, event.arm, event.event_id)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Stretches of time that do not touch, in order."""

    start_ns: Ints
    end_ns: Ints

    @property
    def seconds(self) -> float:
        return float((self.end_ns - self.start_ns).sum()) / 1e9

    def overlap_ns(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """Return how much of each stretch from `start_ns` to `end_ns` lies in the windows."""
        if not self.start_ns.size:
            return np.zeros(len(start_ns))
        base = int(self.start_ns[0])
        edges = np.column_stack((self.start_ns, self.end_ns)).ravel() - base
        passed = np.column_stack((np.zeros(len(self.start_ns), np.int64), self.end_ns - self.start_ns)).ravel()
        held = np.cumsum(passed).astype(np.float64)
        upto = np.interp(np.maximum(end_ns, start_ns) - base, edges, held)
        return np.asarray(upto - np.interp(start_ns - base, edges, held))

    def touch(self, start_ns: Ints, end_ns: Ints) -> Bools:
        """Mask the stretches from `start_ns` to `end_ns` that share an instant with a window."""
        over = np.searchsorted(self.end_ns, start_ns, side="right")
        return np.asarray(over < np.searchsorted(self.start_ns, end_ns, side="left"))


def windows_of(spans: Iterable[tuple[int, int]]) -> Windows:
    """Return the union of the spans."""
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    table = np.array(merged, dtype=np.int64).reshape(-1, 2)
    return Windows(start_ns=table[:, 0], end_ns=table[:, 1])


def stall_windows(events: Iterable[CompileEvent], *, arm: str, trial: int) -> Windows:
    """Return when a compile ran on `arm` while it served in `trial`."""
    return windows_of(
        (event.start_ns, event.end_ns)
        for event in events
        if event.serving and event.stalls and (event.arm, event.trial) == (arm, trial)
    )


def held_s(events: Iterable[CompileEvent]) -> float:
    """Return the seconds in which any event lasted, summed over trials and replicas."""
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for event in events:
        spans.setdefault((event.trial, event.replica or ""), []).append((event.start_ns, event.end_ns))
    return sum((windows_of(spans[place]).seconds for place in sorted(spans)), start=0.0)
