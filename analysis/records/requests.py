"""The requests of a run with latencies as they are judged.

Times are integer nanoseconds since the epoch on a clock that is monotonic within a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints, by_trial, indices, parts, row_parts
from tailgate.analysis.records.request_columns import (
    ERROR,
    SCHEDULED,
    WRONG,
    RequestColumns,
    gap_counts,
    is_named,
    slim,
)
from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.wording import counted

METRICS = ("ttft", "e2e", "tpot", "max_itl")

# A request cancelled this close to the end of the trial was cut by it; earlier, the server or the client failed.
_CUT_SLACK_NS = 1_000_000_000
_STAMP_SLACK_MS = 5.0  # gaps are held in single precision


class Span(NamedTuple):
    """When the requests of a trial began and ended."""

    first_ns: int  # the first start
    last_ns: int  # the last start
    end_ns: int  # the last end, or start


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """An instant of each request in ns, -1 where unknown; indexed as an array of whole numbers would be."""

    start_ns: Ints
    after_ms: Floats  # after the start; NaN where unknown

    def __getitem__(self, rows: Any) -> Ints:
        after_ns = np.array(self.after_ms[rows], dtype=np.float64)
        unknown = np.isnan(after_ns)
        after_ns[unknown] = 0.0
        after_ns *= 1e6
        at_ns = np.rint(after_ns, out=after_ns).astype(np.int64)
        at_ns += self.start_ns[rows]
        at_ns[unknown] = -1
        return at_ns

    @property
    def known(self) -> Bools:
        """Which requests have one."""
        return ~np.isnan(self.after_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests(RequestColumns):
    """The requests of a run with latencies as they are judged. Arrays have one entry a request.

    An answer that is OK and empty, or that names an error, has failed. Latency counts from the scheduled time. A
    failed request counts with the deadline (or what it took, if longer) in each metric that it did not complete. A
    request cut off by the end of the trial counts with the time it had waited where that is longer than its arm's
    median, and is left out (NaN) where it is not.
    """

    scheduled: Bools  # whether start_ns is a scheduled time
    sent_ns: Moments
    first_ns: Moments  # -1 where no token came
    end_ns: Moments
    ok: Bools
    failed: Bools
    shed: Bools  # refused for lack of space or time: RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED
    refused: Bools  # failed because no graph fitted and the arm compiles none while serving: FAILED_PRECONDITION
    cut: Bools
    broken: Bools  # times that are missing or run backwards; in no metric
    deadline_ms: float | None  # after which a request fails; None where that is unknown
    measured: Bools  # not ramp-up
    ttft_ms: Floats
    e2e_ms: Floats
    max_itl_ms: Floats
    has_tokens: bool  # whether answers consist of tokens; else only their end is defined
    gap_offsets: Ints  # request i owns gaps_ms[gap_offsets[i]:gap_offsets[i + 1]]
    uncounted: Bools  # completed, and the number of its tokens is not recorded
    dropped: int  # rows whose request id was already there

    def of_arm(self, name: str) -> Bools:
        """Mask the requests that went to the arm, shape (requests,)."""
        return np.asarray(self.arm == self._code(name))

    def rows(self, mask: Bools, trial: int) -> Ints:
        """Return the trial's requests in `mask`, ascending."""
        return self._rows(trial, lambda part: mask[part])

    def sound(self, arm: str, trial: int) -> Ints:
        """Return the arm's requests in the trial whose times are known and in order, ascending."""
        code = self._code(arm)
        return self._rows(trial, lambda part: (self.arm[part] == code) & ~self.broken[part])

    def _rows(self, trial: int, chosen: Callable[[slice], Bools]) -> Ints:
        """Return the trial's requests that `chosen` masks in a part of all rows."""
        found = [np.zeros(0, dtype=np.int32)]
        for part in parts(len(self)):
            inside = self.trial[part] == trial
            if inside.any():
                found.append(indices(inside & chosen(part)) + np.int32(part.start))
        return np.concatenate(found)

    def _code(self, arm: str) -> int:
        return self.arms.index(arm) if arm in self.arms else -1  # none has code -1

    def spans(self) -> dict[int, Span]:
        """Return the span of each trial's requests with times in order."""
        return _spans(self.trial, ~self.broken, self.end_ns)

    def lag_ms(self, rows: Ints | Bools) -> Floats:
        """Return how much later than scheduled each of `rows` was sent, NaN if unknown."""
        return _where(self.scheduled[rows], self.sent_ms[rows])

    def metric_ms(self, name: str, rows: slice | Ints | Bools = slice(None)) -> Floats:
        """Return the latencies of `rows` called `name`, one of METRICS; NaN if undefined."""
        if name == "tpot":
            return self._tpot_ms(rows)
        latencies: Floats = getattr(self, f"{name}_ms")[rows]
        return latencies

    def _tpot_ms(self, rows: slice | Ints | Bools) -> Floats:
        # Not a column, since it follows from others and takes memory. A failed request has its deadline, as in E2E.
        found, begin = np.empty(self.ok[rows].size, dtype=np.float32), 0
        for part in row_parts(rows, len(self)):
            each_ms, tokens = self.end_ms[part] - self.first_ms[part], self.output_tokens[part]
            each_ms /= np.maximum(tokens - 1, 1)
            each_ms[~self.ok[part] | (tokens < 2) | (not self.has_tokens)] = math.nan
            if self.has_tokens and (failed := self.failed[part]).any():
                each_ms[failed] = self.e2e_ms[part][failed]
            found[begin : begin + len(each_ms)] = each_ms
            begin += len(each_ms)
        return found


def requests_of(
    columns: RequestColumns,
    *,
    deadline_ms: float | None = None,
    ends_ns: Mapping[int, int] | None = None,
    cut_short: Collection[int] = (),
    tokens: bool = True,
) -> Requests:
    """Derive latencies for the requests of `columns`.

    `ends_ns` is the planned end of each trial, `cut_short` the trials that did not reach it: connections that broke in
    their last second broke with the run, and their requests are cut off, not failed. Without `deadline_ms`, a failure
    counts as the longest time seen. Requests without an arm are left out if others have one. Without `tokens` requests
    have no TTFT, TPOT or gap, since they were due no tokens.
    """
    if len(columns) and not columns.arms:
        verb = "names" if len(columns) == 1 else "name"
        raise RecordError(f"{counted(len(columns), 'request')} {verb} no arm: fill the column arm")
    dropped = int(columns.repeated.sum())
    columns = columns.kept((columns.arm >= 0) & ~columns.repeated)  # of no arm: see `misplaced_requests`
    offsets = np.broadcast_to(0, len(columns) + 1)  # which takes no memory
    if len(columns.gaps_ms):
        offsets = np.append(0, np.cumsum(gap_counts(columns.token_times)))
    ends = _ends(columns, offsets, ends_ns or {}, cut_short)
    return Requests(
        **{
            **{field.name: getattr(columns, field.name) for field in fields(RequestColumns)},
            **{"end_ms": ends.end_ms, "output_tokens": slim(np.maximum(columns.output_tokens, 0))},
        },
        ok=slim(ends.ok),
        failed=slim(ends.failed),
        cut=slim(ends.cut),
        broken=slim(ends.broken),
        **_latencies(columns, ends, offsets, deadline_ms, tokens=tokens),
        scheduled=slim((columns.flags & SCHEDULED) > 0),
        sent_ns=Moments(columns.start_ns, columns.sent_ms),
        first_ns=Moments(columns.start_ns, columns.first_ms),
        end_ns=Moments(columns.start_ns, ends.end_ms),
        shed=slim(ends.failed & (columns.has_status("RESOURCE_EXHAUSTED") | columns.has_status("DEADLINE_EXCEEDED"))),
        refused=slim(ends.failed & columns.has_status("FAILED_PRECONDITION")),
        measured=slim(~is_named(columns.phase, columns.phases, "rampup")),
        uncounted=slim(columns.has_status("OK") & (columns.output_tokens < 0)),
        gap_offsets=offsets,
        has_tokens=tokens,
        deadline_ms=deadline_ms,
        dropped=dropped,
    )


class _Ends(NamedTuple):
    """How each request ended, and whether it has a first token (`seen`)."""

    end_ms: Floats  # that of its trial where none is recorded
    ok: Bools
    failed: Bools
    cut: Bools
    broken: Bools
    seen: Bools


def _ends(columns: RequestColumns, offsets: Ints, planned_ns: Mapping[int, int], cut_short: Collection[int]) -> _Ends:
    completed, unended, seen = columns.has_status("OK"), np.isnan(columns.end_ms), ~np.isnan(columns.first_ms)
    broken = ((columns.flags & WRONG) > 0) | (unended & completed)
    cut, end_ms = np.zeros(len(columns), dtype=np.bool_), columns.end_ms
    # Most requests completed: what concerns the others is counted of them alone.
    rows = np.flatnonzero(~completed | unended)
    if rows.size:
        spans = _spans(columns.trial, (columns.flags & WRONG) == 0, Moments(columns.start_ns, columns.end_ms))
        ended = {trial: min(span.end_ns, planned_ns.get(trial, span.end_ns)) for trial, span in spans.items()}
        last = np.array([ended.get(trial, 0) for trial in columns.trial[rows].tolist()], dtype=np.int64)
        end_ms = end_ms.copy()
        own = rows[unended[rows]]
        end_ms[own] = np.maximum(last[unended[rows]] - columns.start_ns[own], 0) / 1e6
        at_the_end = Moments(columns.start_ns, end_ms)[rows] >= last - _CUT_SLACK_NS
        lost = columns.has_status("CANCELLED")[rows]
        lost |= np.isin(columns.trial[rows], list(cut_short)) & columns.has_status("UNAVAILABLE")[rows]
        cut[rows] = (lost & at_the_end) | (unended & ~completed)[rows]
    broken |= seen & (columns.first_ms > end_ms)
    # An answer that is OK holds a token, by a count that is there, and names no error.
    hollow = columns.output_tokens == 0
    hollow |= (columns.flags & ERROR) > 0
    hollow &= completed
    completed &= ~hollow
    hollow &= columns.output_tokens <= 0
    seen &= ~hollow
    del hollow, unended  # masks of all requests take memory
    if len(columns.gaps_ms):
        # No answer ends before its last token.
        streamed_ms = _over_gaps(np.add, columns.gaps_ms, offsets, 0.0)
        broken |= completed & seen & (streamed_ms > end_ms - columns.first_ms + _STAMP_SLACK_MS)
    cut &= ~broken
    ok = completed & ~cut & ~broken
    return _Ends(end_ms=end_ms, ok=ok, failed=~(ok | cut | broken), cut=cut, broken=broken, seen=seen)


def _spans(trial: Ints, usable: Bools, end_ns: Moments) -> dict[int, Span]:
    spans: dict[int, Span] = {}
    for part, number, own in by_trial(trial):
        if (own := own & usable[part]).any():
            start, end = end_ns.start_ns[part][own], end_ns[part][own]
            first, last = int(start.min()), int(start.max())
            span = Span(first, last, max(last, int(end.max())))
            seen = spans.get(number, span)
            spans[number] = Span(min(seen.first_ns, first), max(seen.last_ns, last), max(seen.end_ns, span.end_ns))
    return spans


def _latencies(
    columns: RequestColumns, ends: _Ends, offsets: Ints, deadline_ms: float | None, *, tokens: bool
) -> dict[str, Any]:
    """Return the latencies in ms, NaN where undefined."""
    ok, cut, failed, seen, age = ends.ok, ends.cut, ends.failed, ends.seen, ends.end_ms
    e2e = _where(~ends.broken, age)
    ttft = _where(seen & ~ends.broken, columns.first_ms)
    if (unseen := ok & ~seen).any():
        # No first token was seen of these, while the arm's others have one: it came with the last at the latest. In
        # records of other tools no answer of an arm may have one, which is no evidence.
        known = np.bincount(columns.arm[ok & seen], minlength=len(columns.arms)) > 0
        late = np.flatnonzero(unseen)
        late = late[known[columns.arm[late]]]
        ttft = _set(ttft, late, age[late])
    max_itl = np.broadcast_to(np.float32(math.nan), len(columns))
    if len(columns.gaps_ms):
        max_itl = _where(ok | cut, _over_gaps(np.maximum, columns.gaps_ms, offsets, math.nan).astype(np.float32))
    longest = float(np.fmax.reduce(e2e, initial=math.nan))
    for number in np.unique(columns.arm[cut]).tolist():
        own = columns.arm == number
        rows, answered = np.flatnonzero(own & cut), own & ok
        waiting = rows[~seen[rows]]
        ttft = _set(ttft, waiting, _when_long(age[waiting], ttft[answered]))
        e2e = _set(e2e, rows, _when_long(age[rows], e2e[answered]))
    rows = np.flatnonzero(failed)
    if rows.size:
        penalty = np.fmax(age[rows], np.float32(longest if deadline_ms is None else deadline_ms))
        e2e, max_itl = (_set(metric, rows, penalty) for metric in (e2e, max_itl))
        ttft = _set(ttft, rows[~seen[rows]], penalty[~seen[rows]])
    if not tokens:
        ttft = max_itl = np.broadcast_to(np.float32(math.nan), len(columns))
    return {"ttft_ms": ttft, "e2e_ms": e2e, "max_itl_ms": max_itl}


def _where(kept: Bools, values: Floats) -> Floats:
    """Return the values that are kept, else NaN; the same array where all are."""
    return values if kept.all() else np.where(kept, values, np.float32(math.nan))


def _set(values: Floats, rows: Ints, by: Floats) -> Floats:
    """Return the values with others in some rows; the same array where there are none."""
    if not rows.size:
        return values
    changed = values.copy()
    changed[rows] = by
    return changed


def _over_gaps(reduce: np.ufunc, gaps_ms: Floats, offsets: Ints, of_none: float) -> Floats:
    """Return the sum, or the maximum, of each request's gaps."""
    found = np.full(len(offsets) - 1, of_none)
    has_gaps = np.diff(offsets) > 0
    found[has_gaps] = reduce.reduceat(gaps_ms, offsets[:-1][has_gaps], dtype=np.float64)
    return found


def _when_long(age: Floats, completed: Floats) -> Floats:
    """Return the ages above the median of `completed`, else NaN: a short wait cut off is no evidence of the tail."""
    known = completed[np.isfinite(completed)]
    median = float(np.median(known)) if known.size else 0.0
    return np.where(age > median, age, np.float32(math.nan))
