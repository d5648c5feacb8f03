"""A log that grows, read line by line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_AT_ONCE = 1 << 20
_MOST_BEFORE = 64 << 20  # of what was there already


class LogTail:
    """Follows the file at `path` from byte `at` on, by default its present end. It may be moved and begun anew.

    Raises OSError where it cannot be read.
    """

    def __init__(self, path: Path, *, at: int | None = None) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._begun_at = self._file.seek(0, os.SEEK_END) if at is None else self._file.seek(at)
        self._rest = b""

    def before(self) -> Iterator[str]:
        """Yield the last lines that were there already, up to 64 MiB of them."""
        first = max(0, self._begun_at - _MOST_BEFORE)
        with self._path.open("rb") as file:
            file.seek(first)
            while file.tell() < self._begun_at and (line := file.readline()):
                yield _text(line)

    def lines(self) -> Iterator[str]:
        """Yield every whole line that was written since the last call."""
        yield from self._whole_lines()
        try:
            named = self._path.stat()
        except OSError:
            return  # moved aside, and not begun anew yet: it may still be written to
        open_file = os.fstat(self._file.fileno())
        if (named.st_dev, named.st_ino) != (open_file.st_dev, open_file.st_ino):
            fresh = self._path.open("rb")
            yield from self._whole_lines()  # what was written until the new one was begun
            self._file.close()
            self._file, self._rest = fresh, b""
        elif named.st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        else:
            return
        yield from self._whole_lines()

    def rest(self) -> Iterator[str]:
        """Yield what was written of a last line that has no end, once nothing follows."""
        if self._rest:
            yield _text(self._rest)

    def close(self) -> None:
        self._file.close()

    def _whole_lines(self) -> Iterator[str]:
        while piece := self._file.read(_AT_ONCE):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            yield from map(_text, whole)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
