"""The last line of a record file: how many rows the file holds, and the CRC-32 of everything before it.

The line follows the end mark of the Arrow stream, where other readers of Arrow stop, such as
`rows 000000001234 crc32 0a1b2c3d`. A file that a kill or a full disk cut short has no such line.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_LINE = re.compile(rb"\nrows ([0-9]{12}) crc32 ([0-9a-f]{8})\n\Z")
_LINE_BYTES = len(b"\nrows 000000000000 crc32 00000000\n")
_BYTES_AT_ONCE = 1 << 24


class Checksum:
    """The rows and the CRC-32 of a file that is being written from its beginning."""

    def __init__(self) -> None:
        self.rows = 0
        self._crc32 = 0

    def add(self, piece: bytes | memoryview, rows: int) -> None:
        """Count `piece`, which holds `rows` rows and follows what the file held."""
        self._crc32 = zlib.crc32(piece, self._crc32)
        self.rows += rows

    def end(self) -> bytes:
        """Return what ends the file: the end mark of the stream, and the last line."""
        line = b"\nrows %012d crc32 " % self.rows
        return b"%s%s%08x\n" % (END_OF_STREAM, line, zlib.crc32(END_OF_STREAM + line, self._crc32))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEnd:
    """What the last line of a file states."""

    rows: int
    size: int  # bytes before the line
    summed: int  # bytes that `crc32` covers: all up to itself
    crc32: int

    def agrees_with(self, path: Path) -> bool:
        """Return whether the file at `path` is as stated. Raises OSError."""
        return crc32_of(path, self.summed) == self.crc32


def read_end(path: Path) -> FileEnd | None:
    """Return what the file at `path` states at its end; None where it states nothing. Raises OSError."""
    size = path.stat().st_size - _LINE_BYTES
    if size < 0:
        return None
    with path.open("rb") as file:
        file.seek(size)
        line = _LINE.match(file.read())
    if line is None:
        return None
    return FileEnd(rows=int(line[1]), size=size, summed=size + line.start(2), crc32=int(line[2], 16))


def crc32_of(path: Path, size: int | None = None) -> int:
    """Return the CRC-32 of the first `size` bytes of the file, or of all. Raises OSError."""
    left = path.stat().st_size if size is None else size
    crc32 = 0
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, _BYTES_AT_ONCE))):
            crc32 = zlib.crc32(piece, crc32)
            left -= len(piece)
    return crc32
