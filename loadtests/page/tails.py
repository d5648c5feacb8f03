"""Files that grow, read on from where the last reading ended: JSON Lines and Arrow tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.records.documents import parse_json

_AT_ONCE = 4 << 20
_LONGEST_LINE = 1 << 20
_LARGEST_PIECE = 64 << 20


class LinesTail:
    """The whole lines of the file at `path` that were not read yet. A file that shrank or was replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file = 0
        self.restarts = 0

    def new(self) -> Iterator[bytes]:
        """The lines that came since, without their ends, some MiB at most; none where there is no file yet."""
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._file or state.st_size < self._at:
                    self.restarts += self._file != 0
                    self._file, self._at = state.st_ino, 0
                if state.st_size == self._at:
                    return
                file.seek(self._at)
                content = file.read(_AT_ONCE)
        except OSError:
            return
        end = content.rfind(b"\n") + 1
        if not end and len(content) > _LONGEST_LINE:
            self._at += len(content)  # no line of ours
        self._at += end
        yield from content[:end].splitlines()


class DocumentsTail:
    """The JSON objects of a JSON Lines file that were not read yet. What is none is left out."""

    def __init__(self, path: Path) -> None:
        self._lines = LinesTail(path)

    @property
    def restarts(self) -> int:
        """How often the file was begun anew."""
        return self._lines.restarts

    def new(self) -> Iterator[dict[str, Any]]:
        for line in self._lines.new():
            with suppress(ValueError):
                document = parse_json(line.decode("utf-8", "replace"))
                if isinstance(document, dict):
                    yield document


class TableTail:
    """The rows of an Arrow stream that were not read yet: no byte is read twice, and with `newest_only` only the last
    batch is decoded."""

    def __init__(self, path: Path, columns: Collection[str], *, newest_only: bool = False) -> None:
        self._path = path
        self._columns = columns
        self._newest_only = newest_only
        self._at = 0
        self._file = 0
        self._schema: pa.Schema | None = None

    def new(self) -> list[dict[str, Any]]:
        """The rows that came since, in the order of the file."""
        return [row for batch in self.batches() for row in batch.to_pylist()]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The same, a batch for each that was written."""
        newest: pa.Message | None = None
        # A file that is not as it was written is judged later, with words. Here it shows less.
        with suppress(OSError, EOFError, pa.ArrowException), self._path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._file or state.st_size < self._at:
                self._file, self._at, self._schema = state.st_ino, 0, None
            while content := os.pread(file.fileno(), _LARGEST_PIECE, self._at):
                start = self._at
                for message in self._messages(content):
                    if self._newest_only:
                        newest = message
                    else:
                        yield self._decoded(message)
                if self._at == start:
                    break
        if newest is not None:
            with suppress(OSError, pa.ArrowException):
                yield self._decoded(newest)

    def _messages(self, content: bytes) -> Iterator[pa.Message]:
        """The whole messages of batches at the beginning of `content`; a torn one is left for later."""
        reader = pa.BufferReader(content)
        base = self._at
        with suppress(OSError, EOFError, pa.ArrowException):
            if self._schema is None:
                self._schema = pa.ipc.read_schema(reader)
                self._at = base + reader.tell()
            while (message := pa.ipc.read_message(reader)) is not None:
                self._at = base + reader.tell()
                yield message

    def _decoded(self, message: pa.Message) -> pa.RecordBatch:
        batch = pa.ipc.read_record_batch(message, self._schema)
        wanted = [name for name in batch.schema.names if name in self._columns]
        return batch.select(wanted)
