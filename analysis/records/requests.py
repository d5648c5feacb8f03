"""The requests of a run as columns of NumPy, with latencies as they are judged.

Times are integer nanoseconds since the epoch on a clock that is monotonic within a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Codes, Floats, Ints
from analysis.records.tables import RecordError
from analysis.wording import counted

# What counts as one request's latency. Each array has one entry a request.


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a run as columns, with latencies as they are judged.

    An answer that is OK and empty, or that names an error, has failed. Latency counts from the scheduled time. A
    failed request counts with the deadline (or what it took, if longer) in each metric that it did not complete. A
    request cut off by the end of the trial counts with the time it had waited where that is longer than its arm's
    median, and is left out (NaN) where it is not.
    """

    arms: tuple[str, ...]
    arm: Codes  # index into arms
    replicas: tuple[str, ...]
    replica: Codes  # index into replicas, -1 where unknown
    trial: Codes
    pair: Codes  # equal for the copies of one request, -1 where there is none; below the rows that were read
    start_ns: Ints  # scheduled, or sent where no schedule is known
    scheduled: Bools  # whether start_ns is a scheduled time
    sent_ns: Ints  # -1 where unknown
    first_ns: Ints  # -1 where no token came
    end_ns: Ints
    ok: Bools
    failed: Bools
    shed: Bools  # failed for want of room or time: RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED
    refused: Bools  # failed because no graph fitted and the arm compiles none while serving: FAILED_PRECONDITION
    cut: Bools
    broken: Bools  # times that are missing or run backwards; in no metric
    deadline_ms: float | None  # after which a request fails; None where that is unknown
    measured: Bools  # not ramp-up
    ttft_ms: Floats
    e2e_ms: Floats
    tpot_ms: Floats
    max_itl_ms: Floats
    prompt_tokens: Codes  # -1 where unknown
    max_tokens: Codes  # -1 where unknown
    output_tokens: Codes
    stall_ns: Codes  # what the server reported, negative where it did not
    gaps_ms: npt.NDArray[np.float32]  # every token gap, request after request
    gap_offsets: Ints  # request i owns gaps_ms[gap_offsets[i]:gap_offsets[i + 1]]
    token_times: Codes  # how many times of tokens are recorded
    uncounted: Bools  # completed, and the number of its tokens is not recorded
    request_ids: pa.ChunkedArray
    session: Codes  # equal for requests of one session, -1 where there is none; below the rows that were read
    repeated: int  # rows dropped because their request id was already there

    def __len__(self) -> int:
        return len(self.arm)

    def of_arm(self, name: str) -> Bools:
        """Which requests went to the arm: a mask, shape (requests,)."""
        return np.asarray(self.arm == (self.arms.index(name) if name in self.arms else -1))  # none has code -1

    def spans(self) -> dict[int, tuple[int, int]]:
        """The first start and the last end in each trial, of requests with times in order."""
        known = ~self.broken
        spans = {}
        for number in np.unique(self.trial[known]).tolist():
            own = known & (self.trial == number)
            spans[number] = (int(self.start_ns[own].min()), int(self.end_ns[own].max()))
        return spans

    def lag_ms(self, rows: Ints | Bools) -> Floats:
        """How much later than scheduled each of `rows` was sent, NaN where unknown."""
        start, sent = self.start_ns[rows], self.sent_ns[rows]
        return np.where(self.scheduled[rows] & (sent > 0), (sent - start) / 1e6, math.nan)

    def metric_ms(self, name: str) -> Floats:
        """The latencies called `name`, one of METRICS. NaN where undefined."""
        latencies: Floats = getattr(self, f"{name}_ms")
        return latencies


METRICS = ("ttft", "e2e", "tpot", "max_itl")


# A request cancelled this close to the end of the trial was cut by it; earlier, the server or the client failed.
_CUT_SLACK_NS = 1_000_000_000
_STALL_SLACK_NS = 1_000_000_000
_LAST_NS = 9_200_000_000_000_000_000  # beyond any clock
_STAMP_SLACK_MS = 5.0  # gaps are held in single precision


def requests_of(
    table: pa.Table,
    *,
    deadline_ms: float | None = None,
    ends_ns: Mapping[int, int] | None = None,
    cut_short: Collection[int] = (),
    tokens: bool = True,
) -> Requests:
    """The columns of `table` (schema REQUESTS) with derived latencies.

    `ends_ns` is the planned end of each trial, `cut_short` the trials that did not reach it: connections that broke in
    their last second broke with the run, and their requests are cut off, not failed. Without `deadline_ms`, a failure
    counts as the longest time seen. Where some requests name no arm they are left out. Without
    `tokens` nothing but an end was to come, so that no request, failed or not, has a TTFT, a TPOT or a gap.
    """
    if nameless := table.column("arm").null_count:
        if nameless == table.num_rows:
            raise RecordError(
                f"{counted(nameless, 'request')} {'names' if nameless == 1 else 'name'} no arm: fill the column arm"
            )
        table = table.filter(table.column("arm").is_valid())  # see `misplaced_requests`
    rows = table.num_rows
    unique = _first_of_each(table)
    table = table if unique is None else table.filter(pa.array(unique))
    repeated = rows - table.num_rows
    # Each column is let go of when it was cut, so that memory holds it once.
    recorded = dict(zip(table.column_names, table.columns, strict=True))
    del table
    columns = _columns(recorded)
    columns |= _states(recorded, columns, ends_ns or {}, cut_short)
    columns |= _latencies(columns, columns.pop("seen"), deadline_ms, tokens=tokens)
    return Requests(**columns, deadline_ms=deadline_ms, repeated=repeated)


def _columns(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Requests` that are recorded as they are, and take their columns from `recorded`."""
    gaps, offsets, times, backwards = _token_gaps(recorded.pop("token_ns"))  # first, as it is the longest
    arm, arms = codes(recorded.pop("arm"))
    replica, replicas = codes(recorded.pop("replica"))
    phase, phases = codes(recorded.pop("phase"))
    scheduled, sent = moments(recorded.pop("scheduled_ns")), moments(recorded.pop("sent_ns"))
    has_schedule = scheduled > 0
    counts = recorded.pop("output_tokens")
    return {
        "arms": arms,
        "arm": arm,
        "replicas": replicas,
        "replica": replica,
        "trial": integers(recorded.pop("trial"), 1),
        "pair": groups(recorded.pop("pair_id")),
        "session": groups(recorded.pop("session_id")),
        "request_ids": recorded.pop("request_id"),
        "measured": ~is_named(phase, phases, "rampup"),
        "start_ns": scheduled if has_schedule.all() else np.where(has_schedule, scheduled, sent),
        "scheduled": has_schedule,
        "sent_ns": sent,
        "first_ns": moments(recorded.pop("first_token_ns")),
        "end_ns": moments(recorded.pop("end_ns")),
        "prompt_tokens": integers(recorded.pop("prompt_tokens"), -1),
        "max_tokens": integers(recorded.pop("max_tokens"), -1),
        "output_tokens": np.maximum(integers(counts, 0), 0),
        "uncounted": counts.is_null().to_numpy(),
        "stall_ns": integers(recorded.pop("compile_stall_ns"), -1),
        "gaps_ms": gaps,
        "gap_offsets": offsets,
        "token_times": times,
        "broken": backwards,
    }


def _states(
    recorded: dict[str, Any], columns: Mapping[str, Any], planned_ns: Mapping[int, int], cut_short: Collection[int]
) -> dict[str, Any]:
    """Return how each request ended, and whether it has a first token (`seen`).

    `end_ns` is the end of its trial where none is recorded.
    """
    status, statuses = codes(recorded.pop("status"))
    error, errors = codes(recorded.pop("error"))
    trial, start, first, end = (columns[name] for name in ("trial", "start_ns", "first_ns", "end_ns"))
    completed, unended, seen = is_named(status, statuses, "OK"), end <= 0, first > 0
    at_the_end = np.zeros(len(trial), dtype=np.bool_)
    if not completed.all() or unended.any():
        last = _last_ends(trial, start, end, planned_ns)
        end = np.where(unended, np.maximum(last, start), end)
        at_the_end = end >= last - _CUT_SLACK_NS
    broken = columns["broken"] | (unended & completed) | (start <= 0) | (end < start) | (end > _LAST_NS)
    broken |= seen & ((first < start) | (first > end))
    broken |= columns["stall_ns"] > end - start + _STALL_SLACK_NS  # no stall is longer than its request
    cut = (is_named(status, statuses, "CANCELLED") & at_the_end) | (unended & ~completed)
    if cut_short:
        cut |= np.isin(trial, list(cut_short)) & at_the_end & is_named(status, statuses, "UNAVAILABLE")
    uncounted = completed & columns["uncounted"]
    # An answer that is OK holds a token, by a count that is there, and names no error.
    empty = columns["output_tokens"] == 0
    hollow = (empty & ~columns["uncounted"]) | ((error >= 0) & ~is_named(error, errors, ""))
    seen &= ~(completed & hollow & empty)
    completed &= ~hollow
    if len(columns["gaps_ms"]):
        # No answer ends before its last token.
        streamed_ms = _sums(columns["gaps_ms"], columns["gap_offsets"])
        broken |= completed & seen & (streamed_ms > (end - first) / 1e6 + _STAMP_SLACK_MS)
    cut &= ~broken
    ok = completed & ~cut & ~broken
    failed = ~(ok | cut | broken)
    shed = is_named(status, statuses, "RESOURCE_EXHAUSTED") | is_named(status, statuses, "DEADLINE_EXCEEDED")
    return {
        "end_ns": end,
        "ok": ok,
        "failed": failed,
        "shed": failed & shed,
        "refused": failed & is_named(status, statuses, "FAILED_PRECONDITION"),
        "cut": cut,
        "broken": broken,
        "uncounted": uncounted,
        "seen": seen,
    }


def _latencies(
    columns: Mapping[str, Any], seen: Bools, deadline_ms: float | None, *, tokens: bool
) -> dict[str, Floats]:
    """Return the latencies in ms, NaN where undefined."""
    arm, ok, cut, failed, broken = (columns[name] for name in ("arm", "ok", "cut", "failed", "broken"))
    start, first, end, output = (columns[name] for name in ("start_ns", "first_ns", "end_ns", "output_tokens"))
    gaps, offsets = columns["gaps_ms"], columns["gap_offsets"]
    age, ttft = (end - start) / 1e6, (first - start) / 1e6
    tpot = (end - first) / 1e6 / np.maximum(output - 1, 1)
    age[broken] = math.nan
    ttft[~seen | broken] = math.nan
    if (unseen := ok & ~seen).any():
        # No first token was seen of these, while the arm's others have one: it came with the last at the latest. In
        # records of other tools no answer of an arm may have one, which is no evidence.
        known = np.bincount(arm[ok & seen], minlength=len(columns["arms"])) > 0
        late = unseen & known[arm]
        ttft[late] = age[late]
    tpot[~(ok & seen & (output > 1))] = math.nan
    max_itl = np.full(len(arm), math.nan)
    if len(gaps):
        has_gaps = np.diff(offsets) > 0
        max_itl[has_gaps] = np.maximum.reduceat(gaps, offsets[:-1][has_gaps])
        max_itl[~(ok | cut)] = math.nan
    longest = np.fmax.reduce(age, initial=math.nan)
    penalty = np.fmax(age[failed], longest if deadline_ms is None else deadline_ms)
    e2e = age  # of those that completed it is their age
    for number in np.unique(arm[cut]).tolist():
        own = arm == number
        waiting = own & cut & ~seen
        ttft[waiting] = _when_long(age[waiting], ttft[own & ok])
        e2e[own & cut] = _when_long(age[own & cut], age[own & ok])
    if failed.any():
        for metric in (e2e, tpot, max_itl):
            metric[failed] = penalty
        ttft[failed & ~seen] = penalty[~seen[failed]]
    if not tokens:
        ttft = tpot = max_itl = np.full(len(arm), math.nan)
    return {"ttft_ms": ttft, "e2e_ms": e2e, "tpot_ms": tpot, "max_itl_ms": max_itl}


def _sums(gaps: npt.NDArray[np.float32], offsets: Ints) -> Floats:
    """The sum of each request's gaps, 0 where it has none."""
    sums = np.zeros(len(offsets) - 1)
    has_gaps = np.diff(offsets) > 0
    sums[has_gaps] = np.add.reduceat(gaps, offsets[:-1][has_gaps], dtype=np.float64)
    return sums


def _when_long(age: Floats, completed: Floats) -> Floats:
    """The ages that exceed the median of `completed`, else NaN: a short wait cut off is no evidence of the tail."""
    known = completed[np.isfinite(completed)]
    median = float(np.median(known)) if known.size else 0.0
    return np.where(age > median, age, math.nan)


def _first_of_each(table: pa.Table) -> Bools | None:
    """Which rows are the first of their trial, arm and request id, or have no id; None when all are."""
    names = table.column("request_id")
    ordered = names.take(pc.sort_indices(names))
    if not pc.any(pc.equal(ordered[1:], ordered[:-1])).as_py():
        return None
    known = names.is_valid().to_numpy()
    arm, _ = codes(table.column("arm"))
    identity = pa.table({"trial": table.column("trial"), "arm": arm, "id": names, "row": np.arange(len(names))})
    first = identity.filter(pa.array(known)).group_by(["trial", "arm", "id"]).aggregate([("row", "min")])
    keep = ~known
    keep[first.column("row_min").to_numpy()] = True
    return None if keep.all() else keep


def _last_ends(trial: Codes, start: Ints, end: Ints, planned: Mapping[int, int]) -> Ints:
    """The last end in each request's trial, at most the planned one."""
    until = np.maximum(end, start)
    last = np.zeros(len(trial), dtype=np.int64)
    for number in np.unique(trial).tolist():
        own = trial == number
        latest = int(until[own].max(initial=0))
        last[own] = min(latest, planned.get(number, latest))
    return last


def _token_gaps(column: Any) -> tuple[npt.NDArray[np.float32], Ints, Codes, Bools]:
    """Gaps between tokens in ms, their offsets, how many times each request has, and which of them run backwards."""
    rows = len(column)
    lengths: Codes = integers(pc.list_value_length(column), 0)
    counts = np.maximum(lengths - 1, 0)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    backwards = np.zeros(rows, dtype=np.bool_)
    if not counts.any():
        return np.zeros(0, dtype=np.float32), offsets, lengths, backwards
    np.cumsum(counts, out=offsets[1:])
    gaps = np.empty(int(offsets[-1]), dtype=np.float32)
    done = 0
    for chunk in column.chunks:  # as it was read, since all times at once take twice the memory of the gaps
        part = slice(done, done + len(chunk))
        done += len(chunk)
        own = gaps[offsets[part.start] : offsets[part.stop]]
        if not own.size:
            continue
        times = integers(pc.list_flatten(chunk), 0)
        within = np.ones(len(times) - 1, dtype=np.bool_)
        ends = np.cumsum(lengths[part])
        within[ends[(ends > 0) & (ends < len(times))] - 1] = False
        own[:] = np.diff(times)[within] / 1e6
        if own.min() < 0:
            owner = np.repeat(np.arange(part.start, part.stop), counts[part])
            backwards[owner[own < 0]] = True
    return gaps, offsets, lengths, backwards


# --- Arrow columns as arrays ------------------------------------------------------------------------------------------

_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def integers(column: Any, missing: int) -> Any:
    """Return whole numbers as wide as the column's, with `missing` for null. May be read-only."""
    return pc.fill_null(column, missing).to_numpy() if column.null_count else column.to_numpy()


def moments(column: Any) -> Ints:
    """Return times in ns of 64 bits, -1 for null. May be read-only."""
    return np.asarray(integers(column, -1), dtype=np.int64)


def codes(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """Return the place of each text among the distinct texts in alphabetical order, -1 for null; and these texts."""
    encoded = _whole(column)
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int16 if len(names) < _FEW_NAMES else np.int32)
    rank[order] = np.arange(len(names))
    return rank[integers(encoded.indices, -1)], tuple(names[index] for index in order)


def groups(column: Any) -> Codes:
    """Return one number below the length for each distinct text, -1 for null."""
    numbers: Codes = integers(_whole(column).dictionary_encode().indices, -1)
    return numbers


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    """Return which codes stand for `name`."""
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
