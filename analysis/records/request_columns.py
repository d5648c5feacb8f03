"""The requests of a run as slim columns of NumPy, filled table by table while files are read.

A request takes about 100 bytes, and a gap between tokens 4. Names are codes, ids are hashes of 64 bits, and times are
one start in ns with single-precision distances from it, which are off by 6e-8 of their length at most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Codes, Ints

Singles = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]

SCHEDULED, ERROR, WRONG = 1, 2, 4  # flags: the start is a scheduled time; an error is named; times run backwards

_NAMES = ("arm", "replica", "status", "phase")
_IDS = {"request_id": "id", "pair_id": "pair", "session_id": "session"}
_KINDS: dict[str, npt.DTypeLike] = {
    **dict.fromkeys(_NAMES, np.int32),
    **dict.fromkeys(("trial", "prompt_tokens", "max_tokens", "output_tokens", "token_times"), np.int32),
    **dict.fromkeys(("sent_ms", "first_ms", "end_ms", "tpot_ms", "gaps_ms"), np.float32),
    **dict.fromkeys(_IDS.values(), np.uint64),
    **{"start_ns": np.int64, "stall_ns": np.int64, "flags": np.uint8},
}
_LAST_NS = 9_200_000_000_000_000_000  # beyond any clock
_STALL_SLACK_NS = 1_000_000_000
_PART = 1 << 24  # rows that are sorted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """Requests as they were recorded; arrays have one entry a request, except for gaps."""

    arms: tuple[str, ...]  # in alphabetical order, as the next three
    replicas: tuple[str, ...]
    statuses: tuple[str, ...]
    phases: tuple[str, ...]
    arm: Codes  # index into arms, -1 for null; so are the next three
    replica: Codes
    status: Codes
    phase: Codes
    trial: Codes
    flags: npt.NDArray[np.uint8]
    start_ns: Ints  # scheduled, or sent where no schedule is known; 0 or less where neither is
    sent_ms: Singles  # after the start; NaN where unknown, as the next two
    first_ms: Singles
    end_ms: Singles
    tpot_ms: Singles  # NaN where there is one token or none
    prompt_tokens: Codes  # -1 where unknown, as the next four
    max_tokens: Codes
    output_tokens: Codes
    stall_ns: Codes
    token_times: Codes  # how many are recorded
    id: Hashes  # 0 where there is none, as the next two
    pair: Hashes
    session: Hashes
    gaps_ms: Singles  # between tokens, request after request: one less than it has token times

    def __len__(self) -> int:
        return len(self.arm)

    def has_status(self, name: str) -> Bools:
        """Return which requests have the status: a mask, shape (requests,)."""
        return is_named(self.status, self.statuses, name)

    def kept(self, rows: Bools) -> RequestColumns:
        """Return the columns of some requests: a mask, shape (requests,)."""
        if rows.all():
            return self
        columns: dict[str, Any] = {
            field.name: column[rows]
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


def gap_counts(token_times: Codes) -> Codes:
    """Return how many gaps lie between so many times of tokens."""
    return np.maximum(token_times - 1, 0)


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    """Return which codes stand for `name`."""
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)


# --- Filling ----------------------------------------------------------------------------------------------------------


class ColumnBuilder:
    """Columns that tables of requests are appended to."""

    def __init__(self) -> None:
        self.rows = 0
        self._codes: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [np.empty(0, kind)] for name, kind in _KINDS.items()}

    def add(self, table: pa.Table, run: int = 0) -> None:
        """Append the rows of a table with the columns of REQUESTS; pairs of runs with other numbers differ."""
        for batch in table.combine_chunks().to_batches():
            columns = {name: batch.column(name) for name in batch.schema.names}
            self.rows += batch.num_rows
            found = _numbers(columns) | {name: self._coded(name, columns[name]) for name in _NAMES}
            found |= {own: hashes(columns[name]) for name, own in _IDS.items()}
            found["pair"] = _keyed(found["pair"], np.array([run], dtype=np.uint64))
            for name, values in found.items():
                self._parts[name].append(values.astype(_KINDS[name]))  # a view would keep its whole batch

    def _coded(self, name: str, column: pa.Array) -> Codes:
        encoded = column.dictionary_encode()
        known = self._codes[name]
        places = [known.setdefault(str(text), len(known)) for text in encoded.dictionary.to_pylist()]
        coded: Codes = np.array([*places, -1])[integers(encoded.indices, -1)]
        return coded

    def columns(self) -> RequestColumns:
        """Return what was appended, and let go of it."""
        arrays = {name: np.concatenate(self._parts.pop(name)) for name in _KINDS}
        names = {name: tuple(sorted(known)) for name, known in self._codes.items()}
        for name, known in self._codes.items():
            if names[name] != tuple(known):
                rank = np.array([*map(names[name].index, known), -1], dtype=arrays[name].dtype)
                arrays[name] = rank[arrays[name]]
        return RequestColumns(
            **arrays, arms=names["arm"], replicas=names["replica"], statuses=names["status"], phases=names["phase"]
        )


def _numbers(columns: dict[str, pa.Array]) -> dict[str, npt.NDArray[Any]]:
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
    output = _count(columns["output_tokens"])
    several = ended & seen & (output > 1)
    flags = SCHEDULED * (scheduled > 0) + ERROR * _is_text(columns["error"]) + WRONG * wrong
    return {
        "trial": integers(columns["trial"], 1),
        "flags": flags.astype(np.uint8),
        "start_ns": start,
        "sent_ms": _after_ms(sent, start, sent > 0),
        "first_ms": _after_ms(first, start, seen),
        "end_ms": _after_ms(end, start, ended),
        "tpot_ms": _after_ms(end, first, several) / np.maximum(output - 1, 1).astype(np.float32),
        "prompt_tokens": integers(columns["prompt_tokens"], -1),
        "max_tokens": integers(columns["max_tokens"], -1),
        "output_tokens": output,
        "stall_ns": np.maximum(stall, -1),
        "token_times": times,
        "gaps_ms": gaps,
    }


def _count(column: pa.Array) -> Codes:
    """Return numbers that are at least 0, -1 for null."""
    return np.where(column.is_valid().to_numpy(False), np.maximum(integers(column, 0), 0), -1)


def _after_ms(time_ns: Ints, since_ns: Ints, known: Bools) -> Singles:
    return np.where(known, (time_ns - since_ns) / 1e6, np.nan).astype(np.float32)


def _is_text(column: pa.Array) -> Bools:
    """Return which texts are there and not empty."""
    return np.asarray(integers(pc.binary_length(column), 0) > 0)


def _token_gaps(column: pa.Array) -> tuple[Singles, Codes, Bools]:
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


# --- Ids --------------------------------------------------------------------------------------------------------------

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
    left = np.diff(offsets)
    found = left.astype(np.uint64) + np.uint64(1)
    rows, begin = np.arange(size), offsets[:-1]
    while rows.size:
        rows = rows[left[rows] > 0] if (left[rows] <= 0).any() else rows
        rest = left[rows]
        word = words[begin[rows]] & (_BITS >> (8 * np.maximum(8 - rest, 0)).astype(np.uint64))
        found[rows] = _mixed(found[rows] ^ word)
        begin, left = begin + 8, left - 8
    found = _mixed(found)
    found[column.is_null().to_numpy(False)] = 0
    return found


def _keyed(ids: Hashes, place: Hashes) -> Hashes:
    """Return hashes of ids that are unique within a place; 0 stays 0."""
    return np.where(ids > 0, ids ^ _mixed(place + np.uint64(1)), np.uint64(0))


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _ODD
    return values ^ (values >> np.uint64(27))


def first_rows(ids: Hashes) -> Codes:
    """Return the first row that has the id of each row, -1 where it is 0."""
    if not ids.any():
        return np.broadcast_to(np.int32(-1), len(ids))
    first = np.full(len(ids), -1, dtype=np.int32)
    # Equal ids are in one part, since a sort of all at once takes much memory.
    bits = (len(ids) // _PART).bit_length()
    part = (ids >> np.uint64(64 - bits)).astype(np.uint8) if bits else np.zeros(len(ids), dtype=np.uint8)
    for number in range(1 << bits):
        rows = np.flatnonzero((part == number) & (ids > 0)).astype(np.int32)
        rows = rows[np.argsort(ids[rows])]
        ordered = ids[rows]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: rows.size])
        if rows.size:
            first[rows] = np.repeat(np.minimum.reduceat(rows, starts), np.diff(starts, append=rows.size))
    return first


def repeated_rows(columns: RequestColumns) -> Ints:
    """Return the rows whose trial, arm and id an earlier row has."""
    keys = _keyed(columns.id, (columns.trial.astype(np.uint64) << np.uint64(32)) + columns.arm.astype(np.uint64))
    ordered = np.sort(keys)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)).any():
        return np.zeros(0, dtype=np.int64)
    first = first_rows(keys)
    return np.flatnonzero((first >= 0) & (first != np.arange(len(first), dtype=np.int32)))
