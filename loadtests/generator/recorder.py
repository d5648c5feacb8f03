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
from analysis.records.sums import SumsWriter
from analysis.records.tables import END_OF_STREAM
from loadtests.generator.record import RequestRecord
from loadtests.generator.record_batches import request_batch
from loadtests.generator.spool import CLOSE_WITHIN_S, MOST_WAITING_BYTES, OnWritten, Spool, create
from servers.fields import ConfigError


class RequestRecorder:
    """Rows appended to one new Arrow IPC stream, with sums beside it. Nothing waits for the disk, see `Spool`.

    `append` is cheap; every `rows_per_batch` rows it turns them into a record batch, which takes half a millisecond.
    `descriptor`, for tests, is an open file to write to instead of a new one at `path`.
    """

    def __init__(
        self,
        path: Path,
        *,
        rows_per_batch: int = 256,
        on_written: OnWritten | None = None,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        descriptor: int | None = None,
    ) -> None:
        new = descriptor is None
        if descriptor is None:
            descriptor = create(path, remedy="give --records an empty directory")
        self.path = path
        # An empty batch carries the schema with it: a file of a process that died early is empty, not broken.
        head = [item.serialize().to_pybytes() for item in (REQUESTS, pa.RecordBatch.from_pylist([], schema=REQUESTS))]
        try:
            start = os.write(descriptor, b"".join(head))
            sums = SumsWriter(path) if new else None
            if sums is not None:
                for piece in head:
                    sums.add(piece, 0)
        except OSError as error:
            raise ConfigError(f'"{path}" cannot be written ({error.strerror or error}): free the disk') from None
        self._spool = Spool(
            descriptor, start=start, most_waiting_bytes=most_waiting_bytes, on_written=on_written, sums=sums
        )
        self._rows: list[RequestRecord] = []
        self._rows_per_batch = rows_per_batch
        self.closed = False

    @property
    def written(self) -> int:
        """Rows in the file."""
        return self._spool.rows

    @property
    def dropped(self) -> int:
        """Rows that the disk did not take in time, and that are lost."""
        return self._spool.dropped_rows

    @property
    def waiting(self) -> int:
        """Bytes on their way to the file."""
        return self._spool.waiting_bytes

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
            self._spool.offer(memoryview(request_batch(rows).serialize()), len(rows))
        if self._spool.error is not None:
            raise self._spool.error

    def settle(self, timeout_s: float = CLOSE_WITHIN_S) -> bool:
        """Whether every row flushed so far is in the file, or dropped, within `timeout_s`."""
        return self._spool.settle(timeout_s)

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """Every row that the disk takes is in the file and the stream has its end mark. A second call does nothing.

        Raises the OSError with which the disk failed.
        """
        if self.closed:
            return
        try:
            self.flush()
            self._spool.offer(END_OF_STREAM, 0)
        finally:
            self.closed = True
            self._spool.close(timeout_s)
        if self._spool.error is not None:
            raise self._spool.error
