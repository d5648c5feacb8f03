"""Stretches in which some requests of a server stood still while it went on with others.

One server with one loop has none: a step, or the lack of one, is the same for every request that it is answering, and
who came first is turned to first. Where several servers stand behind one address and name no replica, a stall of one is
hidden by the answers of the others, but not in the records of the requests that it held up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from analysis.arrays import Codes, Floats, Ints
from analysis.records.requests import Requests
from analysis.run.gaps import gaps_of
from analysis.run.spikes import Windows

TOGETHER_S = 0.5  # two requests or more that stood still at once, at least as long
ALONE_S = 1.0  # a single one, which a lost packet can hold up too
_SAME_NS = 100_000_000  # gaps whose begins and ends differ by less are one
_EDGE_NS = 50_000_000  # clocks, networks and a step under way
_OVERTAKING = 2  # requests that came later and were answered earlier
_WAITING = 3  # that waited together for their first token
_NEAREST, _ROOM = 30, 1.5
_MOST = 200  # the longest candidates are looked at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """Requests that stood still from `start_ns` to `end_ns`; `requests` are their rows."""

    start_ns: int
    end_ns: int
    requests: Ints


def partial_stalls(requests: Requests, rows: Ints, sent_ns: Ints, silences: Windows) -> list[Gap]:
    """The gaps of requests `rows` of one server while it went on with others, in order of time; those that overlap are
    one.

    `sent_ns`: when each of `rows` was sent, rising; `silences`: when the whole server stood still. Between tokens,
    others went on when their tokens, not counting first ones, left no hole of half the gap. Before the first token,
    when three requests or more waited together, each half as long again as nearly all prompts of its length, and others
    that were sent later got theirs earlier.
    """
    held = [*_between_tokens(requests, rows), *_before_the_first(requests, rows, sent_ns, silences)]
    return _joined(held)


def _between_tokens(requests: Requests, rows: Ints) -> list[Gap]:
    if not len(requests.gaps_ms):
        return []
    rows = rows[requests.first_ns[rows] > 0]
    starts, ends, owners = _long_gaps(requests, rows)
    if not starts.size:
        return []
    _, place = np.unique(np.stack((starts // _SAME_NS, ends // _SAME_NS)), axis=1, return_inverse=True)
    place = place.ravel()
    groups = [np.flatnonzero(place == number) for number in range(int(place.max()) + 1)]
    groups = [group for group in groups if float((ends[group] - starts[group]).max()) / 1e9 >= _least_s(group.size)]
    groups.sort(key=lambda group: -int((ends[group] - starts[group]).max()))
    held = []
    for group in groups[:_MOST]:
        start, end = int(starts[group].min()), int(ends[group].max())
        others = rows[(requests.first_ns[rows] < start) & (requests.end_ns[rows] > start)]
        signs = _tokens(requests, others[~np.isin(others, owners[group])], start + _EDGE_NS, end - _EDGE_NS)
        holes = np.diff(np.concatenate(([start], np.sort(signs), [end])))
        if 2 * int(holes.max()) < end - start:
            held.append(Gap(start_ns=start, end_ns=end, requests=owners[group]))
    return held


def _least_s(requests: int) -> float:
    return TOGETHER_S if requests > 1 else ALONE_S


def _long_gaps(requests: Requests, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Begins, ends and rows of the gaps between tokens that may count."""
    rows = rows[(requests.first_ns[rows] > 0) & (requests.max_itl_ms[rows] >= TOGETHER_S * 1e3)]
    gaps = gaps_of(requests, rows)
    gaps = gaps.of((gaps.ms >= TOGETHER_S * 1e3) & ~gaps.failed)
    return gaps.end_ns - (gaps.ms.astype(np.float64) * 1e6).astype(np.int64), gaps.end_ns, gaps.row


def _tokens(requests: Requests, rows: Ints, start_ns: int, end_ns: int) -> Ints:
    """When tokens of `rows` after the first came, within the stretch."""
    gaps = gaps_of(requests, rows[requests.first_ns[rows] > 0])
    return gaps.end_ns[(gaps.end_ns > start_ns) & (gaps.end_ns < end_ns) & ~gaps.failed]


def _before_the_first(requests: Requests, rows: Ints, sent_ns: Ints, silences: Windows) -> list[Gap]:
    answered = (requests.first_ns[rows] > 0) & requests.ok[rows]
    rows, sent = rows[answered], sent_ns[answered]
    first = requests.first_ns[rows]
    # A silence of the whole server is no sign of a second one.
    waits_s = (first - sent - silences.overlap_ns(sent, first)) / 1e9
    long = np.flatnonzero(waits_s >= TOGETHER_S)
    long = np.sort(long[np.argsort(-waits_s[long], kind="stable")][:_MOST])
    if not long.size:
        return []
    lengths = np.maximum(requests.prompt_tokens[rows], 1)

    @cache
    def by_length() -> tuple[Codes, Floats]:
        order = np.argsort(lengths, kind="stable")
        return lengths[order], waits_s[order]

    least = int(TOGETHER_S * 1e9)
    held = []
    for index in long.tolist():
        after = slice(*np.searchsorted(sent, [sent[index] + _EDGE_NS, first[index]]))
        overtaken = int((first[after] < first[index] - least).sum()) >= _OVERTAKING
        if overtaken and waits_s[index] > _usual_s(*by_length(), int(lengths[index])):
            held.append(index)
    starts, ends = sent[held], first[held]
    overlaps = np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts)
    # One or two may have been looked at late for reasons of their own.
    together = (overlaps >= least).sum(axis=1) >= _WAITING
    return [
        Gap(start_ns=int(start), end_ns=int(end), requests=rows[index : index + 1])
        for index, start, end, more in zip(held, starts, ends, together, strict=True)
        if more and end - start >= int(ALONE_S * 1e9)
    ]


def _usual_s(lengths: Ints, waits_s: Floats, length: int) -> float:
    """What nearly all of the nearest 30 prompts by length waited, with room; lengths rise."""
    place = int(np.searchsorted(lengths, length))
    low = max(0, min(place - _NEAREST // 2, lengths.size - _NEAREST))
    return _ROOM * float(np.quantile(waits_s[low : low + _NEAREST], 0.9, method="linear"))


def _joined(gaps: Sequence[Gap]) -> list[Gap]:
    joined: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: gap.start_ns):
        if joined and gap.start_ns < joined[-1].end_ns:
            last = joined[-1]
            rows = np.union1d(last.requests, gap.requests)
            joined[-1] = Gap(start_ns=last.start_ns, end_ns=max(last.end_ns, gap.end_ns), requests=rows)
        else:
            joined.append(gap)
    return joined
