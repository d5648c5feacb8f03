"""Arrow columns as arrays of NumPy: numbers with null filled in, and texts as small numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.arrays import Bools, Codes, Ints
from analysis.records import scratch
from analysis.records.columns import AT_ONCE, as_one, filled, parts
from analysis.records.tables import THREADS

_NEAR_COPIES = 1 << 19  # rows: most copies of a request are no farther from it
_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def alike(prints: npt.NDArray[np.uint64]) -> Ints:
    """The rows whose fingerprint another row has too, rising."""
    # Half of each is sorted, in half the time: few have it in common with others by chance.
    heads = np.empty(len(prints), dtype=np.uint32)
    for part in parts(len(prints)):
        heads[part] = prints[part] >> np.uint64(32)
    heads.sort()
    twice = heads[1:][heads[1:] == heads[:-1]]
    del heads
    # So many bits that few of a long column stand under a mark by chance.
    bits = min(32, max(_FEWEST_BITS, len(prints).bit_length()))
    suspect = np.zeros(1 << bits, dtype=np.bool_)
    suspect[twice >> np.uint32(32 - bits)] = True
    found = [part.start + np.flatnonzero(suspect[prints[part] >> np.uint64(64 - bits)]) for part in parts(len(prints))]
    rows = np.concatenate([np.zeros(0, np.int64), *(found if twice.size else [])])
    _, place, counts = np.unique(prints[rows], return_inverse=True, return_counts=True)
    return np.asarray(rows[counts[place] > 1])


_LONGEST_PRINTED = 64
_FEWEST_BITS = 20  # a table that fits a processor's cache
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def fingerprints(column: pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """64 bits of each text (of null: any), equal for equal texts and almost never for others.

    None where a text is longer than 64 bytes. To sort these takes a tenth of the time that a table of the texts does.
    """
    prints = scratch.empty(len(column), np.uint64)
    done = 0
    for own in _in_threads(_prints, pieces(column)):
        if own is None:
            return None
        prints[done : done + len(own)] = own
        done += len(own)
    return prints


def _prints(texts: pa.Array) -> npt.NDArray[np.uint64] | None:
    _, offset_bytes, text_bytes = texts.buffers()
    offsets = np.frombuffer(offset_bytes, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if longest > _LONGEST_PRINTED:
        return None
    padded = np.zeros(int(offsets[-1] - offsets[0]) + longest + 16, dtype=np.uint8)
    if text_bytes is not None:
        padded[: offsets[-1] - offsets[0]] = np.frombuffer(text_bytes, dtype=np.uint8)[offsets[0] : offsets[-1]]
    # The eight bytes from each byte on, as one word.
    words: npt.NDArray[np.uint64] = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    mixed = lengths.astype(np.uint64)
    for place in range(0, longest, 8):
        word = mixed ^ (words[starts + place] & _LOW_BYTES[np.clip(lengths - place, 0, 8)])
        word *= _ODD
        word ^= word >> np.uint64(29)
        # Whatever stands beside a text, its print is the same.
        mixed = word if shortest > place else np.where(lengths > place, word, mixed)
    return mixed


def integers(column: Any, missing: int) -> Any:
    """Whole numbers of 32 or 64 bits, as wide as the column's at least, with `missing` for null. May be read-only."""
    values = filled(as_one(column), missing)
    if values.itemsize >= 4:
        return values
    # Sums and products of counts do not fit in less; one value for all rows takes no memory.
    if len(values) > 1 and values[0] == values[-1] and (values == values[0]).all():
        return np.broadcast_to(np.int32(values[0]), len(values))
    wide = scratch.empty(len(values), np.int32)
    wide[:] = values
    return wide


def moments(column: Any) -> Ints:
    """Moments in ns of 64 bits, -1 for null, also where there is none at all. May be read-only."""
    return np.asarray(integers(column, -1).astype(np.int64, copy=False))


def codes(column: Any) -> tuple[Codes, tuple[str, ...]]:
    """One small integer for each distinct text, in alphabetical order of the texts; -1 for null."""
    whole = as_one(column)
    encoded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    names = [str(name) for name in encoded.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.full(len(names) + 1, -1, dtype=np.int16 if len(names) < _FEW_NAMES else np.int32)
    rank[order] = np.arange(len(names))
    places = filled(encoded.indices, -1)
    number = scratch.empty(len(places), rank.dtype)
    for part in parts(len(places)):
        number[part] = rank[places[part]]
    return number, tuple(names[index] for index in order)


def groups(column: pa.ChunkedArray) -> Codes:
    """One number below the length for each distinct text; -1 for null.

    Chunk by chunk, since copies lie near each other; the texts that several chunks hold are then given one number.
    """
    number_of: Codes = scratch.full(len(column), -1, np.int32)
    prints: list[npt.NDArray[np.uint64] | None] = []
    done = count = 0
    for encoded, own_prints in _in_threads(_encoded, pieces(column, _NEAR_COPIES)):
        own: Codes = filled(encoded.indices, -1)
        np.add(own, count, out=number_of[done : done + len(own)], where=own >= 0)
        prints.append(own_prints)
        done += len(own)
        count += len(encoded.dictionary)
    if len(prints) < 2:
        return number_of
    known = [own for own in prints if own is not None]
    places = alike(np.concatenate(known)) if len(known) == len(prints) else None
    del prints, known
    if places is None:
        whole: Codes = integers(as_one(column).dictionary_encode().indices, -1)
        return whole
    if not places.size:
        return number_of
    suspect = np.zeros(count + 1, dtype=np.bool_)  # the last place is that of null
    suspect[places] = True
    rows = np.concatenate([part.start + np.flatnonzero(suspect[number_of[part]]) for part in parts(len(number_of))])
    # Numbers rise with the rows in which a text is first met.
    same = as_one(column.take(pa.array(rows)).combine_chunks().dictionary_encode()).indices.to_numpy()
    first = np.unique(same, return_index=True)[1]
    number = np.arange(count, dtype=np.int32)
    number[number_of[rows]] = number_of[rows[first]][same]
    for part in parts(len(number_of)):
        own = number_of[part]
        number_of[part] = np.where(own < 0, -1, number[own])
    return number_of


def _encoded(texts: pa.Array) -> tuple[Any, npt.NDArray[np.uint64] | None]:
    """The texts with each distinct one once, and the fingerprints of those."""
    encoded = texts.dictionary_encode()
    return encoded, _prints(encoded.dictionary)


def _in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What `function` makes of each of the items, in their order and a few ahead; it spends its time outside of
    Python."""
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def pieces(column: Any, rows: int = AT_ONCE) -> Iterator[Any]:
    """The column in pieces of up to so many rows, by default such that fit a processor's cache; no empty ones."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for part in parts(len(chunk), rows):
            yield chunk[part]


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)
