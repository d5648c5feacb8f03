"""Request records that survive a kill.

Rows wait in memory for at most a second or a few hundred rows, then go out as one Arrow record batch. The kernel has
them from then on: `kill -9` loses what was not yet flushed, and a reader accepts the torn tail. Nothing here waits
for a disk to sync, which would stop every greenlet.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from analysis.records.schemas import REQUESTS
from analysis.records.tables import Checksum
from loadtests.generator.clock_offsets import ClockComparison
from loadtests.generator.record import RequestRecord, request_batch
from loadtests.generator.spool import CLOSE_WITHIN_S, Spool, new_file


def record_file(path: Path) -> Spool:
    """Make an Arrow IPC stream of requests at `path`. Raises ConfigError where it exists or cannot be made."""
    file = Spool(new_file(path), checksum=Checksum())
    # An empty batch carries the schema with it: a file of a process that died early is empty, not broken.
    items = (REQUESTS, pa.RecordBatch.from_pylist([], schema=REQUESTS))
    file.offer(b"".join(item.serialize().to_pybytes() for item in items), 0)
    return file


class RequestRecorder:
    """Rows appended to `file`, which `record_file` opens. Nothing waits for the disk, see `Spool`.

    `append` is cheap; every `rows_per_batch` rows it turns them into a record batch, which takes half a millisecond.
    With a `clock` times are moved to the clock of the master.
    """

    def __init__(self, file: Spool, *, rows_per_batch: int = 256, clock: ClockComparison | None = None) -> None:
        self.file = file
        self._clock = clock
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
            offset_ns = 0 if self._clock is None else self._clock.offset_of_records()
            self.file.offer(memoryview(request_batch(rows, offset_ns=offset_ns).serialize()), len(rows))
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
