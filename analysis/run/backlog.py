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
from functools import partial

import numpy as np
from scipy.ndimage import median_filter

from analysis.arrays import Bools, Ints
from analysis.records.requests import Requests
from analysis.run.spikes import BACKLOG, NOBODY, OTHER, Attribution, CompileEvent, Delay, Windows, stall_windows

# What is shorter cannot be separated from the network's own scatter.
_LEAST_US = 1_000
# A slot is free a moment before the front has said that its answer ended.
_SLACK_US = 5_000
# The share of batches that begin after all before them are over, in a server that is said to take whole batches.
_ALWAYS = 0.98
# How far behind a compile its backlog is first looked for: so many times as long as it took, and so many seconds.
_REACH = 3
_REACH_US = 1_000_000
# Visits that are followed together, and those that are one by one from the first that waits for a slot on.
_AT_ONCE, _ONE_BY_ONE = 4096, 256


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
    delay, least, most = (_direct(attribution) for _ in range(3))
    backlog = np.zeros(len(requests))
    behind: dict[int, Ints] = {}
    unserved = np.zeros(len(requests), dtype=np.bool_)
    misfit: dict[str, float] = {}
    for arm, trial in sorted({(event.arm, event.trial) for event in relevant if event.arm in requests.arms}):
        own = np.flatnonzero(requests.of_arm(arm) & (requests.trial == trial) & ~requests.broken)
        visits = _visits(requests, attribution, own)
        if not visits.rows.size:
            continue
        names = {number: requests.replicas[number] if number >= 0 else None for number in set(visits.replica.tolist())}
        windows = {
            number: stall_windows(relevant, arm=arm, trial=trial, replica=names[number]) for number in sorted(names)
        }
        visits = _in_own_time(visits, windows, attribution)
        mine = [event for event in relevant if (event.arm, event.trial) == (arm, trial)]
        stalls = sorted((event.start_ns // 1000, event.end_ns // 1000) for event in mine)
        follow = partial(replay, windows=windows, stalls=stalls, slots=_slots(visits), batches=_takes_batches(visits))
        likely = follow(visits)
        misfit[arm] = max(misfit.get(arm, 0.0), likely.misfit)
        _put(delay, visits, likely)
        fixed = likely if len(windows) == 1 else follow(visits, routed=False)
        _put(least, visits, fixed, upto=(np.minimum, delay))
        paced = follow(_paced(visits, requests, likely.touched))
        _put(most, visits, paced, upto=(np.maximum, delay))
        rest = delay.ms[visits.rows] - attribution.stall_ms[visits.rows]
        late = likely.touched & (rest >= _LEAST_US / 1e3)
        backlog[visits.rows[late]] = rest[late]
        # In order of their begin, so that a day of compiles does not look at millions of requests for each.
        places = np.flatnonzero(late)
        places = places[np.argsort(visits.begin_us[places], kind="stable")]
        begun_us = visits.begin_us[places]
        for event in mine:
            end_us = next((end for start, end in likely.stretches if start <= event.start_ns // 1000 <= end), 0)
            first = np.searchsorted(begun_us, -(-event.start_ns // 1000), side="left")
            last = np.searchsorted(begun_us, end_us, side="right")
            behind[id(event)] = visits.rows[np.sort(places[first:last])]
        failed = own[requests.failed[own] | requests.cut[own]]
        for start, end in likely.stretches:
            unserved[failed] |= (requests.end_ns[failed] // 1000 > start) & (requests.start_ns[failed] // 1000 < end)
    cause = attribution.cause.copy()
    cause[(backlog > 0) & (cause == OTHER)] = BACKLOG
    return replace(
        attribution,
        backlog_ms=backlog,
        delay=delay,
        delay_least=least,
        delay_most=most,
        unserved=unserved,
        misfit=misfit,
        cause=cause,
        event_backlog=tuple(behind.get(id(event), NOBODY) for event in events),
    )


_NEIGHBOURS = 25


def _direct(attribution: Attribution) -> Delay:
    """What compiles delayed requests by while they ran, to be written to."""
    delay = Delay(ms=np.zeros(len(attribution.stall_ms)), before_first_ms=np.zeros(len(attribution.stall_ms)))
    held = np.flatnonzero(attribution.stall_ms)
    delay.ms[held] = attribution.stall_ms[held]
    delay.before_first_ms[held] = attribution.delay.before_first_ms[held]
    return delay


def _put(delay: Delay, visits: Visits, replayed: Replay, *, upto: tuple[np.ufunc, Delay] | None = None) -> None:
    """What was replayed of the visits in its stretches, or the lesser or greater of it and another delay."""
    rows = visits.rows[replayed.touched]
    delay.ms[rows] = replayed.delay_us[replayed.touched] / 1e3
    delay.before_first_ms[rows] = replayed.delay_first_us[replayed.touched] / 1e3
    if upto is not None:
        choose, other = upto
        rows = visits.rows
        delay.ms[rows] = choose(delay.ms[rows], other.ms[rows])
        delay.before_first_ms[rows] = choose(delay.before_first_ms[rows], other.before_first_ms[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Requests to one arm in one trial, in µs since the epoch; (n,) each, in the order in which they came.

    A replica's own time stands still while a compile stops it.
    """

    rows: Ints
    replica: Ints
    recv_us: Ints
    begin_us: Ints  # when the server turned to the request
    first_us: Ints
    left_us: Ints
    own_recv_us: Ints  # in own time
    own_begin_us: Ints
    served_us: Ints  # of own time, from the begin on
    first_served_us: Ints  # of it, before the first token
    saved_us: Ints  # how much shorter it would be at another pace
    first_saved_us: Ints

    @property
    def own_over_us(self) -> Ints:
        """When each was over; own time."""
        return self.own_begin_us + self.served_us

    def of(self, places: Ints) -> Visits:
        """Some of the visits, in the order of `places`."""
        return Visits(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})


def _visits(requests: Requests, attribution: Attribution, own: Ints) -> Visits:
    """The requests that were served, with the times of their server where it reports them.

    One that ended without its replica's name went to the only one that there is; it is left out where there are more.
    """
    own = own[requests.first_ns[own] > 0]
    known = np.unique(requests.replica[own])
    only = known[-1] if len(known) else -1
    if len(known) > 2 and known[0] < 0:
        own = own[requests.replica[own] >= 0]
    own = own[np.argsort(requests.start_ns[own], kind="stable")]
    start = requests.start_ns[own] // 1000
    first = requests.first_ns[own] // 1000
    left = requests.end_ns[own] // 1000
    recv, begin = start, first
    timed = requests.server_timed[own]
    if timed.any():
        recv = np.where(timed, start + requests.recv_us[own], recv)
        begin = np.where(timed, recv + requests.queue_us[own], begin)
        left = np.where(timed, recv + requests.stay_us[own], left)
    if not timed.all():
        quiet = ~timed & (attribution.cause[own] == OTHER)
        usual = int(np.quantile((first - start)[quiet], 0.25)) if quiet.any() else 0
        begin = np.where(timed, begin, np.maximum(first - usual, start))
    begin = np.maximum(begin, recv)
    nothing = np.zeros(len(own), dtype=np.int64)
    visits = Visits(
        rows=own,
        replica=np.where(requests.replica[own] < 0, only, requests.replica[own]).astype(np.int64),
        recv_us=recv,
        begin_us=begin,
        first_us=np.clip(first, begin, None),
        left_us=np.maximum(left, begin),
        own_recv_us=nothing,
        own_begin_us=nothing,
        served_us=nothing,
        first_served_us=nothing,
        saved_us=nothing,
        first_saved_us=nothing,
    )
    return visits.of(np.argsort(recv, kind="stable"))


def _in_own_time(visits: Visits, windows: dict[int, Windows], attribution: Attribution) -> Visits:
    """The visits with their own times; of the windows, those stay that stopped their replica.

    A server that says how long compiles held a request up is believed: a window during which requests were held up for
    less than half of it did not stop their server.
    """
    recv, begin, first, left = (
        column.copy() for column in (visits.recv_us, visits.begin_us, visits.first_us, visits.left_us)
    )
    for replica, spans in windows.items():
        own = np.flatnonzero(visits.replica == replica)
        start, end = visits.recv_us[own] * 1000, visits.left_us[own] * 1000
        whole = spans.overlap_ns(start, end)
        share = attribution.stall_ms[visits.rows[own]] * 1e6 / np.maximum(whole, 1.0)
        stopped = []
        # Of visits in the order in which they came, none before `low` is still there and none from `high` on has come.
        low = np.searchsorted(np.maximum.accumulate(end), spans.start_ns, side="right")
        high = np.searchsorted(start, spans.end_ns, side="left")
        for at in range(len(spans.start_ns)):
            near = slice(low[at], high[at])
            there = share[near][end[near] > spans.start_ns[at]]
            stopped.append(not len(there) or float(there.mean()) >= 0.5)
        spans = Windows(start_ns=spans.start_ns[stopped], end_ns=spans.end_ns[stopped])
        windows[replica] = spans
        zero = np.zeros(len(own), dtype=np.int64)
        for column in (recv, begin, first, left):
            column[own] -= (spans.overlap_ns(zero, column[own] * 1000) / 1e3).astype(np.int64)
    return replace(
        visits,
        own_recv_us=recv,
        own_begin_us=begin,
        served_us=left - begin,
        first_served_us=np.minimum(first, left) - begin,
    )


def _paced(visits: Visits, requests: Requests, touched: Bools) -> Visits:
    """The visits in a stretch served at the pace of those outside of all, by the median of their neighbours."""
    pace = visits.served_us / np.maximum(requests.output_tokens[visits.rows], 1)
    others = pace[~touched]
    inside = np.flatnonzero(touched)
    if not len(inside):
        return visits
    usual = float(np.median(others)) if len(others) >= _NEIGHBOURS else float(np.quantile(pace, 0.25))
    around = median_filter(pace[inside], size=_NEIGHBOURS, mode="nearest")
    share = np.maximum(1.0 - usual / np.maximum(around, 1e-9), 0.0)
    saved, first = np.zeros(len(pace), dtype=np.int64), np.zeros(len(pace), dtype=np.int64)
    saved[inside] = (share * visits.served_us[inside]).astype(np.int64)
    first[inside] = (share * visits.first_served_us[inside]).astype(np.int64)
    return replace(visits, saved_us=saved, first_saved_us=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`delay_us`: how much earlier each visit would have ended, `delay_first_us` how much earlier its first token would
    have come; `touched`: whether it lies in a stretch. (n,) each.

    `stretches`: (begin of a compile, end of its backlog) in µs; one that runs into another compile is one with it.
    `misfit`: how far the replay with the compiles is from what was seen, as a share of the time that was waited.
    """

    delay_us: Ints
    delay_first_us: Ints
    touched: Bools
    stretches: tuple[tuple[int, int], ...]
    misfit: float


def replay(
    visits: Visits,
    *,
    windows: Mapping[int, Windows],
    stalls: Sequence[tuple[int, int]],
    slots: Mapping[int, int],
    batches: bool,
    routed: bool = True,
) -> Replay:
    """The visits with and without `stalls`, (begin, end) in µs in order of time.

    `slots` of each replica; `batches`: whether it answers a batch whole. With `routed`, requests go where the splitter
    would have sent them, else where they went.
    """
    edges = np.array(stalls, dtype=np.int64).reshape(-1, 2)
    earlier = np.zeros(len(visits.rows), dtype=np.int64)
    off = np.zeros(len(visits.rows), dtype=np.int64)
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
            stretch = _Stretch.of(visits.of(rows), windows, slots, edges[position:], batches=batches)
            drained = stretch.batched() if batches else stretch.queued(routed=routed)
            if drained or high == len(visits.rows):
                break
            reach *= 3
            while end + reach <= stretch.end_us:  # up to there something is late
                reach *= 3
        within = visits.recv_us[rows] <= stretch.end_us
        earlier[rows[within]] = stretch.earlier[within]
        off[rows[within]] = stretch.off[within]
        touched[rows[within]] = True
        stretches.append((start, stretch.end_us))
        while position < len(stalls) and stalls[position][0] <= stretch.end_us:
            position += 1
    stood = visits.left_us - visits.begin_us - visits.served_us
    stood_first = np.minimum(visits.first_us, visits.left_us) - visits.begin_us - visits.first_served_us
    waited = float((visits.begin_us - visits.recv_us)[touched].sum())
    return Replay(
        delay_us=earlier + stood + visits.saved_us,
        delay_first_us=earlier + stood_first + visits.first_saved_us,
        touched=touched,
        stretches=tuple(stretches),
        misfit=float(np.abs(off).sum()) / waited if waited > 0 else 0.0,
    )


def _slots(visits: Visits) -> dict[int, int]:
    """How many requests each replica served at once, at most."""
    slots: dict[int, int] = {}
    for replica in np.unique(visits.replica).tolist():
        own = visits.replica == replica
        begin, left = np.sort(visits.begin_us[own]), np.sort(visits.left_us[own] - _SLACK_US)
        serving = np.arange(1, len(begin) + 1) - np.searchsorted(left, begin, side="right")
        slots[replica] = max(1, int(serving.max()))
    return slots


def _takes_batches(visits: Visits) -> bool:
    """Whether every replica answers a batch whole before it begins the next, some of them of several requests."""
    largest = 0
    for replica in np.unique(visits.replica).tolist():
        own = np.flatnonzero(visits.replica == replica)
        own = own[np.argsort(visits.begin_us[own], kind="stable")]
        begin, left = visits.begin_us[own], visits.left_us[own]
        first = _batch_starts(begin)
        over = np.maximum.accumulate(left)[first[1:] - 1] <= begin[first[1:]] + _SLACK_US
        if len(over) < _NEIGHBOURS or over.mean() < _ALWAYS:
            return False
        largest = max(largest, int(np.diff(first).max()))
    return largest > 1


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """The course of some visits from the first of the stalls on, with the stalls and without, until both are one.

    With the stalls it runs in the server's own time, which is that of the clock up to the first of them.
    """

    visits: Visits
    held: Ints  # see `_held`
    slots: Mapping[int, int]
    stalls: Ints  # begin and end, shape (stalls, 2)
    earlier: Ints  # how much earlier each would have begun
    off: Ints  # how far the begin with the stalls is from what was seen
    end_us: int
    passed: int = 1  # how many of the stalls began in the stretch

    @classmethod
    def of(
        cls,
        visits: Visits,
        windows: Mapping[int, Windows],
        slots: Mapping[int, int],
        stalls: Ints,
        *,
        batches: bool,
    ) -> _Stretch:
        """The stretch that begins with the first of `stalls`."""
        start = int(stalls[0, 0])
        shift = np.zeros(len(visits.rows), dtype=np.int64)
        for number, spans in windows.items():
            stood = spans.overlap_ns(np.zeros(1, dtype=np.int64), np.array([start * 1000]))
            shift[visits.replica == number] = int(stood[0] / 1e3)
        visits = replace(visits, own_recv_us=visits.own_recv_us + shift, own_begin_us=visits.own_begin_us + shift)
        nothing = np.zeros(len(visits.rows), dtype=np.int64)
        return cls(
            visits=visits,
            held=(_held_batches if batches else _held)(visits, slots),
            slots=slots,
            stalls=stalls,
            earlier=nothing,
            off=nothing.copy(),
            end_us=start,
        )

    def queued(self, *, routed: bool) -> bool:
        """A server with slots, which takes requests as they come; whether both courses are one at the end."""
        start = int(self.stalls[0, 0])
        waits = self.visits.begin_us > start
        before, queue, held = (
            self.visits.of(np.flatnonzero(~waits)),
            self.visits.of(np.flatnonzero(waits)),
            self.held[waits],
        )
        began, without = (np.empty_like(queue.recv_us) for _ in range(2))
        served = queue.served_us - queue.saved_us
        for number, slots in self.slots.items():
            ahead, own = before.of(np.flatnonzero(before.replica == number)), np.flatnonzero(queue.replica == number)
            begins = partial(_begins, held=held[own], gate=int(ahead.own_begin_us.max(initial=0)), slots=slots)
            busy = ahead.own_over_us - _SLACK_US
            began[own] = begins(queue.own_recv_us[own], served=queue.served_us[own], busy=busy)
            without[own] = begins(queue.recv_us[own], served=served[own], busy=busy - ahead.saved_us)
        off = began - queue.own_begin_us
        # The end of the stalls so far, when each of the queue comes and after all.
        moments = np.append(queue.recv_us, queue.recv_us.max(initial=0))
        passed = np.maximum(np.searchsorted(self.stalls[:, 0], moments, side="right"), 1)
        until = np.maximum.accumulate(self.stalls[:, 1])[passed - 1]
        late = int(before.left_us.max(where=before.left_us - before.own_over_us >= _LEAST_US, initial=start))
        if routed and len(self.slots) > 1:
            without = self._routed_begins(before, queue, held, off, np.maximum(until, late))
        differs = queue.left_us + off - (without + served) >= _LEAST_US
        late_by = np.maximum.accumulate(np.append(late, np.where(differs, queue.left_us, late)))
        both = np.maximum(late_by, until)
        # One that comes later finds both courses the same.
        place = int(np.append(np.flatnonzero(queue.recv_us > both[:-1]), len(off))[0])
        followed = np.flatnonzero(waits)[:place]
        waited = queue.begin_us - queue.recv_us
        self.off[followed] = off[:place]
        self.earlier[followed] = np.minimum(np.maximum(queue.begin_us + off - without, 0), waited)[:place]
        self.end_us = int(both[place])
        return place < len(off)

    def _routed_begins(self, before: Visits, queue: Visits, held: Ints, off: Ints, until: Ints) -> Ints:
        """When each of the queue would have begun without the stalls where the splitter would have sent it, up to the
        one that finds both courses the same: no earlier than `until`, (n + 1,)."""
        # What is in flight on each replica, as it was and as it would have been.
        free, seen, without = (_nothing(self.slots) for _ in range(3))
        gate = dict.fromkeys(self.slots, 0)
        begun = (before.replica, before.own_begin_us, before.left_us, before.own_over_us - before.saved_us)
        for number, began, left, over in zip(*(array.tolist() for array in begun), strict=True):
            gate[number] = max(gate[number], began)
            heapq.heappush(free[number], over - _SLACK_US)
            heapq.heappush(seen[number], left)
            heapq.heappush(without[number], over)
        begins, late = queue.begin_us.copy(), 0
        served, seen_left = queue.served_us - queue.saved_us, queue.left_us + off
        arrays = (queue.replica, queue.recv_us, queue.left_us, seen_left, served, held, until[:-1])
        columns = zip(*(array.tolist() for array in arrays), strict=True)
        for place, (number, came, left, left_with, took, wait, least) in enumerate(columns):
            if came > max(late, least):
                break
            other = _routed(number, came, seen, without)
            moment = max(came, gate[other])
            if len(free[other]) >= self.slots[other]:
                moment = max(moment, heapq.heappop(free[other]))
            begins[place] = gate[other] = moment + wait
            over = gate[other] + took
            heapq.heappush(free[other], over - _SLACK_US)
            heapq.heappush(seen[number], left)
            heapq.heappush(without[other], over)
            if left_with - over >= _LEAST_US:
                late = max(late, left)
        return begins

    def batched(self) -> bool:
        """A server that takes what has come, up to its slots, and answers it whole before it takes more."""
        visits = self.visits
        arrays = (visits.replica, visits.recv_us, visits.begin_us, visits.own_begin_us, visits.left_us)
        # Lists, since the courses are followed visit by visit.
        columns = (array.tolist() for array in (*arrays, visits.served_us, visits.saved_us, self.held))
        replica, recv, begin, own_begin, left, served, saved, held = columns
        start, until = self.stalls[0].tolist()
        latest, drained = start, True
        for number, slots in self.slots.items():
            own = [place for place, one in enumerate(replica) if one == number]
            begun = [place for place in own if begin[place] <= start]
            waiting = [place for place in own if begin[place] > start]
            late, over, same, at = start, 0, False, 0
            for place in begun:
                over = max(over, own_begin[place] + served[place])
                if left[place] - own_begin[place] - served[place] >= _LEAST_US:
                    late = max(late, left[place])
            while at < len(waiting) and not same:
                first = waiting[at]
                same, until = self._over(recv[first], late, until)
                if same:
                    break
                began = max(recv[first], over) + held[first]
                last = at + slots
                while at < min(last, len(waiting)) and recv[waiting[at]] <= began:
                    place = waiting[at]
                    ended = began + served[place] - saved[place]
                    over = max(over, ended)
                    self.earlier[place] = begin[place] - began
                    if abs(left[place] - ended) >= _LEAST_US:
                        late = max(late, left[place], ended)
                    at += 1
            latest = max(latest, late)
            drained = drained and same
        self.end_us = max(latest, until)
        return drained

    def _over(self, now: int, late: int, until: int) -> tuple[bool, int]:
        """Whether a request that comes `now` finds both courses the same, and the end of the stalls so far."""
        while self.passed < len(self.stalls) and self.stalls[self.passed, 0] <= now:
            until = max(until, int(self.stalls[self.passed, 1]))
            self.passed += 1
        return now > late and now > until, until


def _nothing(slots: Mapping[int, int]) -> dict[int, list[int]]:
    return {number: [] for number in slots}


def _begins(arrived: Ints, *, held: Ints, served: Ints, gate: int, busy: Ints, slots: int) -> Ints:
    """When a server begins with visits that it takes in this order, (n,): not before it has begun with the one before
    (`gate` at first) and a slot is free, and `held` later. `busy`: until when slots are taken already."""
    begins = np.empty_like(arrived)
    slots = max(slots, len(busy))
    busy = np.sort(busy)
    done = 0
    while done < len(arrived):
        part = slice(done, done + _AT_ONCE)
        # Lindley's recursion as a running maximum, which is right up to the first that waits for a slot.
        passed = np.cumsum(held[part])
        began = np.maximum(np.maximum.accumulate(arrived[part] + held[part] - passed), gate) + passed
        ready, over = began - held[part], began + served[part] - _SLACK_US
        ends = np.sort(np.concatenate((busy, np.maximum(over, began))))
        serving = len(busy) + np.arange(len(began)) - np.searchsorted(ends, ready, side="left")
        free = int(np.append(np.flatnonzero(serving >= slots), len(began))[0])
        begins[done : done + free] = began[:free]
        # What is over before the next begins is as good as nothing.
        busy = np.sort(np.concatenate((busy, over[:free])))[-slots:]
        gate = int(began[free - 1]) if free else gate
        done += free
        if free == len(began):
            continue
        heap, part = busy.tolist(), slice(done, done + _ONE_BY_ONE)
        columns = zip(arrived[part].tolist(), held[part].tolist(), served[part].tolist(), strict=True)
        for place, (came, wait, took) in enumerate(columns, done):
            moment = max(came, gate)
            if len(heap) >= slots:
                moment = max(moment, heapq.heappop(heap))
            begins[place] = gate = moment + wait
            heapq.heappush(heap, gate + took - _SLACK_US)
        done += _ONE_BY_ONE
        busy = np.sort(np.array(heap, dtype=np.int64))
    return begins


def _held(visits: Visits, slots: Mapping[int, int]) -> Ints:
    """How long each visit was held for another reason than a full server, or the one that began before it; own time."""
    held = np.zeros(len(visits.rows), dtype=np.int64)
    for number, limit in slots.items():
        own = np.flatnonzero(visits.replica == number)
        own = own[np.argsort(visits.own_begin_us[own], kind="stable")]
        began = visits.own_begin_us[own]
        ready = np.maximum(visits.own_recv_us[own], np.append(0, began)[:-1])
        # As late as the next may begin, since no later one asks for less.
        over = np.maximum(visits.own_over_us[own] - _SLACK_US, began)
        free = np.sort(over)[: max(0, len(own) - limit)]
        if (free >= began[limit:]).any():  # perhaps more at once than slots, which free themselves in no order then
            heap = np.sort(over[:limit]).tolist()
            free = np.array([heapq.heapreplace(heap, end) for end in over[limit:].tolist()], dtype=np.int64)
        ready[limit:] = np.maximum(ready[limit:], free)
        held[own] = np.maximum(began - ready, 0)
    return held


def _held_batches(visits: Visits, slots: Mapping[int, int]) -> Ints:
    """How long each visit's batch was held after its first request had come and the batch before was over; own time."""
    recv, begin, served = visits.own_recv_us, visits.own_begin_us, visits.served_us
    held = np.zeros(len(recv), dtype=np.int64)
    for number in slots:
        own = np.flatnonzero(visits.replica == number)
        if not len(own):
            continue
        own = own[np.argsort(begin[own], kind="stable")]
        began, left = begin[own], np.maximum.accumulate(begin[own] + served[own])
        first = _batch_starts(began)
        over = np.append(began[0], left[first[1:] - 1])
        ready = np.maximum(np.minimum.reduceat(recv[own], first), over)
        wait = np.maximum(began[first] - ready, 0)
        held[own] = np.repeat(wait, np.diff(np.append(first, len(own))))
    return held


def _batch_starts(begin: Ints) -> Ints:
    """Where batches begin in rising begins of requests."""
    return np.flatnonzero(np.diff(begin, prepend=begin[0] - _SLACK_US) >= _LEAST_US)


def _routed(number: int, now: int, seen: dict[int, list[int]], without: dict[int, list[int]]) -> int:
    """Where the splitter would have sent a request that it sent to `number`: there, unless another replica would have
    had fewer in flight and did not."""
    for flights in (*seen.values(), *without.values()):
        while flights and flights[0] <= now:
            heapq.heappop(flights)
    least = min(without, key=lambda other: (len(without[other]), other != number))
    gap = len(without[number]) - len(without[least])
    return least if gap > max(1, len(seen[number]) - len(seen[least])) else number
