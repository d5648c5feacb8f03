"""Records and schedules between a load worker and the master of a run that share no disk.

The schedule goes out in parts that the worker asks for one by one. Records come back as Arrow batches, numbered from 0.
The worker writes each batch to its own disk first and sends it from there, so what waits for the network takes no
memory; the master writes it, with times on its own clock, and acknowledges what is written. What is not acknowledged
is sent again, in order, and what comes twice is known by its number: each batch is in the run directory once.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pyarrow as pa
import pyarrow.compute as pc
from gevent.event import Event
from gevent.threadpool import ThreadPool

from analysis.records.schemas import REQUESTS
from loadtests.generator.recorder import record_file
from loadtests.traffic.schedule import Schedule
from servers.fields import ConfigError

PART_BYTES = 512 << 10
WINDOW_BYTES = 8 << 20
RESEND_AFTER_S = 5.0


class Outbox:
    """The worker's side: batches of its record file on their way to the master.

    `send` takes one message, `clock` says (offset to the master's clock, uncertainty) in ns.
    """

    def __init__(
        self,
        path: Path,
        *,
        send: Callable[[dict[str, Any]], None],
        clock: Callable[[], tuple[int, int]],
        window_bytes: int = WINDOW_BYTES,
        resend_after_s: float = RESEND_AFTER_S,
    ) -> None:
        self.path = path
        self._send = send
        self._clock = clock
        self._window = window_bytes
        self._resend_after_s = resend_after_s
        self._first = 0  # number of the oldest batch that is not acknowledged
        self._next = 0  # number of the next to be sent
        self._batches: deque[tuple[int, int, int, int, int]] = deque()  # at, length, rows, offset, uncertainty
        self._news = Event()
        self._empty = Event()
        self._empty.set()
        self._heard_s = time.monotonic()
        self._thread = ThreadPool(1)
        self._descriptor = -1
        self._greenlet = gevent.spawn(self._send_for_ever)

    def written(self, at: int, length: int, rows: int) -> None:
        """The file holds one more batch: `length` bytes from `at`. For `RequestRecorder`."""
        if rows:
            self._batches.append((at, length, rows, *self._clock()))
            self._empty.clear()
            self._news.set()

    def acknowledged(self, number: int) -> None:
        """The master has every batch up to `number`."""
        self._heard_s = time.monotonic()
        while self._first <= number and self._batches:
            self._batches.popleft()
            self._first += 1
        self._next = max(self._next, self._first)
        if not self._batches:
            self._empty.set()
        self._news.set()

    @property
    def unacknowledged_rows(self) -> int:
        """Rows that the master may lack."""
        return sum(rows for _, _, rows, _, _ in self._batches)

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether the master had everything within `timeout_s`."""
        return bool(self._empty.wait(timeout_s))

    def close(self) -> None:
        """Nothing more is sent."""
        self._greenlet.kill(block=False)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _send_for_ever(self) -> None:
        while True:
            self._news.wait(timeout=self._resend_after_s / 5)
            self._news.clear()
            if self._next > self._first and time.monotonic() - self._heard_s > self._resend_after_s:
                self._next, self._heard_s = self._first, time.monotonic()  # lost on the way: again, from the oldest
            while self._next - self._first < len(self._batches) and self._in_flight() < self._window:
                at, length, rows, offset_ns, uncertainty_ns = self._batches[self._next - self._first]
                number = self._next
                piece = self._thread.apply(self._read, (at, length))
                if self._next != number:
                    continue  # acknowledged, or to be sent again, while the disk was read
                if self._next == self._first:
                    self._heard_s = time.monotonic()
                self._next += 1
                clock = {"offset_ns": offset_ns, "uncertainty_ns": uncertainty_ns}
                self._send({"number": number, "rows": rows, **clock, "batch": piece})

    def _in_flight(self) -> int:
        return sum(self._batches[index][1] for index in range(self._next - self._first))

    def _read(self, at: int, length: int) -> bytes:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._descriptor, length, at)


class Inbox:
    """The master's side: one worker's batches, on the master's clock, in a file of the run directory.

    `acknowledge` is called with the number of the last batch that is written.
    """

    def __init__(self, path: Path, *, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._file = record_file(path, remedy="give an empty directory", on_written=self._written)
        self._expected = 0
        self._written_up_to = -1
        self._order: deque[int] = deque()

    def take(self, number: int, rows: int, offset_ns: int, batch: bytes) -> None:
        """The batch is on its way to the file if it is the next one; one that came before is acknowledged again.

        Raises ValueError for what is no batch of records.
        """
        if number != self._expected:
            if number <= self._written_up_to:
                self._acknowledge(self._written_up_to)
            return
        try:
            piece = pa.ipc.read_record_batch(pa.py_buffer(batch), REQUESTS)
            piece.validate(full=True)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise ValueError(f"batch {number} is no batch of records: {error}") from None
        if piece.num_rows != rows:
            raise ValueError(f"batch {number} holds {piece.num_rows} rows and not {rows}")
        if self._file.offer(memoryview(_shifted(piece, offset_ns).serialize()), rows):
            self._order.append(number)
            self._expected += 1

    def close(self) -> None:
        """Write every batch that came, and the end of the file."""
        self._file.close()

    def _written(self, at: int, length: int, rows: int) -> None:
        if rows and self._order:
            self._written_up_to = self._order.popleft()
            self._acknowledge(self._written_up_to)


def _shifted(batch: pa.RecordBatch, offset_ns: int) -> pa.RecordBatch:
    """Return the requests with `offset_ns` added to every time that the load process took."""
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns"):
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), pc.add(batch.column(place), offset_ns))
    return batch


class ShareParts:
    """One worker's share of the schedule as an Arrow file in parts of `part_bytes`, for the master to hand out."""

    def __init__(self, share: Schedule, *, part_bytes: int = PART_BYTES) -> None:
        sink = io.BytesIO()
        share.write_to(sink)
        self._content = sink.getvalue()
        self._part_bytes = part_bytes

    def __len__(self) -> int:
        return max(1, -(-len(self._content) // self._part_bytes))

    def part(self, number: int) -> bytes:
        """The bytes of part `number`, from 0; none beyond the last."""
        return self._content[number * self._part_bytes : (number + 1) * self._part_bytes]


def new_folder(keep: Path, name: str) -> Path:
    """A new folder under `keep` for the records of the trial called `name`, such as "20260101T120000Z-demo/trial-01".

    The name came over the network: only its plain parts count, so that nothing outside `keep` is written.
    """
    parts = [part for part in re.findall(r"[A-Za-z0-9._-]+", name) if part.strip(".")] or ["trial"]
    for attempt in range(1, 1000):
        path = keep.joinpath(*parts[:-1], parts[-1] + (f"-{attempt}" if attempt > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f'"{path}" cannot be made ({error.strerror or error}): give another --keep') from None
        return path
    raise ConfigError(f'"{keep}" has too many folders called {name}: give another --keep')
