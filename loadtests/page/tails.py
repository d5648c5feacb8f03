"""Files that grow, read on from where the last reading ended: JSON Lines and Arrow tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailgate.analysis.records.documents import parse_lines

_LINES_AT_ONCE = 4 << 20  # bytes, more than any line of a run has
_BATCHES_AT_ONCE = 64 << 20


def _read(path: Path, at: int, most: int) -> bytes:
    """Return `most` bytes of the file from byte `at` on; nothing where there is no file."""
    with suppress(OSError), path.open("rb") as file:
        return os.pread(file.fileno(), most, at)
    return b""


class LinesTail:
    """The JSON objects in the whole lines of a file that were not read yet. Lines that hold none are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the objects that came since, in the order of the file: of a long file the first of them."""
        content = _read(self._path, self._at, _LINES_AT_ONCE)
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        return parse_lines(BytesIO(whole))[0]


class TableTail:
    """The rows of an Arrow stream that were not read yet, of the `columns` that it has."""

    def __init__(self, path: Path, columns: Collection[str]) -> None:
        self._path, self._at, self._columns = path, 0, columns
        self._schema: pa.Schema | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches that came since. What is damaged or half written is left out."""
        while content := _read(self._path, self._at, _BATCHES_AT_ONCE):
            start = self._at
            with suppress(OSError, EOFError, pa.ArrowException):
                reader = pa.BufferReader(content)
                if start == 0:
                    self._schema = pa.ipc.read_schema(reader)
                    self._at = reader.tell()
                while (message := pa.ipc.read_message(reader)) is not None:
                    self._at = start + reader.tell()
                    batch = pa.ipc.read_record_batch(message, self._schema)
                    yield batch.select([name for name in batch.schema.names if name in self._columns])
            if self._at == start:
                break
