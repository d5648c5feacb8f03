"""Arrays that are too long for memory, in files without a name: the kernel holds of them what there is room for.

A file lies in the folder for temporary files (TMPDIR) and is gone when nothing refers to its array any more, also after
a kill. An array of up to `LARGEST_IN_MEMORY` bytes is one like any other.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

LARGEST_IN_MEMORY = 1 << 27  # bytes of one array: none of a run of ten million requests is longer


class ScratchError(OSError):
    """There is no room for a file. The message is one line: what, where, remedy."""


def empty(rows: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of `rows` entries to be written to."""
    size = rows * np.dtype(kind).itemsize
    if size <= LARGEST_IN_MEMORY:
        return np.empty(rows, dtype=kind)
    with nameless() as file:
        return _mapped(file, size, kind)


def full(rows: int, value: Any, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of `rows` times the value."""
    values = empty(rows, kind)
    values.fill(value)
    return values


def kept(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values, or a copy that is out of memory where they are too long for it."""
    if values.nbytes <= LARGEST_IN_MEMORY:
        return values
    copy = empty(len(values), values.dtype)
    copy[:] = values
    return copy


class Growing:
    """Numbers of one kind in an array that grows. What of its room is not written to takes no memory."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self.values: npt.NDArray[Any] = np.empty(0, dtype=kind)
        self._file: IO[bytes] | None = None

    def reach(self, rows: int) -> None:
        """There is room for `rows` entries; those so far are as they were."""
        if rows <= len(self.values):
            return
        kind, rows = self.values.dtype, max(rows, 2 * len(self.values))
        size = rows * kind.itemsize
        if size <= LARGEST_IN_MEMORY:
            larger = np.empty(rows, dtype=kind)
        elif self._file is None:
            self._file = nameless()
            larger = _mapped(self._file, size, kind)
        else:
            self.values = _mapped(self._file, size, kind)  # which shows what was written before
            return
        larger[: len(self.values)] = self.values
        self.values = larger


def nameless() -> IO[bytes]:
    """A file that nobody else sees, to be written to and read."""
    return tempfile.TemporaryFile(prefix="tailgate-", buffering=0)


def mapped(file: IO[bytes]) -> mmap.mmap:
    """The whole file as memory that the kernel fills when it is read."""
    return _in_order(mmap.mmap(file.fileno(), 0))


def _mapped(file: IO[bytes], size: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        # A hole that cannot be filled when it is written to would end the process.
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        place = tempfile.gettempdir()
        raise ScratchError(
            error.errno, f"{place} has no room for {size / 1e9:.1f} GB: free some, or set TMPDIR to another folder"
        ) from error
    return np.frombuffer(_in_order(mmap.mmap(file.fileno(), size)), dtype=kind)


def _in_order(memory: mmap.mmap) -> mmap.mmap:
    # Columns are mostly read from begin to end: the kernel may read far ahead.
    memory.madvise(mmap.MADV_SEQUENTIAL)
    return memory
