"""Reads the lines of an access log as they are written, and has it begun anew before it fills the disk.

A log that has grown large is moved aside, Envoy is told to open a new one, and what it still writes into the old one is
read. An empty file with the number of the old log then says so: a process that goes on for one that was killed knows
which log it reads, and nothing is lost or read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

LARGEST_BYTES = 256 << 20
_AT_ONCE = 1 << 20


class Line(NamedTuple):
    """A whole line and where it lies: the number of the log, counted from 0 over all that were begun, and the bytes
    before it."""

    log: int
    offset: int
    text: str


class LogFollower:
    """The lines of the log at `path` from the beginning of log number `log` on. `reopen` has Envoy open the path anew;
    without it the log grows for ever."""

    def __init__(
        self, path: Path, *, log: int = 0, reopen: Callable[[], object] | None = None, largest: int = LARGEST_BYTES
    ) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".old")
        self._reopen, self._largest = reopen, largest
        self._file: BinaryIO | None = None
        self._rest = b""
        self._offset = 0
        self._moved = self._aside.exists()  # by a process that was killed before it had read it
        self.log = max([log, *(number + 1 for number in self._read_logs())])

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
                yield Line(self.log, offset, text.decode(errors="replace"))

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
        earlier = self._read_logs()
        self._aside.rename(self._mark(self.log))
        with self._mark(self.log).open("wb"):
            pass  # its content is read
        for number in earlier:
            self._mark(number).unlink(missing_ok=True)
        self._moved, self._rest, self._offset = False, b"", 0
        self.log += 1
        return True

    def _mark(self, log: int) -> Path:
        """The file that says that the log of this number was read."""
        return self._path.with_name(f"{self._path.name}.read-{log}")

    def _read_logs(self) -> list[int]:
        """The numbers of the logs that were read, as far as they are known."""
        names = (path.name.rpartition("-")[2] for path in self._path.parent.glob(f"{self._path.name}.read-*"))
        return [int(name) for name in names if name.isascii() and name.isdigit()]
