"""Arrow columns as arrays of NumPy: numbers with null filled in, and texts as small numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from analysis.arrays import Bools, Codes, Ints
from analysis.records.columns import as_one, filled, parts
from analysis.records.tables import THREADS

_FEW_NAMES = 1 << 14  # codes of 16 bits hold them, with room to count in


def alike(prints: npt.NDArray[np.uint64]) -> Ints:
    """The rows whose fingerprint another row has too, rising."""
    # Half of each is sorted, in half the time: few have it in common with others by chance.
    heads = (prints >> np.uint64(32)).astype(np.uint32)
    heads.sort()
    twice = heads[1:][heads[1:] == heads[:-1]]
    suspect = np.zeros(1 << _SUSPECT_BITS, dtype=np.bool_)
    suspect[twice >> np.uint32(32 - _SUSPECT_BITS)] = True
    rows = np.flatnonzero(suspect[prints >> np.uint64(64 - _SUSPECT_BITS)]) if twice.size else np.zeros(0, np.int64)
    _, place, counts = np.unique(prints[rows], return_inverse=True, return_counts=True)
    return np.asarray(rows[counts[place] > 1])


_LONGEST_PRINTED = 64
_SUSPECT_BITS = 20  # a table that fits a processor's cache
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def fingerprints(column: pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """64 bits of each text (of null: any), equal for equal texts and almost never for others.

    None where a text is longer than 64 bytes. To sort these takes a tenth of the time that a table of the texts does.
    """
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > _LONGEST_PRINTED:
        return None
    prints = _in_threads(partial(_prints, longest=longest), pieces(column))
    return np.concatenate([np.zeros(0, dtype=np.uint64), *prints])


def _prints(texts: pa.Array, longest: int) -> npt.NDArray[np.uint64]:
    _, offset_bytes, text_bytes = texts.buffers()
    offsets = np.frombuffer(offset_bytes, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    padded = np.zeros(int(offsets[-1] - offsets[0]) + longest + 16, dtype=np.uint8)
    if text_bytes is not None:
        padded[: offsets[-1] - offsets[0]] = np.frombuffer(text_bytes, dtype=np.uint8)[offsets[0] : offsets[-1]]
    # The eight bytes from each byte on, as one word.
    words: npt.NDArray[np.uint64] = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    mixed = lengths.astype(np.uint64)
    for place in range(0, longest, 8):
        mixed ^= words[starts + place] & _LOW_BYTES[np.clip(lengths - place, 0, 8)]
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(29)
    return mixed


def integers(column: Any, missing: int) -> Any:
    """Whole numbers of 32 or 64 bits, as wide as the column's at least, with `missing` for null. May be read-only."""
    values = filled(as_one(column), missing)
    # Sums and products of counts do not fit in less.
    return values if values.itemsize >= 4 else values.astype(np.int32)


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
    return rank[integers(encoded.indices, -1)], tuple(names[index] for index in order)


def groups(column: pa.ChunkedArray) -> Codes:
    """One number below the length for each distinct text; -1 for null.

    Chunk by chunk, since copies lie near each other; the texts that several chunks hold are then given one number.
    """
    number_of = np.full(len(column), -1, dtype=np.int32)
    texts = []
    done = count = 0
    for encoded in _in_threads(lambda piece: piece.dictionary_encode(), pieces(column)):
        own: Codes = integers(encoded.indices, -1)
        np.add(own, count, out=number_of[done : done + len(own)], where=own >= 0)
        texts.append(encoded.dictionary)
        done += len(own)
        count += len(encoded.dictionary)
    if len(texts) < 2:
        return number_of
    names = pa.chunked_array(texts)
    prints = fingerprints(names)
    places = None if prints is None else alike(prints)
    if places is None or places.size > count // 8:
        whole: Codes = integers(as_one(column).dictionary_encode().indices, -1)
        return whole
    if not places.size:
        return number_of
    first: dict[str, int] = {}
    number = np.arange(count, dtype=np.int32)
    for place, name in zip(places.tolist(), names.take(pa.array(places)).to_pylist(), strict=True):
        number[place] = first.setdefault(name, place)
    return np.where(number_of < 0, -1, number[number_of])


def _in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What `function` makes of each of the items, in their order; it spends its time outside of Python."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def pieces(column: Any) -> Iterator[Any]:
    """The column in pieces that fit a processor's cache; empty ones are left out."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for part in parts(len(chunk)):
            yield chunk[part]


def is_named(codes: Codes, names: tuple[str, ...], name: str) -> Bools:
    return codes == names.index(name) if name in names else np.zeros(len(codes), dtype=np.bool_)
