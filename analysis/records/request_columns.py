"""The requests of a run as slim columns of NumPy, filled table by table while files are read.

A request takes about 28 bytes, 16 more until the ids of its trial are compared, and a gap between tokens 4. Names are
codes, ids are hashes of 64 bits, and times are one start in ns with single-precision distances from it, which are off
by 6e-8 of their length at most. Columns are read-only: one that holds a single value takes no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailgate.analysis.arrays import Bools, Floats, Ints, indices, parts
from tailgate.analysis.records.schemas import JUDGED_REQUESTS

Hashes = npt.NDArray[np.uint64]

SCHEDULED, ERROR, WRONG = 1, 2, 4  # flags: the start is a scheduled time; an error is named; times run backwards

_NAMES = ("arm", "replica", "status", "phase")
_IDS = {"request_id": "id", "pair_id": "pair", "session_id": "session"}
_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
_LAST_NS = 9_200_000_000_000_000_000  # beyond any clock
_STALL_SLACK_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """Requests as they were recorded; arrays have one entry a request, except for gaps."""

    arms: tuple[str, ...]  # in alphabetical order, as the next three
    replicas: tuple[str, ...]
    statuses: tuple[str, ...]
    phases: tuple[str, ...]
    arm: Ints  # index into arms, -1 for null; so are the next three
    replica: Ints
    status: Ints
    phase: Ints
    trial: Ints
    flags: npt.NDArray[np.uint8]
    start_ns: Ints  # scheduled, or sent where no schedule is known; 0 or less where neither is
    sent_ms: Floats  # after the start; NaN where unknown, as the next two
    first_ms: Floats
    end_ms: Floats
    prompt_tokens: Ints  # -1 where unknown, as the next four
    max_tokens: Ints
    output_tokens: Ints
    stall_ns: Ints
    token_times: Ints  # how many are recorded
    named: Bools  # whether it has an id
    repeated: Bools  # whether an earlier row of its trial and arm has its id
    id: Hashes  # of those that compile events name, else 0
    pair: Ints  # equal for the copies of one request, -1 where there is none
    session: Hashes  # 0 where there is none
    gaps_ms: Floats  # between tokens, request after request: one less than it has token times

    def __len__(self) -> int:
        return len(self.arm)

    def has_status(self, name: str) -> Bools:
        """Return which requests have the status: a mask, shape (requests,)."""
        return is_named(self.status, self.statuses, name)

    def kept(self, rows: Bools) -> RequestColumns:
        """Return the columns of some requests: a mask, shape (requests,)."""
        if rows.all():
            return self
        size = int(np.count_nonzero(rows))
        columns: dict[str, Any] = {
            field.name: column[:size] if is_constant(column) else column[rows]
            for field in fields(self)
            if isinstance(column := getattr(self, field.name), np.ndarray) and field.name != "gaps_ms"
        }
        return replace(self, **columns, gaps_ms=self.gaps_ms[np.repeat(rows, gap_counts(self.token_times))])

    @classmethod
    def of(cls, table: pa.Table) -> RequestColumns:
        """Return the columns of a table with the schema REQUESTS."""
        builder = ColumnBuilder()
        builder.add(table)
        return builder.columns()


def gap_counts(token_times: Ints) -> Ints:
    """Return how many gaps lie between so many times of tokens."""
    return np.maximum(token_times - 1, 0)


def is_named(codes: Ints, names: tuple[str, ...], name: str) -> Bools:
    """Return which codes stand for `name`."""
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)


class ColumnBuilder:
    """Columns to which tables with the schema `schema` are appended. Without `sessions` no request has one."""

    def __init__(self, *, sessions: bool = True) -> None:
        self.rows = 0
        self.schema = pa.schema(field for field in JUDGED_REQUESTS if sessions or field.name != "session_id")
        self._ids = {column: own for column, own in _IDS.items() if sessions or own != "session"}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._read: dict[str, list[npt.NDArray[Any]]] = {}  # of the trial that is read, table by table
        self._before = 0  # the rows of the trials before it
        self._processor = ThreadPoolExecutor(1)
        self._comparing: Future[dict[str, npt.NDArray[Any]]] | None = None

    def add(self, table: pa.Table) -> None:
        """Append the rows of a table."""
        for batch in table.combine_chunks().to_batches():
            self._append({name: batch.column(name) for name in batch.schema.names})

    def _append(self, columns: Mapping[str, pa.Array]) -> None:
        rows = len(columns["arm"])
        found = _numbers(columns) | {name: self._coded(name, columns[name]) for name in _NAMES}
        found |= {"session": np.zeros(rows, dtype=np.uint64)}
        found |= {own: hashes(columns[name]) for name, own in self._ids.items()}
        for name, values in found.items():
            # Times stay whole, since sums of them must not wrap.
            own = values if name in ("start_ns", "id", "pair") else slim(values)
            self._read.setdefault(name, []).append(own)
        self.rows += rows

    def _coded(self, name: str, column: pa.Array) -> Ints:
        encoded = column.dictionary_encode()
        known = self._codes[name]
        places = [known.setdefault(str(text), len(known)) for text in encoded.dictionary.to_pylist()]
        coded: Ints = np.array([*places, -1])[integers(encoded.indices, -1)]
        return coded

    def end_trial(self, named: Collection[str] | None = None) -> None:
        """Compare the ids and the pairs of the rows since the last call, which are those of one trial.

        Of the ids only those in `named` stay; without it all do.
        """
        self._append({field.name: pa.nulls(0, field.type) for field in JUDGED_REQUESTS})
        ids, pairs = self._read.pop("id"), self._read.pop("pair")
        self._join()
        arm, trial = (self._columns[name][self._before :].copy() for name in ("arm", "trial"))
        self._comparing = self._processor.submit(_compare, ids, pairs, arm, trial, self._before, named)
        self._before = self.rows

    def _join(self) -> None:
        """Append what was read to the columns, and what follows from the last trial's ids, compared meanwhile."""
        if self._comparing is not None:
            self._read |= {name: [column] for name, column in self._comparing.result().items()}
            self._comparing = None
        while self._read:
            name, tables = self._read.popitem()
            if name in self._columns:
                tables.insert(0, self._columns.pop(name))
            self._columns[name] = _joined(tables)
        pa.default_memory_pool().release_unused()  # also frees NumPy's memory

    def columns(self) -> RequestColumns:
        """Return what was appended, and let go of it."""
        self.end_trial()
        self._join()
        self._processor.shutdown()
        arrays, self._columns = self._columns, {}
        names = {name: tuple(sorted(known)) for name, known in self._codes.items()}
        for name, known in self._codes.items():
            if names[name] != tuple(known):
                rank = np.array([*map(names[name].index, known), -1], dtype=arrays[name].dtype)
                arrays[name] = slim(rank[arrays[name]])
        return RequestColumns(
            **arrays, arms=names["arm"], replicas=names["replica"], statuses=names["status"], phases=names["phase"]
        )


def _compare(
    of_ids: list[Hashes], of_pairs: list[Hashes], arm: Ints, trial: Ints, before: int, named: Collection[str] | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns that follow from the ids of a trial, with `before` rows of other trials before it."""
    pair, ids = first_rows(_joined(of_pairs)), _joined(of_ids)
    found: dict[str, npt.NDArray[Any]] = {
        "pair": slim(np.where(pair >= 0, pair + np.int32(before), np.int32(-1))),
        "named": slim(ids > 0),
        "repeated": slim(_repeated(ids, arm, trial)),
    }
    if named is not None:
        known = np.unique(hashes(pa.array(sorted(named), pa.string())))
        ids = np.where(np.isin(ids, known), ids, np.uint64(0)) if known.size else np.zeros_like(ids)
    return found | {"id": slim(ids)}


def slim(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values in as little memory as holds them, by themselves. Not to be written to."""
    if values.dtype.kind == "i":
        low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
        width = next(kind for kind in _WIDTHS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        values = values.astype(width, copy=values.base is not None)  # a view would keep its whole batch
    bits = values.view(f"i{values.itemsize}")  # in which not-a-number equals itself
    if values.size and bits[0] == bits[-1] and (bits == bits[0]).all():
        return np.broadcast_to(values[0], values.shape)
    return values if values.base is None else values.copy()


def is_constant(column: npt.NDArray[Any]) -> bool:
    """Return whether the column holds one value, once in memory."""
    return column.strides == (0,)


def _joined(tables: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join slim columns. It empties the list and reuses the memory of the first, since a copy takes as much again."""
    rows = sum(map(len, tables))
    tables[:] = [table for table in tables if len(table)][::-1] or tables[:1]
    column = tables.pop()
    if rows and all(is_constant(one) and one[:1].tobytes() == column[:1].tobytes() for one in (column, *tables)):
        return np.broadcast_to(column[0], rows)
    size, wide = len(column), np.result_type(column, *{more.dtype for more in tables})
    if is_constant(column) or column.dtype != wide or not column.flags.owndata:
        column = np.array(column, dtype=wide)
    column.resize(rows, refcheck=False)
    while tables:
        more = tables.pop()
        column[size : size + len(more)] = more
        size += len(more)
    return column


def _numbers(columns: Mapping[str, pa.Array]) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of `RequestColumns` that are numbers."""
    scheduled, sent, first, end = (
        integers(columns[name], -1) for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")
    )
    stall = integers(columns["compile_stall_ns"], -1)
    start = np.where(scheduled > 0, scheduled, sent)
    ended, seen = end > 0, first > 0
    gaps, times, wrong = _token_gaps(columns["token_ns"])
    wrong |= (start <= 0) | (ended & ((end < start) | (end > _LAST_NS)))
    wrong |= seen & ((first < start) | (ended & (first > end)))
    wrong |= ended & (stall > end - start + _STALL_SLACK_NS)  # no stall is longer than its request
    output = columns["output_tokens"]
    has_error = integers(pc.binary_length(columns["error"]), 0) > 0
    flags = SCHEDULED * (scheduled > 0) + ERROR * has_error + WRONG * wrong
    return {
        "trial": integers(columns["trial"], 1),
        "flags": flags.astype(np.uint8),
        "start_ns": start,
        "sent_ms": _after_ms(sent, start, sent > 0),
        "first_ms": _after_ms(first, start, seen),
        "end_ms": _after_ms(end, start, ended),
        "prompt_tokens": integers(columns["prompt_tokens"], -1),
        "max_tokens": integers(columns["max_tokens"], -1),
        "output_tokens": np.where(output.is_valid().to_numpy(False), np.maximum(integers(output, 0), 0), -1),
        "stall_ns": np.maximum(stall, -1),
        "token_times": times,
        "gaps_ms": gaps,
    }


def _after_ms(time_ns: Ints, since_ns: Ints, known: Bools) -> Floats:
    return np.where(known, (time_ns - since_ns) / 1e6, np.nan).astype(np.float32)


def _token_gaps(column: pa.Array) -> tuple[Floats, Ints, Bools]:
    """Return gaps between tokens in ms, how many times each request has, and which times run backwards."""
    times = integers(pc.list_value_length(column), 0)
    backwards = np.zeros(len(column), dtype=np.bool_)
    stamps = integers(pc.list_flatten(column), 0)
    if len(stamps) < 2:
        return np.zeros(0, dtype=np.float32), times, backwards
    within = np.ones(len(stamps) - 1, dtype=np.bool_)
    ends = np.cumsum(times)
    within[ends[(ends > 0) & (ends < len(stamps))] - 1] = False
    gaps = (np.diff(stamps)[within] / 1e6).astype(np.float32)
    if (gaps < 0).any():
        backwards[np.repeat(np.arange(len(column)), gap_counts(times))[gaps < 0]] = True
    return gaps, times, backwards


def integers(column: Any, missing: int) -> Any:
    """Return whole numbers as wide as the column's, with `missing` for null. May be read-only."""
    return (pc.fill_null(column, missing) if column.null_count else column).to_numpy()


_ODD = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64, which spreads what differs in a few bits
_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


def hashes(column: pa.Array) -> Hashes:
    """Return a hash of each text, 0 for null. Two of 1e8 ids are taken for one with a chance of 3e-4."""
    size = len(column)
    if column.null_count == size:
        return np.zeros(size, dtype=np.uint64)
    _, place, text = column.buffers()
    offsets = np.frombuffer(place, dtype=np.int32)[column.offset : column.offset + size + 1].astype(np.int64)
    padded = np.zeros(int(offsets[-1]) + 8, dtype=np.uint8)
    if text is not None:
        padded[: offsets[-1]] = np.frombuffer(text, dtype=np.uint8, count=int(offsets[-1]))
    words = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))  # the eight bytes from each byte on
    left, begin = np.diff(offsets), offsets[:-1]
    found = left.astype(np.uint64) + _ODD
    rows: slice | Ints = slice(None)
    while (left > 0).any():
        if not (left > 0).all():
            longer = np.flatnonzero(left > 0)
            rows = longer if isinstance(rows, slice) else rows[longer]
            left, begin = left[longer], begin[longer]
        word = words[begin]
        if (left < 8).any():
            word &= _BITS >> (8 * np.maximum(8 - left, 0)).astype(np.uint64)
        found[rows] = _mixed(found[rows] ^ word)
        begin, left = begin + 8, left - 8
    found = _mixed(found)
    if column.null_count:
        found[column.is_null().to_numpy(False)] = 0
    return found


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _ODD
    return values ^ (values >> np.uint64(27))


def first_rows(ids: Hashes) -> Ints:
    """Return the first row that has the id of each row, -1 where it is 0."""
    if not ids.any():
        return np.broadcast_to(np.int32(-1), len(ids))
    # A table by the highest bits holds the first row of each entry; rows with another id than it has are left to a
    # table by other bits. Sorting takes four times as long.
    bits = len(ids).bit_length()
    shift, table = np.uint64(64 - bits), np.empty(1 << bits, dtype=np.int32)
    first, others = np.empty(len(ids), dtype=np.int32), [np.zeros(0, dtype=np.int32)]
    for part in reversed([*parts(len(ids))]):
        rows = np.arange(part.start, part.stop, dtype=np.int32)
        table[(ids[part] >> shift)[::-1]] = rows[::-1]
    for part in parts(len(ids)):
        first[part] = found = table[ids[part] >> shift]
        others.append(indices(ids[found] != ids[part]) + np.int32(part.start))
    del table
    if (rest := np.concatenate(others)).size:
        first[rest] = rest[first_rows(_mixed(ids[rest]))]
    first[ids == 0] = -1
    return first


def _repeated(ids: Hashes, arm: Ints, trial: Ints) -> Bools:
    """Return whether an earlier row of the same arm and trial has the id of each row."""
    own = ((trial.astype(np.int64) << 32) + arm).view(np.uint64)
    own += ids  # in place, since the ids of a long trial take much memory
    own[(ids == 0) | (arm < 0)] = 0
    first = first_rows(own)
    return np.asarray((first >= 0) & (first != np.arange(len(ids), dtype=np.int32)))
