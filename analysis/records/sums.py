"""What a record file should hold: beside it, a line with a checksum for each piece that its writer appended.

`requests-0.arrow.sums` stands beside `requests-0.arrow`. Its lines are `piece OFFSET BYTES ROWS CRC32 OWN`, in the
order of the pieces, and at last `end BYTES PIECES ROWS OWN`; OWN is the CRC-32 of the line up to it, and both sums are
in hexadecimal. So a reader knows which bytes are as they were written before it decodes any of them, reads on behind
those that are not, and knows how many rows are gone. A kill between a piece and its line costs that piece.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".sums"

_BYTES_AT_ONCE = 1 << 24
_FIELDS = {b"piece": 4, b"end": 3}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the file that was appended at once."""

    at: int
    size: int  # bytes
    rows: int
    crc32: int

    @property
    def end(self) -> int:
        return self.at + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a file should hold. `end` is (bytes, pieces, rows) where the writer closed it, else None."""

    pieces: tuple[Piece, ...]
    end: tuple[int, int, int] | None
    damaged: int  # lines that cannot be read


class SumsWriter:
    """Lines appended beside the new file at `path`, each in the hands of the kernel when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._file = sums_path(path).open("wb", buffering=0)
        self._size = self._pieces = self._rows = 0

    def add(self, piece: bytes | memoryview, rows: int) -> None:
        """`piece` is what the file was just continued with, and holds `rows` rows. Raises OSError."""
        append(self._file, _line("piece", self._size, len(piece), rows, f"{zlib.crc32(piece):08x}"))
        self._size += len(piece)
        self._pieces += 1
        self._rows += rows

    def close(self, *, ended: bool = True) -> None:
        """Nothing more comes; with `ended` the file is stated to be whole. A second call does nothing."""
        if self._file.closed:
            return
        try:
            if ended:
                append(self._file, _line("end", self._size, self._pieces, self._rows))
        finally:
            self._file.close()


def append(file: io.FileIO, piece: bytes) -> None:
    """`file` ends with the whole of `piece`, or is as it was and the OSError that the disk gave is raised."""
    start = file.tell()
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.seek(start)
            file.truncate()
        raise


def state(path: Path) -> None:
    """Beside the finished file at `path` is stated what it holds, without its rows."""
    writer = SumsWriter(path)
    with path.open("rb") as file:
        while piece := file.read(_BYTES_AT_ONCE):
            writer.add(piece, 0)
    writer.close()


def changed(path: Path, statement: Statement) -> bool:
    """Whether the file at `path` is other than `statement` has it."""
    at = 0
    with path.open("rb") as file:
        for piece in statement.pieces:
            if piece.at != at or zlib.crc32(file.read(piece.size)) != piece.crc32:
                return True
            at = piece.end
        more = file.read(1)
    return bool(more or statement.damaged or statement.end is None or statement.end[0] != at)


def sums_path(path: Path) -> Path:
    """Where the statement about the file at `path` lies."""
    return path.with_name(path.name + SUFFIX)


def read_statement(path: Path) -> Statement | None:
    """The statement about the file at `path`, pieces in order, each once; None where there is none. Raises OSError."""
    try:
        lines = sums_path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    pieces: dict[int, Piece] = {}
    end = None
    damaged = 0
    for line in lines[:-1]:  # what follows the last line's end was torn by a kill
        kind, numbers = _read_line(line)
        if kind == b"piece":
            piece = Piece(*numbers)
            damaged += pieces.setdefault(piece.at, piece) != piece
        elif kind == b"end":
            end = (numbers[0], numbers[1], numbers[2])
        else:
            damaged += 1
    return Statement(pieces=tuple(pieces[at] for at in sorted(pieces)), end=end, damaged=damaged)


def _line(kind: str, *values: object) -> bytes:
    text = " ".join((kind, *map(str, values))).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _read_line(line: bytes) -> tuple[bytes, list[int]]:
    """The kind and the numbers of a line, the kind empty where the line is not as it was written."""
    text, _, own = line.rpartition(b" ")
    if own != b"%08x" % zlib.crc32(text):
        return b"", []
    kind, *words = text.split(b" ")
    if len(words) != _FIELDS.get(kind, -1):
        return b"", []
    return kind, [int(word, 16 if place == 3 else 10) for place, word in enumerate(words)]
