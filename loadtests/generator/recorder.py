"""Request records that survive a kill.

Rows wait in memory for at most a second or a few hundred rows, then go out as one Arrow record batch. The kernel has
them from then on: `kill -9` loses what was not yet flushed, and a reader accepts the torn tail. Nothing here waits
for a disk to sync, which would stop every greenlet.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from analysis.records.schemas import REQUESTS
from loadtests.generator.record import RequestRecord
from loadtests.generator.record_batches import request_batch
from loadtests.generator.spool import CLOSE_WITHIN_S, OnWritten, Spool
from servers.fields import ConfigError


def record_file(path: Path, *, remedy: str, on_written: OnWritten | None = None) -> Spool:
    """A new Arrow IPC stream of requests at `path`, without a row.

    ConfigError when it exists (with `remedy`) or cannot be made.
    """
    if path.exists():
        raise ConfigError(f'"{path}" exists already: {remedy}')
    # An empty batch carries the schema with it: a file of a process that died early is empty, not broken.
    items = (REQUESTS, pa.RecordBatch.from_pylist([], schema=REQUESTS))
    head = b"".join(item.serialize().to_pybytes() for item in items)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(descriptor, head)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f'"{path}" cannot be written ({why}): free the disk, or give another directory') from None
    return Spool(descriptor, head=head, on_written=on_written)


class RequestRecorder:
    """Rows appended to `file`, which `record_file` opens. Nothing waits for the disk, see `Spool`.

    `append` is cheap; every `rows_per_batch` rows it turns them into a record batch, which takes half a millisecond.
    """

    def __init__(self, file: Spool, *, rows_per_batch: int = 256) -> None:
        self.file = file
        self._rows: list[RequestRecord] = []
        self._rows_per_batch = rows_per_batch
        self.closed = False

    def append(self, record: RequestRecord) -> None:
        """The row will be in the file after the next flush, which comes at once when a batch is full.

        Raises the OSError with which the disk failed.
        """
        self._rows.append(record)
        if len(self._rows) >= self._rows_per_batch:
            self.flush()

    def flush(self) -> None:
        """Every row appended so far is on its way to the file. Raises the OSError with which the disk failed."""
        if self.closed:
            return
        if self._rows:
            rows, self._rows = self._rows, []
            self.file.offer(memoryview(request_batch(rows).serialize()), len(rows))
        if self.file.error is not None:
            raise self.file.error

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """Write every row that the disk takes, and the end of the file. A second call does nothing.

        Raises the OSError with which the disk failed.
        """
        if self.closed:
            return
        try:
            self.flush()
        finally:
            self.closed = True
            self.file.close(timeout_s)
        if self.file.error is not None:
            raise self.file.error
