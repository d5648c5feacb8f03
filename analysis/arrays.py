"""The kinds of NumPy arrays that analysis counts with, and functions that process them in parts to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]

_AT_ONCE = 1 << 20


def parts(size: int) -> Iterator[slice]:
    """Yield slices that cover `size` rows, about a million each."""
    return (slice(first, min(first + _AT_ONCE, size)) for first in range(0, size, _AT_ONCE))


def by_trial(trial: Ints) -> Iterator[tuple[slice, int, Bools]]:
    """Yield a part of the rows, a trial in it, and the mask of the trial's rows in the part."""
    for part in parts(len(trial)):
        own = trial[part]
        for number in [own[0].item()] if own.min() == own.max() else np.unique(own).tolist():
            yield part, number, own == number


def index_parts(mask: Bools) -> Iterator[Ints]:
    """Yield the indices at which the mask is true, ascending, in 4 bytes each; at least one empty array."""
    yield np.zeros(0, dtype=np.int32)
    yield from ((np.flatnonzero(mask[part]) + part.start).astype(np.int32) for part in parts(len(mask)))


def indices(mask: Bools) -> Ints:
    """Return where the mask is true, rising, in 4 bytes each, without an array of 8."""
    return np.concatenate([*index_parts(mask)])


def row_parts(rows: slice | Ints | Bools, size: int) -> Iterator[slice | Ints]:
    """Yield `rows` of `size` in parts of about a million: of a mask or numbers as numbers, of a slice as slices."""
    if isinstance(rows, slice):
        first, last, _ = rows.indices(size)
        yield from (slice(first + part.start, first + part.stop) for part in parts(last - first))
    elif rows.dtype == np.bool_:
        yield from index_parts(np.asarray(rows, dtype=np.bool_))
    else:
        numbers: Any = rows
        yield from (numbers[part] for part in parts(len(rows)))


def counts_of(numbers: Ints, size: int) -> Ints:
    """Count each number below `size`, as `np.bincount` does, which would copy all numbers."""
    counts = np.zeros(size, dtype=np.int64)
    for part in parts(len(numbers)):
        counts += np.bincount(numbers[part], minlength=size)
    return counts
