"""Arrays that are too long for memory, in files without a name: the kernel holds of them what there is room for.

A file lies in the folder for temporary files (TMPDIR) and is gone when nothing refers to its array any more, also after
a kill. An array of up to `LARGEST_IN_MEMORY` bytes is one like any other.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

AT_ONCE = 1 << 16  # rows
LARGEST_IN_MEMORY = 1 << 27  # bytes of one array: none of a run of ten million requests is longer


class ScratchError(OSError):
    """There is no room for a file. The message is one line: what, where, remedy."""


def parts(rows: int) -> Iterator[slice]:
    """All of `rows` rows in slices, so that what is worked out of a few long columns fits a processor's cache."""
    return (slice(begin, min(begin + AT_ONCE, rows)) for begin in range(0, rows, AT_ONCE))


def pieces(column: Any) -> Iterator[Any]:
    """The Arrow column in such parts; empty ones are left out."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for part in parts(len(chunk)):
            yield chunk[part]


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


def ordered(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A sorted copy."""
    copy = empty(len(values), values.dtype)
    copy[:] = values
    copy.sort()
    return copy


def lean(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values; read-only and without memory where all are the same."""
    if len(values) > 1 and values[0] == values[-1] and (values == values[0]).all():
        return np.broadcast_to(values[:1].copy(), len(values))
    return values


class Growing:
    """Numbers of one kind, appended one stretch after the other."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._values: npt.NDArray[Any] = np.empty(0, dtype=kind)  # with room to spare, which takes no memory
        self._rows = 0
        self._file: IO[bytes] | None = None

    @property
    def kind(self) -> np.dtype[Any]:
        return self._values.dtype

    def append(self, values: npt.NDArray[Any]) -> None:
        """`values` follow those so far."""
        rows = self._rows + len(values)
        if self._file is None and rows * self.kind.itemsize > LARGEST_IN_MEMORY:
            self._file = nameless()
            _write(self._file, self._values[: self._rows])
            self._values = self._values[:0].copy()
        if self._file is not None:
            # To write costs less than to fill memory that a file is mapped to.
            _write(self._file, np.ascontiguousarray(values, dtype=self.kind))
        else:
            if rows > len(self._values):
                larger = np.empty(max(rows, 2 * self._rows), dtype=self.kind)
                larger[: self._rows] = self._values[: self._rows]
                self._values = larger
            self._values[self._rows : rows] = values
        self._rows = rows

    def all(self) -> npt.NDArray[Any]:
        """All of them so far."""
        if self._file is None:
            return self._values[: self._rows]
        return np.frombuffer(mapped(self._file), dtype=self.kind)


def nameless() -> IO[bytes]:
    """A file that nobody else sees, to be written to and read."""
    return tempfile.TemporaryFile(prefix="tailgate-")


def _write(file: IO[bytes], values: npt.NDArray[Any]) -> None:
    try:
        file.write(values.data.cast("B"))
    except OSError as error:
        raise _no_room(error, values.nbytes) from error


def mapped(file: IO[bytes]) -> mmap.mmap:
    """The whole file as memory that the kernel fills when it is read."""
    file.flush()
    return _in_order(mmap.mmap(file.fileno(), 0))


def _mapped(file: IO[bytes], size: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        file.truncate(size)
        # A hole that cannot be filled when it is written to would end the process. Where nothing can fill it before,
        # as on macOS, it is left.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise _no_room(error, size) from error
    return np.frombuffer(_in_order(mmap.mmap(file.fileno(), size)), dtype=kind)


def _in_order(memory: mmap.mmap) -> mmap.mmap:
    # Columns are mostly read from begin to end: the kernel may read far ahead.
    memory.madvise(mmap.MADV_SEQUENTIAL)
    return memory


def _no_room(error: OSError, size: int) -> ScratchError:
    place = tempfile.gettempdir()
    return ScratchError(
        error.errno, f"{place} has no room for {size / 1e9:.1f} GB more: free some, or set TMPDIR to another folder"
    )
