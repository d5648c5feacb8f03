"""Texts as 64 bits each: equal for equal texts and almost never for others, so that sorting finds what repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.arrays import Ints
from analysis.records import scratch
from analysis.records.scratch import parts, pieces
from analysis.records.tables import THREADS

_LONGEST_PRINTED = 64
_FEWEST_BITS = 20  # a table that fits a processor's cache
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


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


def fingerprints(column: pa.ChunkedArray) -> npt.NDArray[np.uint64] | None:
    """64 bits of each text (of null: any), equal for equal texts and almost never for others.

    None where a text is longer than 64 bytes. To sort these takes a tenth of the time that a table of the texts does.
    """
    prints = scratch.empty(len(column), np.uint64)
    done = 0
    for own in _in_threads(fingerprints_of, pieces(column)):
        if own is None:
            return None
        prints[done : done + len(own)] = own
        done += len(own)
    return prints


def fingerprints_of(texts: pa.Array) -> npt.NDArray[np.uint64] | None:
    """As `fingerprints`, of one array."""
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
