"""The backlog of a compile: who waited in the queue that it made, and how much earlier each would have been served.

A compile stops the server, and what comes meanwhile queues. After it the server works on at its usual rate, so that
queue is there until the server has had as much time to spare. The replay takes every request with the service that it
had, less the compile's own time in it, and lets it begin as soon as what it waited for allows: a slot, the request
before it, and whatever else held it. It is the recursion of Lindley (1952), over several slots that of Kiefer and
Wolfowitz (1955), from the begin of a compile to the moment from which both courses are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.ndimage import median_filter

from analysis.records import Requests
from analysis.spikes import BACKLOG, OTHER, Attribution, Backlog, CompileEvent, Windows, stall_windows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# What is shorter is not told from the network's own scatter.
_LEAST_US = 1_000
# A slot is free a moment before the front has said that its answer ended.
_SLACK_US = 10_000
# How far behind a compile its backlog is first looked for: so many times as long as it took, and so many seconds.
_REACH = 3
_REACH_US = 1_000_000


def with_backlog(requests: Requests, events: Sequence[CompileEvent], attribution: Attribution) -> Attribution:
    """The attribution with what each request waited in the backlog of compiles, beside what they held it up directly.

    The replicas of an arm are replayed together: while one compiles, the splitter sends more to the others. Without
    the server's times, the first token less the usual time to it stands for the begin of service.

    Two things are not known, so there are two bounds. At least: every request would have gone to the replica that it
    went to. At most: requests in the backlog would have been served at the pace at which others are, since a server
    that is full, or busy with prompts, is slower for each of them.
    """
    relevant = [event for event in events if event.serving and event.stalls and event.end_ns - event.start_ns > 0]
    if not relevant:
        return attribution
    shares = {bound: Backlog.none(len(requests)) for bound in _BOUNDS}
    behind: dict[int, Ints] = {}
    unserved = np.zeros(len(requests), dtype=np.bool_)
    for arm, trial in sorted({(event.arm, event.trial) for event in relevant if event.arm in requests.arms}):
        own = np.flatnonzero((requests.arm == requests.arms.index(arm)) & (requests.trial == trial) & ~requests.broken)
        visits = _visits(requests, attribution, own)
        if not visits.rows.size:
            continue
        windows = {
            replica: stall_windows(
                relevant, arm=arm, trial=trial, replica=requests.replicas[replica] if replica >= 0 else None
            )
            for replica in np.unique(visits.replica).tolist()
        }
        visits = _stalled(visits, windows, attribution)
        mine = [event for event in relevant if (event.arm, event.trial) == (arm, trial)]
        stalls = sorted((event.start_ns // 1000, event.end_ns // 1000) for event in mine)
        found = replay(visits, windows, stalls)
        _put(shares["likely"], visits, found, attribution)
        one = len(windows) == 1
        _put(shares["least"], visits, found if one else replay(visits, windows, stalls, routed=False), attribution)
        _put(shares["most"], visits, replay(_paced(visits, requests, found.touched), windows, stalls), attribution)
        for bound, choose in (("least", np.minimum), ("most", np.maximum)):
            for column, likely_ms in (
                (shares[bound].ms, shares["likely"].ms),
                (shares[bound].before_first_ms, shares["likely"].before_first_ms),
            ):
                column[visits.rows] = choose(column[visits.rows], likely_ms[visits.rows])
        late = shares["likely"].ms[visits.rows] > 0
        for event in mine:
            end_us = next((end for start, end in found.stretches if start <= event.start_ns // 1000 <= end), 0)
            inside = late & (visits.begin_us * 1000 >= event.start_ns) & (visits.begin_us <= end_us)
            behind[id(event)] = visits.rows[inside]
        failed = own[requests.failed[own] | requests.cut[own]]
        for start, end in found.stretches:
            unserved[failed] |= (requests.end_ns[failed] // 1000 > start) & (requests.start_ns[failed] // 1000 < end)
    cause = attribution.cause.copy()
    cause[(shares["likely"].ms > 0) & (cause == OTHER)] = BACKLOG
    nobody = np.zeros(0, dtype=np.int64)
    return replace(
        attribution,
        backlog=shares["likely"],
        backlog_least=shares["least"],
        backlog_most=shares["most"],
        unserved=unserved,
        cause=cause,
        event_backlog=tuple(behind.get(id(event), nobody) for event in events),
    )


_BOUNDS = ("least", "likely", "most")


def _put(backlog: Backlog, visits: Visits, found: Replay, attribution: Attribution) -> None:
    """What the replay moves the visits by beyond the time that compiles ran meanwhile is their backlog."""
    rows = visits.rows[found.touched]
    begin = found.earlier_us[found.touched]
    whole, first = found.spared_us[found.touched] + begin, found.spared_first_us[found.touched] + begin
    rest = np.maximum(whole / 1e3 - attribution.stall_ms[rows], 0.0)
    rest[rest < _LEAST_US / 1e3] = 0.0
    backlog.ms[rows] = rest
    rest_first = np.maximum(first / 1e3 - attribution.stall_before_first_ms[rows], 0.0)
    backlog.before_first_ms[rows] = np.minimum(rest_first, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Requests to one arm in one trial, in µs since the epoch; (n,) each, in the order in which they came."""

    rows: Ints
    replica: Ints
    recv_us: Ints
    begin_us: Ints  # when the server turned to the request
    first_us: Ints
    left_us: Ints
    share: Floats  # of the time in which a compile ran, how much held it up
    spared_us: Ints  # by how much its service would have been shorter: the compile time in it
    spared_first_us: Ints  # of it, before the first token


def _visits(requests: Requests, attribution: Attribution, own: Ints) -> Visits:
    """The requests that were served, with the times of their server where it told them."""
    own = own[requests.first_ns[own] > 0]
    own = own[np.argsort(requests.start_ns[own], kind="stable")]
    start = requests.start_ns[own] // 1000
    first = requests.first_ns[own] // 1000
    left = requests.end_ns[own] // 1000
    recv, begin = start, first
    told = requests.server_told[own]
    if told.any():
        recv = np.where(told, start + requests.recv_us[own], recv)
        begin = np.where(told, recv + requests.queue_us[own], begin)
        left = np.where(told, recv + requests.stay_us[own], left)
    if not told.all():
        quiet = ~told & (attribution.cause[own] == OTHER)
        usual = int(np.quantile((first - start)[quiet], 0.25)) if quiet.any() else 0
        begin = np.where(told, begin, np.maximum(first - usual, start))
    begin = np.maximum(begin, recv)
    order = np.argsort(recv, kind="stable")
    nothing = np.zeros(len(own), dtype=np.int64)
    return Visits(
        rows=own[order],
        replica=requests.replica[own][order].astype(np.int64),
        recv_us=recv[order],
        begin_us=begin[order],
        first_us=np.clip(first, begin, None)[order],
        left_us=np.maximum(left, begin)[order],
        share=np.ones(len(own)),
        spared_us=nothing,
        spared_first_us=nothing,
    )


def _stalled(visits: Visits, windows: Mapping[int, Windows], attribution: Attribution) -> Visits:
    """The visits with the compile time in their service. A server that says how long a compile held a request up is
    believed: of the time in which the compile ran, that share counts."""
    serve, before_first, share = (np.zeros(len(visits.rows)) for _ in range(3))
    for replica, spans in windows.items():
        own = np.flatnonzero(visits.replica == replica)
        recv, begin, first, left = (
            column[own] * 1000 for column in (visits.recv_us, visits.begin_us, visits.first_us, visits.left_us)
        )
        whole = spans.overlap_ns(recv, left)
        held = attribution.stall_ms[visits.rows[own]] * 1e6
        share[own] = np.where(whole > 0, np.minimum(held / np.maximum(whole, 1.0), 1.0), 0.0)
        serve[own] = spans.overlap_ns(begin, left) * share[own]
        before_first[own] = spans.overlap_ns(begin, first) * share[own]
    return replace(
        visits,
        share=share,
        spared_us=(serve / 1e3).astype(np.int64),
        spared_first_us=(before_first / 1e3).astype(np.int64),
    )


_NEIGHBOURS = 25


def _paced(visits: Visits, requests: Requests, touched: Bools) -> Visits:
    """The visits in a stretch served at the pace of those outside of all, by the median of their neighbours."""
    tokens = np.maximum(requests.output_tokens[visits.rows], 1)
    pace = (visits.left_us - visits.begin_us - visits.spared_us) / tokens
    others = pace[~touched]
    inside = np.flatnonzero(touched)
    if not len(inside):
        return visits
    usual = float(np.median(others)) if len(others) >= _NEIGHBOURS else float(np.quantile(pace, 0.25))
    around = median_filter(pace[inside], size=_NEIGHBOURS, mode="nearest")
    saved = np.maximum(1.0 - usual / np.maximum(around, 1e-9), 0.0)
    served = visits.left_us - visits.begin_us - visits.spared_us
    to_first = visits.first_us - visits.begin_us - visits.spared_first_us
    spared, first = visits.spared_us.copy(), visits.spared_first_us.copy()
    spared[inside] += (saved * served[inside]).astype(np.int64)
    first[inside] += (saved * np.maximum(to_first[inside], 0)).astype(np.int64)
    return replace(visits, spared_us=spared, spared_first_us=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`earlier_us`: how much earlier each visit would have begun, `spared_us` by how much its service would have been
    shorter, `spared_first_us` the part of that before the first token; `touched`: whether it lies in a stretch. (n,)

    `stretches`: (begin of a compile, end of its backlog) in µs; one that runs into another compile is one with it.
    """

    earlier_us: Ints
    spared_us: Ints
    spared_first_us: Ints
    touched: Bools
    stretches: tuple[tuple[int, int], ...]


def replay(
    visits: Visits, windows: Mapping[int, Windows], stalls: Sequence[tuple[int, int]], *, routed: bool = True
) -> Replay:
    """The visits as they would have been without `stalls`, (begin, end) in µs in order of time.

    With `routed`, requests go where the splitter would have sent them, else where they went.
    """
    slots = _slots(visits)
    earlier = np.zeros(len(visits.rows), dtype=np.int64)
    touched = np.zeros(len(visits.rows), dtype=np.bool_)
    stretches: list[tuple[int, int]] = []
    last_left = np.maximum.accumulate(visits.left_us) if len(visits.rows) else visits.left_us
    position = 0
    while position < len(stalls) and len(visits.rows):
        start, end = stalls[position]
        reach = max(_REACH * (end - start), _REACH_US)
        while True:
            low = int(np.searchsorted(last_left, start, side="right"))
            high = int(np.searchsorted(visits.recv_us, end + reach, side="right"))
            rows = np.arange(low, high)
            rows = rows[visits.left_us[rows] > start]
            found = _stretch(visits, rows, windows, slots, stalls[position:], routed=routed)
            if found.drained or high == len(visits.rows):
                break
            reach *= 3
        earlier[rows] = np.maximum(earlier[rows], found.earlier_us)
        touched[rows[visits.recv_us[rows] <= found.end_us]] = True
        stretches.append((start, found.end_us))
        position += max(1, found.stalls)
    return Replay(
        earlier_us=earlier,
        spared_us=visits.spared_us,
        spared_first_us=visits.spared_first_us,
        touched=touched,
        stretches=tuple(stretches),
    )


def _slots(visits: Visits) -> dict[int, int]:
    """How many requests each replica served at once, at most."""
    found: dict[int, int] = {}
    for replica in np.unique(visits.replica).tolist():
        own = visits.replica == replica
        begin, left = np.sort(visits.begin_us[own]), np.sort(visits.left_us[own] - _SLACK_US)
        serving = np.arange(1, len(begin) + 1) - np.searchsorted(left, begin, side="right")
        found[replica] = max(1, int(serving.max()))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    earlier_us: Ints  # of the rows given
    end_us: int
    stalls: int  # how many of the stalls began in it
    drained: bool


def _stretch(
    visits: Visits,
    rows: Ints,
    windows: Mapping[int, Windows],
    slots: Mapping[int, int],
    stalls: Sequence[tuple[int, int]],
    *,
    routed: bool,
) -> _Stretch:
    """The course of `rows` from the first of the stalls until it is as it was."""
    start, until = stalls[0]
    replica, recv, begin, left = (
        column[rows].tolist() for column in (visits.replica, visits.recv_us, visits.begin_us, visits.left_us)
    )
    stalled = visits.spared_us[rows].tolist()
    held = _held(visits, rows, windows, slots, start)
    earlier = np.zeros(len(rows), dtype=np.int64)
    free: dict[int, list[int]] = {number: [] for number in slots}
    gate: dict[int, int] = dict.fromkeys(slots, 0)
    # What is in flight on each replica, as it was and as it would have been; needed where there are several.
    seen: dict[int, list[int]] = {number: [] for number in slots}
    without: dict[int, list[int]] = {number: [] for number in slots}
    several = routed and len(slots) > 1
    late, passed = start, 1
    for place in range(len(rows)):
        if begin[place] <= start:
            heapq.heappush(free[replica[place]], left[place] - stalled[place])
            if several:
                heapq.heappush(seen[replica[place]], left[place])
                heapq.heappush(without[replica[place]], left[place] - stalled[place])
            if stalled[place] >= _LEAST_US:
                late = max(late, left[place])
    for place in range(len(rows)):
        if begin[place] <= start:
            continue
        now, number = recv[place], replica[place]
        while passed < len(stalls) and stalls[passed][0] <= now:
            until = max(until, stalls[passed][1])
            passed += 1
        if now > late and now > until:
            return _Stretch(earlier_us=earlier, end_us=max(late, until), stalls=passed, drained=True)
        if several:
            number = _routed(number, now, seen, without)
        ready = max(now, gate[number])
        if len(free[number]) >= slots[number]:
            ready = max(ready, heapq.heappop(free[number]))
        began = min(ready + held[place], begin[place])
        ended = began + left[place] - begin[place] - stalled[place]
        gate[number] = began
        heapq.heappush(free[number], ended)
        if several:
            heapq.heappush(seen[replica[place]], left[place])
            heapq.heappush(without[number], ended)
        earlier[place] = begin[place] - began
        if left[place] - ended >= _LEAST_US:
            late = max(late, left[place])
    return _Stretch(earlier_us=earlier, end_us=max(late, until), stalls=passed, drained=False)


def _routed(number: int, now: int, seen: dict[int, list[int]], without: dict[int, list[int]]) -> int:
    """Where the splitter would have sent a request that it sent to `number`: there, unless another replica would have
    had fewer in flight and did not."""
    for flights in (*seen.values(), *without.values()):
        while flights and flights[0] <= now:
            heapq.heappop(flights)
    least = min(without, key=lambda other: (len(without[other]), other != number))
    gap = len(without[number]) - len(without[least])
    return least if gap > max(1, len(seen[number]) - len(seen[least])) else number


def _held(
    visits: Visits, rows: Ints, windows: Mapping[int, Windows], slots: Mapping[int, int], start: int
) -> list[int]:
    """How long each of `rows` was held for another reason than a full server, the one before it, or a compile."""
    ready = np.empty(len(rows), dtype=np.int64)
    for number in slots:
        own = np.flatnonzero(visits.replica[rows] == number)
        own = own[np.argsort(visits.begin_us[rows[own]], kind="stable")]
        recv, begin, left = (column[rows[own]].tolist() for column in (visits.recv_us, visits.begin_us, visits.left_us))
        taken: list[int] = []
        before = 0
        found = []
        for place in range(len(own)):
            moment = max(recv[place], before)
            if begin[place] > start and len(taken) >= slots[number]:
                moment = max(moment, heapq.heappop(taken))
            found.append(min(moment, begin[place]))
            before = begin[place] if begin[place] > start else 0
            heapq.heappush(taken, left[place])
        ready[own] = found
    held = np.zeros(len(rows), dtype=np.int64)
    for number, spans in windows.items():
        own = np.flatnonzero(visits.replica[rows] == number)
        begin_us = visits.begin_us[rows[own]]
        compiling = spans.overlap_ns(ready[own] * 1000, begin_us * 1000) / 1e3 * visits.share[rows[own]]
        held[own] = np.maximum(begin_us - ready[own] - compiling.astype(np.int64), 0)
    return list(held.tolist())
