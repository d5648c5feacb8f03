"""Stalls of a server seen from outside: it had work in flight and nothing came, while the rest of the host went on.

Nothing here knows of compile events. Signs of life of a server are first tokens, further tokens where their times are
recorded, and the ends of answers. What makes a stall a compile, on the evidence of many, is in `firstseen`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.arrays import Bools, Codes, Floats, Ints
from analysis.blackbox.firstseen import Shapes, chance_of_new, longest_of
from analysis.blackbox.partial import partial_stalls
from analysis.blackbox.prefills import Prefills, Work
from analysis.records.requests import Requests
from analysis.run.gaps import gaps_of
from analysis.run.spikes import Windows
from analysis.statistics.quantiles import quantile

FLOOR_NS = 250_000_000  # shorter silences are not looked at: a garbage collection or a hiccup of the network
_FEWEST = 50  # silences that show what is usual
_FEWEST_OF_A_LEVEL = 30  # the same for one number of requests in flight
_CHANCE = 0.01  # that a server which never stalls shows one silence that counts as a stall
_STEP_NS = 50_000_000  # a request may have come this long before the server's last sign and not been looked at yet
_TOGETHER_NS = 5_000_000  # first tokens this close together came out of one step
_BEHIND_NS = 20_000_000  # the same after a silence: one late packet of a batch must not hide its longest prompt
_QUEUE = 3  # so many that wait are a queue, and so many of its head may be taken up at once
_LEAST_SLOPE = 0.5  # of the tail: an exponential one has 1, that of steps of one length hardly any
_COPY_NS = 10_000_000_000  # copies of a request are sent within this, in whatever order arms take turns
_ALIKE = 5
_ABOUT = 40  # silences before one that are of about its time
_LAST_NS = np.iinfo(np.int64).max

COMPILE, HOST, WORK, PART, UNKNOWN = "compile", "host", "work", "part", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stretch in which a server with work in flight showed no sign of life for longer than chance explains.

    `cause`: "compile" (the arm's stalls begin with first-seen shapes more often than chance allows, and this one does),
    "host" (every other server with work stood still too), "work" (the same prompt took as long elsewhere), "part" (only
    some of its requests stood still, as where several servers share an address), "unknown".
    """

    arm: str
    trial: int
    replica: str | None
    start_ns: int
    end_ns: int
    cause: str
    requests: Ints  # rows of the requests that were in flight in it
    chance: float = math.nan  # that such a silence is the server's usual way
    begun: bool = True  # whether any request came or was waiting when it began
    trigger: int = -1  # row of the request that it began with; -1 where none with a first-seen shape is known
    shape: int = -1  # the trigger's prompt length, rounded up to the ladder where there is one; -1 where unknown
    chance_new: float = 0.0  # that a first-seen shape would have stood at its begin anyway
    chance_as_long: float = 0.0  # the same, if stalls come with long prompts anyway
    new_rows: bool = False  # whether more answers were under way at its begin than ever before
    chance_rows: float = 0.0  # that they would have been anyway
    longest: float = 0.5  # how far its trigger, or the longest of those that may be, stands out by length
    work_s: float = math.inf  # the longest that its prompts may have taken by themselves; infinite where unknown

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def beyond_work(self) -> bool:
        """Whether its prompts cannot have made it."""
        return self.seconds > self.work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How well one server could be watched. `detectable_s` is NaN where too little is known of its usual silences."""

    silences: int
    busy_s: float  # time with work in flight
    detectable_s: float  # a stall this long shows at the moments at which nine tenths of the requests came
    witnesses: int  # other servers, which separate the host's stalls from its own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Server:
    """One replica of an arm in one trial."""

    arm: int
    trial: int
    replica: int
    rows: Ints  # of its requests, by the time at which they were sent
    sent_ns: Ints
    first_ns: Ints
    end_ns: Ints
    ends: Ints  # all ends, sorted
    signs: Ints  # sorted; tokens after the first only within `fine`
    fine: Windows  # the longer stretches between first tokens and ends
    step_ns: int  # about how long it may not look at what came
    wait_s: float  # to a first token, and between further signs of one answer: lower quartiles, which hardly
    gap_s: float  # know of stalls even where these hold up every other request

    def answering(self, at_ns: Ints) -> Ints:
        """Requests with a first token that had not ended, at each time: the rows of the step that follows."""
        begun = self.first_ns > 0
        firsts, ended = np.sort(self.first_ns[begun]), np.sort(self.end_ns[begun])
        return np.asarray(np.searchsorted(firsts, at_ns, side="right") - np.searchsorted(ended, at_ns, side="right"))

    def in_flight(self, at_ns: Ints) -> Ints:
        """Requests sent and not ended, at each time."""
        sent = np.searchsorted(self.sent_ns, at_ns, side="right")
        return np.asarray(sent - np.searchsorted(self.ends, at_ns, side="right"))


def look(requests: Requests, shapes: Mapping[str, Shapes]) -> tuple[dict[str, list[Stall]], dict[str, list[Watch]]]:
    """The stalls of every arm in `shapes`, in order of time, and how well each of its servers could be watched.

    Of each stall it is known whether a first-seen shape stood at its begin; whether that makes it a compile is not
    decided here: causes are "host", "work", "part" and "unknown".
    """
    servers = _servers(requests)

    # Only stalls need to know what prompts take, and many runs have none.
    @cache
    def prefills() -> list[Prefills]:
        return [
            _prefills(requests, server, _stretches(server), shapes.get(requests.arms[server.arm])) for server in servers
        ]

    @cache
    def work(arm: int) -> Work:
        return _work(arm, servers, prefills())

    stalls: dict[str, list[Stall]] = {name: [] for name in shapes}
    watches: dict[str, list[Watch]] = {name: [] for name in shapes}
    for server in servers:
        name = requests.arms[server.arm]
        if name not in shapes:
            continue
        others = [one for one in servers if one.trial == server.trial and one is not server]
        stretches = _stretches(server)
        watch, whole = _stalls(requests, server, stretches, others, shapes[name], work)
        watches[name].append(watch)
        stalls[name] += [*whole, *_parts(requests, server, stretches)]
    for of_arm in stalls.values():
        of_arm.sort(key=lambda stall: (stall.trial, stall.start_ns, stall.replica or ""))
    return stalls, watches


# --- Signs of life ----------------------------------------------------------------------------------------------------


def _servers(requests: Requests) -> list[_Server]:
    usable = ~requests.broken
    servers = []
    for trial in np.unique(requests.trial[usable]).tolist():
        for arm in range(len(requests.arms)):
            of_arm = np.flatnonzero(usable & (requests.trial == trial) & (requests.arm == arm))
            replicas = requests.replica[of_arm]
            present = np.flatnonzero(np.bincount(replicas + 1, minlength=1)) - 1
            known = present[present >= 0]
            if known.size == 1:
                # What never was answered names no replica, and here there was only one to wait for.
                replicas = np.full_like(replicas, known[0])
            # Where there were several, it is not known whose they are.
            present = known if known.size else present
            for replica in present.tolist():
                servers.append(_server(requests, arm, trial, replica, of_arm[replicas == replica]))
    return servers


def _server(requests: Requests, arm: int, trial: int, replica: int, rows: Ints) -> _Server:
    late = np.nan_to_num(requests.lag_ms(rows), nan=0.0, posinf=0.0, neginf=0.0) * 1e6
    sent = requests.start_ns[rows] + np.clip(late, 0.0, None).astype(np.int64)
    rows, sent = rows[np.argsort(sent, kind="stable")], np.sort(sent)
    first = requests.first_ns[rows]
    end = np.maximum(requests.end_ns[rows], sent)
    # What a client gave up on is no sign of its server.
    coarse = _first_signs(first, end, requests.ok[rows])
    signs, fine = coarse, Windows(start_ns=coarse[:0], end_ns=coarse[:0])
    step = _STEP_NS
    answered = requests.ok[rows] & (first > 0)
    wait_s = _quartile_s((first - sent)[answered])
    gap_s = _quartile_s((end - first)[answered & (end > first)])
    if len(requests.gaps_ms) and (lengths := requests.gap_offsets[rows + 1] - requests.gap_offsets[rows]).any():
        silent = np.flatnonzero(np.diff(coarse) >= FLOOR_NS // 2)
        fine = Windows(start_ns=coarse[silent], end_ns=coarse[silent + 1])
        signs = _distinct(np.concatenate((coarse, _tokens_within(requests, rows[lengths > 0], fine))))
        some = rows[lengths > 0][:: max(1, int((lengths > 0).sum()) // 2000)]
        typical = [requests.gaps_ms[requests.gap_offsets[row]] for row in some.tolist()]
        step = int(min(_STEP_NS, 2e6 * float(np.median(typical)) + _TOGETHER_NS))
        many = answered & (lengths > 0) & (end > first)
        gap_s = _quartile_s((end - first)[many] / lengths[many])
    return _Server(
        arm=arm,
        trial=trial,
        replica=replica,
        rows=rows,
        sent_ns=sent,
        first_ns=first,
        end_ns=end,
        ends=np.sort(end),
        signs=_apart(signs),
        fine=fine,
        step_ns=step,
        wait_s=wait_s,
        gap_s=gap_s,
    )


def _quartile_s(times_ns: npt.NDArray[Any]) -> float:
    """The lower quartile in seconds, at least 1 ms; 1 s of nothing."""
    return max(1e-3, quantile(times_ns, 0.25) / 1e9) if times_ns.size else 1.0


def _first_signs(first: Ints, end: Ints, ok: Bools) -> Ints:
    """First tokens and the ends of completed answers, in order. Where they are dense, only the first and the last in
    each 5 ms: no silence lies between, and no more are told apart later."""
    telling = ((first, first > 0), (end, ok))
    if not any(own.any() for _, own in telling):
        return first[:0]
    low = min(int(times.min(where=own, initial=_LAST_NS)) for times, own in telling)
    high = max(int(times.max(where=own, initial=-_LAST_NS)) for times, own in telling)
    stretches = (high - low) // _TOGETHER_NS + 1
    if stretches > len(first):
        return _distinct(np.concatenate([times[own] for times, own in telling]))
    earliest, latest = np.full(stretches, _LAST_NS), np.full(stretches, -_LAST_NS)
    for times, own in telling:
        place = (times[own] - low) // _TOGETHER_NS
        np.minimum.at(earliest, place, times[own])
        np.maximum.at(latest, place, times[own])
    some = latest >= earliest
    return _distinct(np.concatenate((earliest[some], latest[some])))


def _distinct(times: Ints) -> Ints:
    """The times, each once, in order. Sorts `times` in place."""
    times.sort()
    return times[np.append(True, times[1:] > times[:-1])] if times.size else times


def _apart(times: Ints) -> Ints:
    """The last of the times in each 5 ms: the tokens of one step are one sign, however many it answered."""
    if not times.size:
        return times
    place = (times - times[0]) // _TOGETHER_NS
    return np.asarray(times[np.append(place[1:] > place[:-1], True)])


def _tokens_within(requests: Requests, rows: Ints, windows: Windows) -> Ints:
    """When the tokens of `rows` after the first came, as far as they lie in the windows: no more are needed."""
    rows = rows[requests.first_ns[rows] > 0]  # else only the gaps are known, and not where they lie
    rows = rows[windows.touch(requests.first_ns[rows], requests.end_ns[rows])] if windows.start_ns.size else rows[:0]
    gaps = gaps_of(requests, rows)
    came = gaps.end_ns[~gaps.failed]
    return came[windows.touch(came, came + 1)]


# --- Silences ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Silences:
    long: Ints  # which of a server's stretches are stalls: more signs were due in them than chance explains
    usual_ns: Floats  # the mean silence with as many requests in flight as in each of those
    chance: Floats  # of each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stretches:
    """All stretches of one server without a sign while something was in flight, (n,) each."""

    start_ns: Ints
    end_ns: Ints
    sent: Codes  # how many were sent, and how many ended, up to its start
    ended: Codes

    @property
    def in_flight(self) -> Ints:
        return self.sent - self.ended


def _stretches(server: _Server) -> _Stretches:
    signs = server.signs
    last = int(server.ends[-1]) if server.ends.size else 0
    if signs.size:
        # The first silence begins with the first request, and answers that never came end one too.
        signs = np.concatenate((server.sent_ns[:1], signs[signs > server.sent_ns[0]]))
        signs = np.append(signs, last) if last > signs[-1] else signs
    starts, ends = signs[:-1], signs[1:]
    # With nothing in flight, silence begins with the next request.
    sent, ended = (
        np.searchsorted(times, starts, side="right").astype(np.int32) for times in (server.sent_ns, server.ends)
    )
    idle = np.flatnonzero(sent <= ended)
    arrival = np.append(server.sent_ns, _LAST_NS)[sent[idle]]
    starts = starts.copy()
    starts[idle] = np.minimum(arrival, ends[idle])
    for count, times in ((sent, server.sent_ns), (ended, server.ends)):
        count[idle] = np.searchsorted(times, starts[idle], side="right")
    kept = ends > starts
    return _Stretches(start_ns=starts[kept], end_ns=ends[kept], sent=sent[kept], ended=ended[kept])


def _silences(server: _Server, stretches: _Stretches, *, witnesses: int) -> tuple[_Silences | None, Watch]:
    """All silences with work in flight, and how improbable each is by the server's own usual ones.

    None where there are too few of them to know what is usual.
    """
    starts, ends = stretches.start_ns, stretches.end_ns
    lengths = ends - starts
    busy = float(lengths.sum()) / 1e9
    watch = Watch(silences=int(lengths.size), busy_s=busy, detectable_s=math.nan, witnesses=witnesses)
    if lengths.size < _FEWEST:
        return None, watch
    due = _Due.of(server)
    raw = due.within(stretches)
    level = _level(stretches.in_flight)
    # Where tokens were not looked at, a silence seems longer than it was: it does not count for what is usual.
    telling = server.fine.touch(starts, ends)
    telling = telling if telling.sum() >= _FEWEST else np.ones_like(telling)
    usual = _usual(level, raw, telling)
    score = np.divide(raw, usual[level], out=raw)  # signs that were due, by what is usual; 1 on average
    high, slope = _tail(score[telling])
    limit = high + slope * math.log(0.05 * score.size / _CHANCE)
    long = np.flatnonzero((lengths >= FLOOR_NS) & (score > limit))
    chance = np.minimum(1.0, 0.05 * np.exp(-(score[long] - high) / slope))
    means = _usual(level, lengths.astype(np.float64), telling)[level[long]]
    silences = _Silences(long=long, usual_ns=means, chance=chance)
    return silences, replace(watch, detectable_s=_detectable_s(server, due, usual * limit))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Due:
    """How many signs of life are due in a stretch: each waiting request owes its first token at one rate, each that is
    being answered its further signs at another, both as they are when all is well."""

    base_ns: int
    sent: _Integral
    first: _Integral
    end: _Integral
    per_waiting: float  # signs a second
    per_answering: float

    @classmethod
    def of(cls, server: _Server) -> _Due:
        base = int(server.sent_ns[0])
        begun = np.sort(np.where(server.first_ns > 0, server.first_ns, server.end_ns))
        sent, first, end = (_Integral.of(times, base) for times in (server.sent_ns, begun, server.ends))
        return cls(
            base_ns=base,
            sent=sent,
            first=first,
            end=end,
            per_waiting=1.0 / server.wait_s,
            per_answering=1.0 / server.gap_s,
        )

    def within(self, stretches: _Stretches) -> Floats:
        """Signs due in each of the stretches."""
        low, high = ((times - self.base_ns) / 1e9 for times in (stretches.start_ns, stretches.end_ns))
        sent = self.sent.between(low, high, stretches.sent)
        first = self.first.between(low, high, self.first.count(low))
        end = self.end.between(low, high, stretches.ended)
        return np.asarray(self.per_waiting * (sent - first) + self.per_answering * (first - end))

    def in_stall(self, start_ns: Ints, seconds: float) -> Floats:
        """Signs that would be due, and not come, in a stall of `seconds` from each of `start_ns` on."""
        low = (start_ns - self.base_ns) / 1e9
        waiting, answering = self.sent.count(low) - self.first.count(low), self.first.count(low) - self.end.count(low)
        arriving = self.sent.upto(low + seconds) - self.sent.upto(low) - seconds * self.sent.count(low)
        return np.asarray(self.per_waiting * (waiting * seconds + arriving) + self.per_answering * answering * seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Integral:
    """The number of times passed, and its integral over time."""

    times: Floats  # sorted, in s
    summed: Floats

    @classmethod
    def of(cls, sorted_ns: Ints, base_ns: int) -> _Integral:
        times = (sorted_ns - base_ns) / 1e9
        return cls(times=times, summed=np.concatenate(([0.0], np.cumsum(times))))

    def count(self, at: Floats) -> Ints:
        return np.asarray(np.searchsorted(self.times, at, side="right"))

    def upto(self, at: Floats) -> Floats:
        passed = self.count(at)
        return np.asarray(passed * at - self.summed[passed])

    def between(self, low: Floats, high: Floats, passed: Ints) -> Floats:
        """The integral from each `low`, at which so many had `passed`, to its `high`."""
        before = passed * low - self.summed[passed]
        # Most stretches end where the next one begins.
        upto, apart = np.append(before[1:], 0.0), np.flatnonzero(np.append(low[1:] != high[:-1], True))
        upto[apart] = self.upto(high[apart])
        return np.asarray(upto - before)


def _detectable_s(server: _Server, due: _Due, limits: Floats) -> float:
    """The shortest stall that counts as one at the moments at which nine tenths of the requests came."""
    some = server.sent_ns[:: max(1, len(server.sent_ns) // 1000)]
    limit = limits[np.minimum(_level(server.in_flight(some)), len(limits) - 1)]
    for seconds in np.geomspace(FLOOR_NS / 1e9, 600.0, 80).tolist():
        if float((due.in_stall(some, seconds) > limit).mean()) >= 0.9:
            return float(seconds)
    return math.inf


def _level(in_flight: Ints) -> Ints:
    """Requests in flight by octave: 0 for one, 1 for two or three, 2 for four to seven."""
    return np.asarray(np.log2(np.maximum(in_flight, 1)), dtype=np.int64)


def _usual(level: Ints, values: Floats, telling: Bools) -> Floats:
    """The mean of each level's `telling` values that their median implies, were they exponential.

    A level with few values takes over from the next emptier one, else from the next fuller.
    """
    levels, level, values = int(level.max()) + 1, level[telling], values[telling]
    counts = np.bincount(level, minlength=levels)
    known = [number for number in range(len(counts)) if counts[number] >= _FEWEST_OF_A_LEVEL]
    if not known:
        return np.full(len(counts), max(float(np.median(values)) / math.log(2.0), 1e-9))
    means = {number: float(np.median(values[level == number])) / math.log(2.0) for number in known}
    source = [max((k for k in known if k <= number), default=known[0]) for number in range(len(counts))]
    return np.asarray(np.maximum([means[number] for number in source], 1e-9), dtype=np.float64)


def _tail(score: Floats) -> tuple[float, float]:
    """The 95th percentile of the scores, and the `slope` by each of which chance falls by e beyond it: that of an
    exponential tail or a heavier one, as seen between the median and the 99th percentile, where even a server that
    stalls now and then shows its usual silences."""
    middle, high, top = np.quantile(score, [0.5, 0.95, 0.99], method="linear")
    body = float(high - middle) / math.log(10.0)
    tail = float(top - high) / math.log(5.0)
    return float(high), max(_LEAST_SLOPE, body, min(tail, 2.0 * body))


# --- Work -------------------------------------------------------------------------------------------------------------


def _prefills(requests: Requests, server: _Server, stretches: _Stretches, shapes: Shapes | None) -> Prefills:
    """The server's silences that ended with first tokens of prompts of known length."""
    starts, ends = stretches.start_ns, stretches.end_ns
    begun = np.flatnonzero((server.first_ns > 0) & (requests.prompt_tokens[server.rows] > 0))
    begun = begun[np.argsort(server.first_ns[begun], kind="stable")]
    if not begun.size or not starts.size:
        return Prefills.joined([])
    first, rows = server.first_ns[begun], server.rows[begun]
    low = np.searchsorted(first, np.maximum(starts + 1, ends - _TOGETHER_NS))
    high = np.searchsorted(first, ends + _BEHIND_NS, side="right")
    some = high > low
    starts, ends, low, high = starts[some], ends[some], low[some], high[some]
    tokens, new = (np.zeros(len(rows) + 1, dtype=np.int64) for _ in range(2))
    np.cumsum(requests.prompt_tokens[rows], out=tokens[1:])
    if shapes is not None:
        np.cumsum(shapes.new[rows], out=new[1:])
    # What had not been sent was not worked on.
    since = np.maximum(starts, server.sent_ns[begun][low])
    return Prefills(
        tokens=(tokens[high] - tokens[low]).astype(np.float64),
        seconds=(ends - np.minimum(since, ends)) / 1e9,
        new=new[high] > new[low],
    )


def _work(arm: int, servers: Sequence[_Server], prefills: Sequence[Prefills]) -> Work:
    """What prompts take on the arm."""
    of_arm: dict[int, list[Prefills]] = {}
    for server, part in zip(servers, prefills, strict=True):
        of_arm.setdefault(server.arm, []).append(part)
    own = Prefills.joined(of_arm.pop(arm))
    return Work.of(own, [Prefills.joined(parts) for parts in of_arm.values()])


# --- Stalls -----------------------------------------------------------------------------------------------------------


def _stalls(
    requests: Requests,
    server: _Server,
    stretches: _Stretches,
    others: Sequence[_Server],
    shapes: Shapes,
    work_of: Callable[[int], Work],
) -> tuple[Watch, list[Stall]]:
    silences, watch = _silences(server, stretches, witnesses=len(others))
    if silences is None or not silences.long.size:
        return watch, []
    busiest, work = _busiest(server), work_of(server.arm)
    new_rows, chance_rows = first_seen_rows(server.answering(stretches.end_ns), silences.long)
    stalls = []
    for place, index in enumerate(silences.long.tolist()):
        start, end = int(stretches.start_ns[index]), int(stretches.end_ns[index])
        begun = _begun_with(server, start, end, float(silences.usual_ns[place]), busiest)
        rows = server.rows[begun]
        new = rows[shapes.new[rows]]
        trigger = int(new[0]) if new.size else -1
        likeliest = new[:1] if new.size else rows
        if trigger >= 0:
            start = max(start, int(server.sent_ns[begun[shapes.new[rows]][0]]))
        tokens = _tokens_run(requests, server, end, trigger)
        if work.explains(tokens, (end - start) / 1e9):
            cause = WORK
        elif _stood_still(others, start, end):
            cause = HOST
        elif rows.size and _as_long_elsewhere(requests, others, likeliest, end - start):
            cause = WORK
        else:
            cause = UNKNOWN
        flying = server.rows[(server.sent_ns < end) & (server.end_ns > start)]
        stalls.append(
            Stall(
                arm=requests.arms[server.arm],
                trial=server.trial,
                replica=requests.replicas[server.replica] if server.replica >= 0 else None,
                start_ns=start,
                end_ns=end,
                cause=cause,
                chance=float(silences.chance[place]),
                begun=bool(rows.size),
                trigger=trigger,
                shape=int(shapes.shape[trigger]) if trigger >= 0 else -1,
                chance_new=chance_of_new(shapes.share(rows)),
                chance_as_long=chance_of_new(shapes.share_as_long(rows)),
                new_rows=bool(new_rows[place]),
                chance_rows=float(chance_rows[place]),
                longest=longest_of(shapes, likeliest),
                work_s=work.at_most_s(tokens),
                requests=flying,
            )
        )
    return watch, stalls


def first_seen_rows(answering: Ints, some: Ints) -> tuple[Bools, Floats]:
    """For the silences `some`: whether more answers were under way at its begin than at that of any before, and the
    share of such among the silences about it, itself included; `answering` is of all silences, in order of time.

    A server that compiles for each number of rows that a step has stands still when there is a row more than ever.
    """
    most = np.maximum.accumulate(answering)
    new = answering > np.append(0, most[:-1])
    before = np.append(0, np.cumsum(new))
    low = np.maximum(some - _ABOUT, 0)
    return new[some], (before[some] - before[low] + 1.0) / (some - low + 1.0)


def _parts(requests: Requests, server: _Server, stretches: _Stretches) -> list[Stall]:
    """The stalls that only some requests of the server show."""
    silent = stretches.end_ns - stretches.start_ns >= FLOOR_NS
    silences = Windows(start_ns=stretches.start_ns[silent], end_ns=stretches.end_ns[silent])
    return [
        Stall(
            arm=requests.arms[server.arm],
            trial=server.trial,
            replica=requests.replicas[server.replica] if server.replica >= 0 else None,
            start_ns=gap.start_ns,
            end_ns=gap.end_ns,
            cause=PART,
            requests=gap.requests,
        )
        for gap in partial_stalls(requests, server.rows, server.sent_ns, silences)
    ]


def _tokens_run(requests: Requests, server: _Server, end: int, trigger: int) -> float:
    """Prompt tokens that had been run when the silence ended: those of the first tokens that ended it, and the
    trigger's whether or not it is among them."""
    released = server.rows[(server.first_ns >= end - _TOGETHER_NS) & (server.first_ns <= end + _BEHIND_NS)]
    released = released if trigger < 0 or trigger in released else np.append(released, trigger)
    return float(np.maximum(requests.prompt_tokens[released], 0).sum())


def _busiest(server: _Server) -> int:
    """The most requests that were being answered at once: what the server has room for, as far as can be seen."""
    begun = server.first_ns > 0
    firsts, ended = np.sort(server.first_ns[begun]), np.sort(server.end_ns[begun])
    at_once = np.arange(1, len(firsts) + 1) - np.searchsorted(ended, firsts, side="right")
    return int(at_once.max(initial=0))


def _begun_with(server: _Server, start: int, end: int, usual_ns: float, busiest: int) -> Ints:
    """Places of the requests that the server may have turned to when the silence from `start` to `end` began.

    Those that came about then; the longest waiting one where a full server had just ended another; and those
    that had been waiting and got their first tokens together at its end.
    """
    unseen = (server.first_ns <= 0) | (server.first_ns > start)
    unended = server.end_ns > start
    waiting = unseen & unended & (server.sent_ns < end)
    came = (server.sent_ns >= start - server.step_ns) & (server.sent_ns <= start + 4.0 * usual_ns)
    out_together = (server.sent_ns < start) & (server.first_ns <= end + _TOGETHER_NS) & (server.first_ns > 0)
    chosen = waiting & (came | out_together)
    answering = int(((server.first_ns > 0) & (server.first_ns <= start) & unended).sum())
    queued = np.flatnonzero(waiting & (server.sent_ns < start))
    if queued.size >= _QUEUE or answering >= max(2, 0.7 * busiest):
        chosen[queued[:_QUEUE]] = True
    return np.flatnonzero(chosen)


def _stood_still(others: Sequence[_Server], start: int, end: int) -> bool:
    """Whether every other server that had work in flight was silent for half of the stretch: one that went on is
    proof that the host did."""
    silent = []
    for other in others:
        inside = other.signs[np.searchsorted(other.signs, start) : np.searchsorted(other.signs, end)]
        edges = np.concatenate(([start], inside, [end]))
        place = int(np.argmax(np.diff(edges)))
        low, high = int(edges[place]), int(edges[place + 1])
        middle = np.array([low + (high - low) // 2])
        if inside.size or other.in_flight(middle)[0] > 0:
            silent.append(2 * (high - low) >= end - start and other.in_flight(middle)[0] > 0)
    return bool(silent) and all(silent)


def _as_long_elsewhere(requests: Requests, others: Sequence[_Server], rows: Ints, length_ns: int) -> bool:
    """Whether every other arm made a copy of one of the requests wait three quarters as long, or, where there are no
    copies, prompts that were about as long: then it is their work, and no compile."""
    arm = requests.arm[rows[0]]
    pairs = requests.pair[rows]
    early, late = int(requests.start_ns[rows].min()) - _COPY_NS, int(requests.start_ns[rows].max()) + _COPY_NS
    as_long: dict[int, bool] = {}
    for other in others:
        if other.arm == arm:
            continue
        near = other.rows[np.searchsorted(other.sent_ns, early) : np.searchsorted(other.sent_ns, late)]
        copies = near[(requests.pair[near] >= 0) & np.isin(requests.pair[near], pairs)]
        if copies.size:
            long = bool((4 * _waits(requests, copies) >= 3 * length_ns).any())
        else:
            tokens = int(requests.prompt_tokens[rows].max())
            lengths = requests.prompt_tokens[other.rows]
            alike = other.rows[(lengths > 0) & (np.abs(lengths - tokens) <= 0.1 * tokens)]
            alike = alike[np.argsort(np.abs(requests.prompt_tokens[alike] - tokens), kind="stable")][:_ALIKE]
            if not alike.size:
                continue
            long = 4.0 * float(np.median(_waits(requests, alike))) >= 3.0 * length_ns
        as_long[other.arm] = as_long.get(other.arm, False) or long
    return bool(as_long) and all(as_long.values())


def _waits(requests: Requests, rows: Ints) -> Ints:
    ends = np.where(requests.first_ns[rows] > 0, requests.first_ns[rows], requests.end_ns[rows])
    return np.asarray(ends - requests.start_ns[rows])
