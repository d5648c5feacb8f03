"""Stalls of some requests of a server while it answered others.

One server with one loop has none: a step, or the lack of one, is the same for all requests that it is answering, and it
turns to requests in the order in which they came. Where several servers share one address and name no replica, the
answers of the others hide a stall of one, but not from the requests that it delayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.arrays import Ints
from analysis.records.requests import Requests
from analysis.run.compile_events import Windows
from analysis.run.gaps import gaps_of
from analysis.statistics.quantiles import quantile

_TOGETHER_NS = 500_000_000  # two requests or more that stalled at once, at least as long
_ALONE_NS = 1_000_000_000  # a single one, which a lost packet can delay too
_SAME_NS = 100_000_000  # gaps whose begins and ends differ by less are one
_EDGE_NS = 50_000_000  # clocks, networks and a step under way
_OVERTAKING = 2  # requests that came later and were answered earlier
_WAITING = 3  # that waited together for their first token; one or two may have waited for reasons of their own
_NEAREST, _ROOM = 30, 1.5  # a wait that is half as long again as nearly all of the prompts about as long
_MOST = 200  # candidates: the longest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """Requests that stalled from `start_ns` to `end_ns`; `requests` are their rows."""

    start_ns: int
    end_ns: int
    requests: Ints


def partial_stalls(requests: Requests, rows: Ints, sent_ns: Ints, silences: Windows) -> list[Gap]:
    """The gaps of requests `rows` of one server while it answered others, in order of time; those that overlap are one.

    `sent_ns`: when each of `rows` was sent, rising; `silences`: when the whole server was silent.
    """
    joined: list[Gap] = []
    gaps = [*_between_tokens(requests, rows), *_before_the_first(requests, rows, sent_ns, silences)]
    for gap in sorted(gaps, key=lambda gap: gap.start_ns):
        if joined and gap.start_ns < joined[-1].end_ns:
            last = joined.pop()
            owners, end_ns = np.union1d(last.requests, gap.requests), max(last.end_ns, gap.end_ns)
            gap = Gap(start_ns=last.start_ns, end_ns=end_ns, requests=owners)
        joined.append(gap)
    return joined


def _between_tokens(requests: Requests, rows: Ints) -> list[Gap]:
    """Gaps in which the tokens of others left no hole of half as long."""
    if not len(requests.gaps_ms):
        return []
    rows = rows[requests.first_ns[rows] > 0]
    least_ms = _TOGETHER_NS / 1e6
    long = gaps_of(requests, rows[requests.max_itl_ms[rows] >= least_ms])
    long = long.of((long.ms >= least_ms) & ~long.failed)
    ends, lengths = long.end_ns, (long.ms.astype(np.float64) * 1e6).astype(np.int64)
    starts = ends - lengths
    _, group = np.unique(np.stack((starts // _SAME_NS, ends // _SAME_NS)), axis=1, return_inverse=True)
    groups = [np.flatnonzero(group.ravel() == number) for number in range(int(group.max(initial=-1)) + 1)]
    groups = [some for some in groups if some.size > 1 or lengths[some].max() >= _ALONE_NS]
    found = []
    for some in sorted(groups, key=lambda some: -int(lengths[some].max()))[:_MOST]:
        start, end = int(starts[some].min()), int(ends[some].max())
        others = rows[(requests.first_ns[rows] < start) & (requests.end_ns[rows] > start)]
        theirs = gaps_of(requests, others[~np.isin(others, long.row[some])])
        inside = (theirs.end_ns > start + _EDGE_NS) & (theirs.end_ns < end - _EDGE_NS) & ~theirs.failed
        holes = np.diff(np.concatenate(([start], np.sort(theirs.end_ns[inside]), [end])))
        if 2 * int(holes.max()) < end - start:
            found.append(Gap(start_ns=start, end_ns=end, requests=long.row[some]))
    return found


def _before_the_first(requests: Requests, rows: Ints, sent_ns: Ints, silences: Windows) -> list[Gap]:
    """Waits of three requests or more at once for their first token, each half as long again as nearly all prompts of
    its length, while others that were sent later got theirs earlier."""
    answered = (requests.first_ns[rows] > 0) & requests.ok[rows]
    rows, sent = rows[answered], sent_ns[answered]
    first = requests.first_ns[rows]
    # A silence of the whole server is no sign of a second one.
    waited = first - sent - silences.overlap_ns(sent, first)
    long = np.flatnonzero(waited >= _TOGETHER_NS)
    long = np.sort(long[np.argsort(-waited[long], kind="stable")][:_MOST])
    lengths = requests.prompt_tokens[rows]
    by_length = np.argsort(lengths, kind="stable")
    overtaken = []
    for index in long.tolist():
        later = slice(*np.searchsorted(sent, [sent[index] + _EDGE_NS, first[index]]))
        place = int(np.searchsorted(lengths, lengths[index], sorter=by_length)) - _NEAREST // 2
        alike = by_length[max(0, min(place, len(rows) - _NEAREST)) :][:_NEAREST]
        usual = _ROOM * quantile(waited[alike], 0.9)
        if np.count_nonzero(first[later] < first[index] - _TOGETHER_NS) >= _OVERTAKING and waited[index] > usual:
            overtaken.append(index)
    starts, ends = sent[overtaken], first[overtaken]
    together = (np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts) >= _TOGETHER_NS).sum(axis=1)
    long_enough = (together >= _WAITING) & (ends - starts >= _ALONE_NS)
    return [
        Gap(start_ns=int(starts[place]), end_ns=int(ends[place]), requests=rows[[overtaken[place]]])
        for place in np.flatnonzero(long_enough).tolist()
    ]
