"""Reads the lines of an access log as they are written, and has it begun anew before it fills the disk.

A log that has grown large is moved aside, Envoy is told to open a new one, and what it still writes into the old one is
read before it is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

LARGEST_BYTES = 256 << 20
_AT_ONCE = 1 << 20


class Line(NamedTuple):
    """A whole line and where it lies: the number of the log, from 0, and the bytes before it."""

    log: int
    offset: int
    text: str


class LogFollower:
    """The lines of the log at `path`. `reopen` has Envoy open the path anew; without it the log grows for ever."""

    def __init__(self, path: Path, *, reopen: Callable[[], object] | None = None, largest: int = LARGEST_BYTES) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".old")
        self._reopen, self._largest = reopen, largest
        self._file: BinaryIO | None = None
        self._rest = b""
        self._offset = 0
        self._moved = self._aside.exists()  # by a process that was killed before it had read it
        self._log = 0

    def lines(self) -> Iterator[Line]:
        """Every whole line that was written since the last call. Raises OSError where the log cannot be read."""
        while True:
            yield from self._whole_lines()
            if not self._ended():
                return

    def rotate(self) -> bool:
        """A large log was moved aside; it is read to its end by `lines`. Whether it was now."""
        if self._reopen is None or self._moved or self._offset < self._largest:
            return False
        self._path.replace(self._aside)
        self._moved = True
        self._reopen()
        return True

    def close(self) -> None:
        """The file is closed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _whole_lines(self) -> Iterator[Line]:
        if self._file is None:
            try:
                self._file = (self._aside if self._moved else self._path).open("rb")
            except FileNotFoundError:
                return  # Envoy has not begun it yet
        while piece := self._file.read(_AT_ONCE):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for text in whole:
                offset, self._offset = self._offset, self._offset + len(text) + 1
                yield Line(self._log, offset, text.decode(errors="replace"))

    def _ended(self) -> bool:
        """Whether the log that was read is one that was moved aside, and will not grow; the next one follows."""
        if not self._moved:
            return False
        if not self._path.exists():
            # Envoy has not taken the new one yet; one that was told so by a process that is gone is told again.
            if self._reopen is not None:
                self._reopen()
            return False
        assert self._file is not None
        if self._file.read(1):
            self._file.seek(-1, 1)
            return True  # Envoy wrote the end of it before it began the new one
        self.close()
        self._aside.unlink()
        self._moved, self._rest, self._offset = False, b"", 0
        self._log += 1
        return True
