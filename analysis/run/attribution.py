"""Which requests compiles delayed: by trigger, by overlap in time, and by the busy period that a compile starts.

docs/explanation/method.md, "Which compile caused what", has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.request_columns import hashes
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.run.compile_events import CompileEvent, Windows, windows_of

CAUSES = ("no compile", "in the backlog of a compile", "during a compile")
OTHER, _BACKLOG, _DURING = range(3)
NO_REQUESTS = np.zeros(0, dtype=np.int64)

_SAMPLES = 601
# The level to come back to is at most this quantile of a trial's levels, since a queue may have been there before.
_LEVEL_QUANTILE = 0.25
# A busy period lasts at most so many times as long as its compiles: the queue of a server at 95 % load.
_LONGEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What compiles did to each request, one entry a request."""

    stall_ms: Floats  # time that a compile delayed the request
    most_ms: Floats  # the most that compiles can have delayed it: those of its busy period, up to its end
    cause: npt.NDArray[np.int8]  # index into CAUSES
    hit: Bools  # it triggered a compile or waited for one
    event_requests: tuple[Ints, ...]  # for each event, the requests it hit
    event_backlog: tuple[Ints, ...]  # for each event, the requests that came later in its busy period


def attribute(requests: Requests, events: Sequence[CompileEvent]) -> Attribution:
    """Join all requests to the serving compile events of their own arm and replica."""
    rows = len(requests)
    usable = ~requests.broken
    relevant = [event for event in events if event.serving and event.stalls]
    if not relevant and not (usable & (requests.stall_ns > 0)).any():
        # One value for all rows takes no memory.
        none, never, nothing = (np.broadcast_to(value, rows) for value in (0.0, False, np.int8(OTHER)))
        empty = (NO_REQUESTS,) * len(events)
        return Attribution(
            stall_ms=none, most_ms=none, cause=nothing, hit=never, event_requests=empty, event_backlog=empty
        )
    overlap = np.zeros(rows)
    touched: dict[int, Ints] = {}
    for server in _replicas(requests, relevant):
        windows = windows_of((event.start_ns, event.end_ns) for event in server.events)
        overlap[server.rows] = windows.overlap_ns(server.start_ns, server.end_ns)
        for event in server.events:
            touched[id(event)] = np.union1d(touched.get(id(event), NO_REQUESTS), server.in_flight(event))
    reported = requests.stall_ns
    held = np.flatnonzero(usable & ((reported > 0) | ((reported < 0) & (overlap > 0))))
    # Most requests met no compile, and what is not written to takes no memory.
    stall = np.zeros(rows)
    stall[held] = np.where(reported[held] >= 0, reported[held], overlap[held]) / 1e6
    hit = usable & (stall > 0)
    hits: dict[int, Ints] = {}
    for event, named in zip(relevant, _requests_named(requests, relevant), strict=True):
        hit[named] = True
        in_flight = touched.get(id(event), NO_REQUESTS)
        hits[id(event)] = np.union1d(in_flight[stall[in_flight] > 0], named)
    most, later = np.zeros(rows), np.zeros(rows, dtype=np.bool_)
    most[held] = stall[held]
    backlogs: dict[int, Ints] = {}
    for arm, trial in sorted({(event.arm, event.trial) for event in relevant}):
        stalling = [event for event in relevant if (event.arm, event.trial) == (arm, trial) and hits[id(event)].size]
        if not stalling:
            continue
        server = _Server(requests, _of_trial(requests, arm, trial), stalling)
        periods, compiles = server.busy_periods()
        codes = requests.replica[server.rows]
        # What a compile keeps its replica from doing, the splitter spreads over all of them.
        bound = _most_ns(periods, compiles, server.start_ns, server.end_ns) / 1e6
        bound /= max(1, len(np.unique(codes[codes >= 0])))
        later[server.rows] = bound > 0
        most[server.rows] = np.maximum(most[server.rows], bound)
        for event in stalling:
            period = int(np.searchsorted(periods.start_ns, event.start_ns, side="right")) - 1
            first, last = np.searchsorted(server.start_ns, (event.end_ns, periods.end_ns[period]))
            backlogs[id(event)] = np.sort(server.rows[first:last])
    cause = np.full(rows, OTHER, dtype=np.int8)
    cause[later] = _BACKLOG
    cause[usable & ((overlap > 0) | hit)] = _DURING
    return Attribution(
        stall_ms=stall,
        most_ms=most,
        cause=cause,
        hit=hit,
        event_requests=tuple(hits.get(id(event), NO_REQUESTS) for event in events),
        event_backlog=tuple(backlogs.get(id(event), NO_REQUESTS) for event in events),
    )


class _Server:
    """Requests that share a server in one trial, by start, each in flight until it ends; and its compile events."""

    def __init__(self, requests: Requests, rows: Ints, events: Sequence[CompileEvent]) -> None:
        self.events, self.rows = events, rows
        self.start_ns, self.end_ns = requests.start_ns[rows], requests.end_ns[rows]
        self.latest_ns = np.maximum.accumulate(self.end_ns)  # the latest end so far
        self.ends_ns = np.sort(self.end_ns)

    def in_flight(self, event: CompileEvent) -> Ints:
        """Return the requests that were in flight at some moment of the event."""
        # None before `low` is still in flight and none from `high` on has begun.
        low = int(np.searchsorted(self.latest_ns, event.start_ns, side="right"))
        high = int(np.searchsorted(self.start_ns, event.end_ns, side="left"))
        return self.rows[low:high][self.end_ns[low:high] > event.start_ns]

    def level(self, at_ns: Ints) -> Ints:
        """Count the requests in flight at each moment."""
        begun = np.searchsorted(self.start_ns, at_ns, side="right")
        return np.asarray(begun - np.searchsorted(self.ends_ns, at_ns, side="right"))

    def busy_periods(self) -> tuple[Windows, Windows]:
        """Return the busy periods that the events start, and the compiles.

        A busy period lasts from the start of a compile until the requests in flight are back to their level at that
        start. A compile within it prolongs it, and the level stays that of the first. A level that does not come back
        ends the period with the trial's last request, and at the latest after twenty times the seconds of its compiles.
        """
        moments = np.linspace(int(self.start_ns[0]), int(self.start_ns[-1]), _SAMPLES).astype(np.int64)
        usual = float(np.quantile(self.level(moments), _LEVEL_QUANTILE))
        compiles = windows_of((event.start_ns, event.end_ns) for event in self.events)
        periods: list[list[int]] = []
        level, held_ns = 0.0, 0
        for start, end in zip(compiles.start_ns.tolist(), compiles.end_ns.tolist(), strict=True):
            if not periods or start > periods[-1][1]:
                level, held_ns = min(usual, float(self.level(np.array([start]))[0])), 0
                periods.append([start, end])
            held_ns += end - start
            last = min(end + _LONGEST * held_ns, int(max(end, self.ends_ns[-1])))
            ends = np.append(end, self.ends_ns[slice(*np.searchsorted(self.ends_ns, (end, last)))])
            back = np.flatnonzero(self.level(ends) <= level)
            periods[-1][1] = int(ends[back[0]]) if back.size else last
        table = np.array(periods, dtype=np.int64).reshape(-1, 2)
        return Windows(start_ns=table[:, 0], end_ns=table[:, 1]), compiles


def _most_ns(periods: Windows, compiles: Windows, start_ns: Ints, end_ns: Ints) -> Floats:
    """Return the most that compiles delay a request sent at `start_ns` in a busy period; 0 outside of all.

    That is their seconds from the period's start on, and less after them: the queue drains at an even rate.
    """
    place = np.maximum(np.searchsorted(periods.start_ns, start_ns, side="right") - 1, 0)
    inside = (start_ns > periods.start_ns[place]) & (start_ns < periods.end_ns[place])
    compile_at = np.maximum(np.searchsorted(compiles.start_ns, start_ns, side="right") - 1, 0)
    drains_ns = np.maximum(periods.end_ns[place] - compiles.end_ns[compile_at], 1)
    share = np.clip((periods.end_ns[place] - start_ns) / drains_ns, 0.0, 1.0)
    most = share * compiles.overlap_ns(np.where(inside, periods.start_ns[place], start_ns), end_ns)
    return np.where(inside, most, 0.0)


def _of_trial(requests: Requests, arm: str, trial: int) -> Ints:
    own = requests.sound(arm, trial)
    return own[np.argsort(requests.start_ns[own], kind="stable")]


def _replicas(requests: Requests, events: Sequence[CompileEvent]) -> list[_Server]:
    """Return the replicas on which the events were.

    Requests that name no replica belong to the only one that requests and events name. If these name several, such
    requests form a server of their own, which every event stops.
    """
    servers = []
    for arm, trial in sorted({(event.arm, event.trial) for event in events if event.arm in requests.arms}):
        of_arm = [event for event in events if (event.arm, event.trial) == (arm, trial)]
        own = _of_trial(requests, arm, trial)
        codes = requests.replica[own]
        named = {code: requests.replicas[code] for code in np.unique(codes[codes >= 0]).tolist()}
        groups: list[tuple[str | None, Ints]] = [(None, own)]
        if len({*named.values(), *(event.replica for event in of_arm if event.replica is not None)}) > 1:
            groups = [(name, own[codes == code]) for code, name in (*named.items(), (-1, None))]
        for name, rows in groups:
            relevant = [event for event in of_arm if name is None or event.replica in (None, name)]
            if rows.size and relevant:
                servers.append(_Server(requests, rows, relevant))
    return servers


def _requests_named(requests: Requests, events: Sequence[CompileEvent]) -> list[Ints]:
    """Return for each event the requests that it names, on its own arm and trial."""
    rows = np.flatnonzero((requests.id > 0) & ~requests.broken)
    ids, arm, trial = requests.id[rows], requests.arm[rows], requests.trial[rows]
    code = {name: number for number, name in enumerate(requests.arms)}
    return [
        rows[
            np.isin(ids, hashes(pa.array(event.request_ids, pa.string())))
            & (arm == code.get(event.arm, -1))
            & (trial == event.trial)
        ]
        for event in events
    ]
