"""When a server, or some of its requests, had work in flight and showed no sign of life, and which silences are stalls.

docs/explanation/method.md, "Stalls that clients see", defines signs of life, silences and stalls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.run.compile_events import Windows, windows_of
from tailgate.analysis.run.gaps import gaps_of
from tailgate.analysis.statistics.quantiles import quantile

FLOOR_NS = 250_000_000  # a shorter silence may be a garbage collection or a delay of the network
TOGETHER_NS = 5_000_000  # signs this close together came out of one step
_FEWEST = 50  # silences that show what is usual
_MANY = 1 << 17  # of more silences, or more requests, as many show that
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_FEWEST_OF_A_LEVEL = 30  # the same for one number of requests in flight
_CHANCE = 0.01  # that a server which never stalls shows one silence that counts as a stall
_LEAST_SLOPE = 0.5  # of the tail: an exponential one has 1, that of steps of one length hardly any

_PARTIAL_NS = 500_000_000  # two requests or more that stalled at once, at least as long
_ALONE_NS = 1_000_000_000  # a single one, which a lost packet can delay too
_SAME_NS = 100_000_000  # gaps whose begins and ends differ by less are one
_EDGE_NS = 50_000_000  # clocks, networks and a step under way
_OVERTAKING = 2  # requests that came later and were answered earlier
_WAITING = 3  # requests that waited together for their first token; one or two may have reasons of their own
_NEAREST, _TOLERANCE = 30, 1.5  # a wait half as long again as the p90 of the prompts of about the same length
_MOST = 200  # candidates: the longest
Stretch = tuple[int, int, Ints]  # from, to, the requests that stalled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server:
    """One replica of an arm in one trial."""

    arm: int
    trial: int
    replica: int
    rows: Ints  # its requests, by the time at which they were sent
    sent_ns: Ints  # of each of them
    begun: Ints  # when answers began or their requests ended without one, sorted
    ended: Ints  # when requests ended, sorted
    signs: Ints  # sorted; tokens after the first only within `fine`
    fine: Windows  # the longer stretches between first tokens and ends
    waiting_rate: float  # signs due in a second of each request that waits for its first token, and of each that is
    answering_rate: float  # being answered; quartiles, which hardly depend on stalls

    def end_ns(self, requests: Requests) -> Ints:
        """Return when each of its requests ended."""
        return np.maximum(requests.end_ns[self.rows], self.sent_ns)

    def done_ns(self, requests: Requests) -> Ints:
        """Return when each prompt was done: its first token, or its end if it has none; 0 if never."""
        first_ns = requests.first_ns[self.rows]
        return np.where(first_ns > 0, first_ns, np.where(requests.ok[self.rows], self.end_ns(requests), 0))

    def in_flight(self, at_ns: Ints) -> Ints:
        """Count the requests sent and not ended at each time."""
        sent = np.searchsorted(self.sent_ns, at_ns, side="right")
        return np.asarray(sent - np.searchsorted(self.ended, at_ns, side="right"))

    def due(self, passed: Callable[[Ints], Ints | Floats]) -> Floats:
        """Return the signs due per second, or in a stretch, by how many of some times `passed` until then, or in it."""
        sent, begun, ended = map(passed, (self.sent_ns, self.begun, self.ended))
        return np.asarray(self.waiting_rate * (sent - begun) + self.answering_rate * (begun - ended))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Silences:
    """The silences of a server, (n,) each."""

    start_ns: Ints
    end_ns: Ints
    stall: Bools  # whether it is one
    detectable_s: float  # the shortest stall that shows at nine tenths of the moments at which requests came, or NaN


def servers_of(requests: Requests, trial: int) -> list[Server]:
    """Return every replica of every arm in the trial."""
    found: list[tuple[int, int, Ints]] = []
    for arm, name in enumerate(requests.arms):
        of_arm = requests.sound(name, trial)
        replicas = requests.replica[of_arm]
        present = np.unique(replicas)
        known = present[present >= 0]
        if known.size == 1:
            # A request that was never answered names no replica, and here there was only one.
            replicas = np.full_like(replicas, known[0])
        # Where there were several, their unanswered requests belong to none.
        for replica in (known if known.size else present).tolist():
            found.append((arm, replica, of_arm[replicas == replica]))
    with ThreadPoolExecutor(2) as processors:
        return list(processors.map(lambda item: _server(requests, trial, *item), found))


def silences_of(server: Server) -> Silences:
    """Find the server's silences. Of fewer than fifty none is a stall: they do not show what is usual."""
    starts, ends = _silences(server)
    lengths = ends - starts
    if lengths.size < _FEWEST:
        return Silences(start_ns=starts, end_ns=ends, stall=np.zeros(lengths.size, np.bool_), detectable_s=math.nan)
    some = np.zeros(lengths.size, np.bool_)
    some[_some(lengths.size)] = True
    chosen = np.flatnonzero(some | (lengths >= FLOOR_NS))
    due = server.due(lambda times: _integral(times, starts[chosen], ends[chosen]))
    level = _level(server.in_flight(starts[chosen]))
    # Where tokens were not read, a silence seems longer than it was: it does not count for what is usual.
    telling = some[chosen] & server.fine.touch(starts[chosen], ends[chosen])
    telling = telling if telling.sum() >= _FEWEST else some[chosen]
    usual = _usual(level, due, telling)
    score = due / usual[level]
    limit = _limit(score[telling], lengths.size)
    stall = np.zeros(lengths.size, np.bool_)
    stall[chosen] = (lengths[chosen] >= FLOOR_NS) & (score > limit)
    return Silences(start_ns=starts, end_ns=ends, stall=stall, detectable_s=_detectable_s(server, usual * limit))


def _server(requests: Requests, trial: int, arm: int, replica: int, rows: Ints) -> Server:
    late_ms = np.nan_to_num(requests.lag_ms(rows).astype(np.float64), copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    sent = requests.start_ns[rows]
    sent += (np.maximum(late_ms, 0.0, out=late_ms) * 1e6).astype(np.int64)
    order = np.argsort(sent, kind="stable")
    rows, sent = rows[order], sent[order]
    del late_ms, order  # arrays of a long trial take much memory
    first, ok = requests.first_ns[rows], requests.ok[rows]
    end = np.maximum(requests.end_ns[rows], sent)
    answered, some = ok & (first > 0), _some(len(rows))
    wait_s = _quartile_s((first[some] - sent[some])[answered[some]])
    gap_s = _quartile_s((end[some] - first[some])[(answered & (end > first))[some]])
    begun, ended = np.where(first > 0, first, end), end.copy()
    for times in (begun, ended):
        times.sort(kind="stable")  # fast, since they are nearly in order
    # What a client gave up on is no sign of its server.
    answers = begun if (first > 0).all() else np.sort(first[first > 0])
    finishes = ended if ok.all() else np.sort(end[ok])
    tokens = requests.gap_offsets[rows + 1] - requests.gap_offsets[rows] if len(requests.gaps_ms) else rows[:0]
    if tokens.any():
        several = answered & (tokens > 0) & (end > first)
        gap_s = _quartile_s((end - first)[several] / tokens[several])
    del first, end
    signs, fine = _signs(answers, finishes), windows_of(())
    if tokens.any():
        silent = np.flatnonzero(np.diff(signs) >= FLOOR_NS // 2)
        fine = Windows(start_ns=signs[silent], end_ns=signs[silent + 1])
        signs = _signs(signs, np.sort(_tokens_within(requests, rows[tokens > 0], fine)))
    return Server(
        arm=arm,
        trial=trial,
        replica=replica,
        rows=rows,
        sent_ns=sent,
        begun=begun,
        ended=ended,
        signs=signs,
        fine=fine,
        waiting_rate=1.0 / wait_s,
        answering_rate=1.0 / gap_s,
    )


def _some(size: int) -> Ints:
    """Return the places of all of so many values, or of about `_MANY` of more.

    They spread evenly and in no fixed step, since values may alternate. Source: Weyl's sequence of the golden ratio.
    """
    return np.arange(size) if size <= _MANY else (np.arange(_MANY) * _GOLDEN % 1.0 * size).astype(np.int64)


def _quartile_s(times_ns: npt.NDArray[np.int64 | np.float64]) -> float:
    """Return the lower quartile in seconds, at least 1 ms; 1 s without values."""
    return max(1e-3, quantile(times_ns, 0.25) / 1e9) if times_ns.size else 1.0


def _signs(*times: Ints) -> Ints:
    """Merge the times, each array in order, and keep the last of each 5 ms: the tokens of one step are one sign."""
    places = (own // TOGETHER_NS for own in times)
    ends = (np.append(place[1:] != place[:-1], True)[: place.size] for place in places)
    last = [own[end] for own, end in zip(times, ends, strict=True)]
    if len(last) == 1:
        return np.asarray(last[0])
    merged: Ints = np.concatenate(last)
    merged.sort()
    return _signs(merged)


def _tokens_within(requests: Requests, rows: Ints, windows: Windows) -> Ints:
    """Return when the tokens of `rows` after the first came, within the windows."""
    rows = rows[requests.first_ns[rows] > 0]  # else only the gaps are known, and not where they lie
    rows = rows[windows.touch(requests.first_ns[rows], requests.end_ns[rows])]
    gaps = gaps_of(requests, rows)
    came = gaps.end_ns[~gaps.failed]
    return np.asarray(came[windows.touch(came, came + 1)])


def _integral(times_ns: Ints, start_ns: Ints, end_ns: Ints) -> Floats:
    """Return the number of times passed, integrated from each `start_ns` to its `end_ns`, in s."""
    before = np.zeros(len(times_ns) + 1)
    since = before[1:]
    np.subtract(times_ns, times_ns[0], out=since)
    since /= 1e9
    np.cumsum(since, out=since)

    def upto(at_ns: Ints) -> Floats:
        passed = np.searchsorted(times_ns, at_ns, side="right")
        return np.asarray(passed * ((at_ns - times_ns[0]) / 1e9) - before[passed])

    return upto(end_ns) - upto(start_ns)


def _silences(server: Server) -> tuple[Ints, Ints]:
    """Return when each stretch without a sign, with requests in flight, began and ended."""
    signs = server.signs
    if not signs.size:
        return signs, signs
    # The first silence begins with the first request, and answers that never came end one too.
    signs = np.concatenate((server.sent_ns[:1], signs[signs > server.sent_ns[0]]))
    signs = np.append(signs, server.ended[-1]) if server.ended[-1] > signs[-1] else signs
    starts, ends = signs[:-1].copy(), signs[1:]
    # With nothing in flight, silence begins with the next request.
    idle = np.flatnonzero(server.in_flight(starts) <= 0)
    next_sent = np.searchsorted(server.sent_ns, starts[idle], side="right")
    starts[idle] = np.minimum(np.append(server.sent_ns, np.iinfo(np.int64).max)[next_sent], ends[idle])
    return starts[ends > starts], ends[ends > starts]


def _level(in_flight: Ints) -> Ints:
    """Return the octave of requests in flight: 0 for one, 1 for two or three, 2 for four to seven."""
    return np.asarray(np.log2(np.maximum(in_flight, 1)), dtype=np.int64)


def _usual(level: Ints, due: Floats, telling: Bools) -> Floats:
    """Return the mean of each level's `telling` values that their median implies, were they exponential.

    A level with few values uses the next emptier one, else the next fuller.
    """
    levels = range(int(level.max()) + 1)
    of_level = [due[telling & (level == number)] for number in levels]
    known = [number for number in levels if of_level[number].size >= _FEWEST_OF_A_LEVEL]
    medians = [float(np.median(of_level[number])) for number in known] or [float(np.median(due[telling]))]
    source = np.maximum(np.searchsorted(known, levels, side="right") - 1, 0)
    return np.maximum(np.array(medians)[source] / math.log(2.0), 1e-9)


def _limit(score: Floats, count: int) -> float:
    """Return the score that a server without stalls exceeds in `count` silences with a chance of 1 %.

    Chance falls by e for each slope beyond the 95th percentile: that of an exponential tail or a heavier one, as seen
    between the median and the 99th percentile, where even a server that stalls now and then shows its usual silences.
    """
    middle, high, top = np.quantile(score, [0.5, 0.95, 0.99], method="linear")
    body = float(high - middle) / math.log(10.0)
    tail = float(top - high) / math.log(5.0)
    slope = max(_LEAST_SLOPE, body, min(tail, 2.0 * body))
    return float(high) + slope * math.log(0.05 * count / _CHANCE)


def _detectable_s(server: Server, limits: Floats) -> float:
    some = server.sent_ns[:: max(1, len(server.sent_ns) // 1000)]
    limit = limits[np.minimum(_level(server.in_flight(some)), len(limits) - 1)]
    rate = server.due(lambda times: np.searchsorted(times, some, side="right"))
    sent = np.searchsorted(server.sent_ns, some, side="right")
    for seconds in np.geomspace(FLOOR_NS / 1e9, 600.0, 80).tolist():
        more = np.searchsorted(server.sent_ns, some + int(seconds * 1e9), side="right") - sent
        if float((seconds * (rate + 0.5 * server.waiting_rate * more) > limit).mean()) >= 0.9:
            return float(seconds)
    return math.inf


def held_first_tokens(requests: Requests, server: Server) -> Silences:
    """Find when the server gave no first token, though running answers may have gone on. A stall begins when one was
    due, by the median; it lasts 1 s and twice what chance explains, and three requests wait at its end."""
    first = requests.first_ns[server.rows]
    waiting = replace(server, ended=server.begun, signs=_signs(np.sort(first[first > 0])), fine=windows_of(()))
    found = silences_of(waiting)
    lengths, together = found.end_ns - found.start_ns, waiting.in_flight(found.end_ns - _EDGE_NS) >= _WAITING
    usual_ns = np.int64(np.median(lengths)) if lengths.size else 0
    held = found.stall & together & (lengths - usual_ns >= _ALONE_NS)
    held &= lengths > 2 * lengths[together & ~found.stall].max(initial=0)
    return replace(found, start_ns=found.start_ns + held * usual_ns, stall=held)


def partial_stalls(requests: Requests, server: Server, silences: Silences) -> list[Stretch]:
    """Find stalls of some requests while the server answered others, by time; overlapping stretches are one.

    A server with one loop has none. If several servers share one address and name no replica, the answers of the others
    hide a stall of one, but not from the requests that it delayed.
    """
    joined: list[Stretch] = []
    found = [*_between_tokens(requests, server.rows), *_before_the_first(requests, server, silences)]
    for start, end, own in sorted(found, key=lambda item: item[0]):
        if joined and start < joined[-1][1]:
            earlier, last, others = joined.pop()
            start, end, own = earlier, max(last, end), np.union1d(others, own)
        joined.append((start, end, own))
    return joined


def _between_tokens(requests: Requests, rows: Ints) -> Iterator[Stretch]:
    """Yield gaps in which the tokens of others left no hole of half the length."""
    if not len(requests.gaps_ms):
        return
    rows = rows[requests.first_ns[rows] > 0]
    long = gaps_of(requests, rows[requests.max_itl_ms[rows] >= _PARTIAL_NS / 1e6])
    long = long.of((long.ms >= _PARTIAL_NS / 1e6) & ~long.failed)
    starts = long.end_ns - (long.ms.astype(np.float64) * 1e6).astype(np.int64)
    lengths = long.end_ns - starts
    places = np.stack((starts // _SAME_NS, long.end_ns // _SAME_NS))
    group = np.unique(places, axis=1, return_inverse=True)[1].ravel()
    groups = [np.flatnonzero(group == number) for number in range(int(group.max(initial=-1)) + 1)]
    groups = [some for some in groups if some.size > 1 or lengths[some].max() >= _ALONE_NS]
    for some in sorted(groups, key=lambda some: -int(lengths[some].max()))[:_MOST]:
        start, end = int(starts[some].min()), int(long.end_ns[some].max())
        others = rows[(requests.first_ns[rows] < start) & (requests.end_ns[rows] > start)]
        theirs = gaps_of(requests, others[~np.isin(others, long.row[some])])
        inside = (theirs.end_ns > start + _EDGE_NS) & (theirs.end_ns < end - _EDGE_NS) & ~theirs.failed
        holes = np.diff(np.concatenate(([start], np.sort(theirs.end_ns[inside]), [end])))
        if 2 * int(holes.max()) < end - start:
            yield start, end, long.row[some]


def _before_the_first(requests: Requests, server: Server, silences: Silences) -> Iterator[Stretch]:
    """Yield waits of three requests or more at once for their first token.

    Each is half as long again as nearly all prompts of its length, while later requests got their first token earlier.
    """
    if not (requests.first_ms[server.rows] >= _PARTIAL_NS / 1e6).any():
        return
    answered = (requests.first_ns[server.rows] > 0) & requests.ok[server.rows]
    rows, sent = server.rows[answered], server.sent_ns[answered]
    first = requests.first_ns[rows]
    # A silence of the whole server is no sign of a second one.
    whole = silences.end_ns - silences.start_ns >= FLOOR_NS
    silent = Windows(start_ns=silences.start_ns[whole], end_ns=silences.end_ns[whole])
    waited = first - sent - silent.overlap_ns(sent, first)
    long = np.flatnonzero(waited >= _PARTIAL_NS)
    if not long.size:
        return
    long = np.sort(long[np.argsort(-waited[long], kind="stable")][:_MOST])
    lengths = requests.prompt_tokens[rows]
    by_length = np.argsort(lengths, kind="stable")
    overtaken = []
    for index in long.tolist():
        later = slice(*np.searchsorted(sent, [sent[index] + _EDGE_NS, first[index]]))
        place = int(np.searchsorted(lengths, lengths[index], sorter=by_length)) - _NEAREST // 2
        alike = by_length[max(0, min(place, len(rows) - _NEAREST)) :][:_NEAREST]
        usual = _TOLERANCE * quantile(waited[alike], 0.9)
        if np.count_nonzero(first[later] < first[index] - _PARTIAL_NS) >= _OVERTAKING and waited[index] > usual:
            overtaken.append(index)
    starts, ends = sent[overtaken], first[overtaken]
    together = (np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts) >= _PARTIAL_NS).sum(axis=1)
    for place in np.flatnonzero((together >= _WAITING) & (ends - starts >= _ALONE_NS)).tolist():
        yield int(starts[place]), int(ends[place]), rows[[overtaken[place]]]
