"""Request records that survive a kill, in a file to which its own thread appends.

Rows wait in memory for at most a second or a few hundred rows, then go out as one Arrow record batch. The kernel has
them from then on: `kill -9` loses what was not yet flushed, and a reader accepts the torn tail.

A write goes to the kernel's page cache and normally takes microseconds, but a disk that cannot keep up makes it wait
for seconds. The greenlets that keep the schedule must not wait with it, and memory must not grow while it lasts: what
waits is bounded, and beyond that what is newest is dropped and counted. Nothing here waits for a disk to sync.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gevent
from gevent.event import Event
from gevent.threadpool import ThreadPool

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.loadtests.generator.clock_offsets import ClockComparison
from tailgate.loadtests.generator.record import RequestRecord, request_batch
from tailgate.servers.complaint import ConfigError

MOST_WAITING_BYTES = 64 << 20  # some 20 s of records at 10,000 requests/s
CLOSE_WITHIN_S = 10.0

T = TypeVar("T")


def record_file(path: Path) -> Spool:
    """Make an Arrow IPC stream of requests at `path`. Raises ConfigError where it exists or cannot be made."""
    writer = made(path, lambda: RecordWriter(path, REQUESTS))
    return Spool(writer.append_batch, end=writer.close)


def made(path: Path, make: Callable[[], T]) -> T:
    """Return what `make` makes of the new file `path`. Raises ConfigError where that exists or cannot be made."""
    if path.exists():
        raise ConfigError(f'"{path}" exists already: give an empty directory')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return make()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f'"{path}" cannot be written ({why}): free the disk, or give another directory') from None


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

    def append(self, record: RequestRecord) -> None:
        """Write the row with the next flush, which comes at once when a batch is full.

        Raises the OSError with which the disk failed.
        """
        self._rows.append(record)
        if len(self._rows) >= self._rows_per_batch:
            self.flush()

    def flush(self) -> None:
        """Start to write every row appended so far. Raises the OSError with which the disk failed."""
        if self._rows:
            rows, self._rows = self._rows, []
            offset_ns = 0 if self._clock is None else self._clock.offset_of_records()
            batch = request_batch(rows, offset_ns=offset_ns)
            self.file.offer(batch, batch.nbytes, len(rows))
        if self.file.error is not None:
            raise self.file.error

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """Write every row that the disk takes, and the end of the file.

        Raises the OSError with which the disk failed.
        """
        try:
            self.flush()
        finally:
            self.file.close(timeout_s)
        if self.file.error is not None:
            raise self.file.error


class Spool:
    """Pieces given to `write` in the order of `offer`, by a thread, and then `end`. Use it from one thread's greenlets.

    `error` is why the disk took no more: everything after it is dropped, and nothing states the end of such a file.
    `on_written` is called after each piece with the size of all that were written.
    """

    def __init__(
        self,
        write: Callable[[Any], object],
        *,
        end: Callable[[], object] = lambda: None,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        on_written: Callable[[int], None] | None = None,
    ) -> None:
        self._write = write
        self._end = end
        self._most = most_waiting_bytes
        self._on_written = on_written
        self._waiting: deque[tuple[Any, int, int]] = deque()
        self._more = Event()
        self._empty = Event()
        self._empty.set()
        self._thread = ThreadPool(1)
        self._closed = False
        self.waiting_bytes = 0
        self.size = 0  # bytes written
        self.rows = 0
        self.dropped_rows = 0
        self.error: OSError | None = None
        self._greenlet = gevent.spawn(self._write_loop)

    def offer(self, piece: Any, size: int, rows: int = 0) -> bool:
        """Write the piece of `size` bytes soon; or drop it and count its rows (False). Never waits."""
        if self.error is not None or self._closed or self.waiting_bytes + size > self._most:
            self.dropped_rows += rows
            return False
        self._waiting.append((piece, size, rows))
        self.waiting_bytes += size
        self._empty.clear()
        self._more.set()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Return whether everything offered so far was written, or has failed, within `timeout_s`."""
        return bool(self._empty.wait(timeout_s))

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """Write what the disk takes within `timeout_s`, and the end of the file; the rest is dropped. A second call
        does nothing."""
        if self._closed:
            return
        self._closed = True
        settled = self.settle(timeout_s)  # otherwise the thread still hangs in a write
        self._greenlet.kill(block=False)
        self.dropped_rows += sum(rows for _, _, rows in self._waiting)
        self._waiting.clear()
        self.waiting_bytes = 0
        if settled and self.error is None:
            self.error = self._try(self._end)

    def _write_loop(self) -> None:
        while True:
            self._more.wait()
            self._more.clear()
            while self._waiting:
                piece, size, rows = self._waiting[0]
                if self.error is None:
                    self.error = self._try(self._write, piece)
                self._waiting.popleft()
                self.waiting_bytes -= size
                if self.error is not None:
                    self.dropped_rows += rows
                    continue
                self.size += size
                self.rows += rows
                if self._on_written is not None:
                    self._on_written(self.size)
            self._empty.set()

    def _try(self, call: Callable[..., object], *arguments: Any) -> OSError | None:
        """Return why the call failed in the thread."""
        try:
            failure: OSError | None = self._thread.apply(_tried, (call, *arguments))
        except (MemoryError, RuntimeError) as error:  # no memory for the thread
            return OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {error}")
        return failure


def _tried(call: Callable[..., object], *arguments: Any) -> OSError | None:
    """Return why the call failed: gevent prints what its threads raise."""
    try:
        call(*arguments)
    except OSError as error:
        return error
    return None
