"""The kinds of NumPy arrays that analysis counts with, in as many bits as the numbers need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]

_AT_ONCE = 1 << 22


def indices(mask: Bools) -> Ints:
    """Return where the mask is true, rising, in 4 bytes each, without an array of 8."""
    starts = range(0, len(mask), _AT_ONCE)
    parts = [(np.flatnonzero(mask[first : first + _AT_ONCE]) + first).astype(np.int32) for first in starts]
    return np.concatenate([*parts, np.zeros(0, dtype=np.int32)])
