"""Request records that survive a kill, and a load process's account of itself.

Rows wait in memory for at most a second or a few hundred rows, then go out as one Arrow record batch. The kernel has
them from then on: `kill -9` loses what was not yet flushed, and a reader accepts the torn tail. Nothing here waits
for a disk to sync, which would stop every greenlet.
"""

from __future__ import annotations

import gc
import math
import os
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from gevent.event import AsyncResult
from gevent.threadpool import ThreadPool

from analysis.records.documents import write_document
from analysis.records.requests import REQUESTS
from analysis.records.sums import SumsWriter
from analysis.records.tables import END_OF_STREAM
from loadtests.generator.spool import CLOSE_WITHIN_S, MOST_WAITING_BYTES, OnWritten, Spool, create
from servers.clock import now_ns
from servers.config import ConfigError


class RequestRecord(NamedTuple):
    """One row of `REQUESTS`, fields in its order. A plain tuple: rows are made inside the window."""

    request_id: str
    session_id: str
    turn: int
    trial: int
    arm: str | None
    replica: str | None
    pair_id: str
    scheduled_ns: int
    sent_ns: int
    first_token_ns: int | None
    end_ns: int
    status: str
    error: str | None
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    token_ns: npt.NDArray[np.int64]  # offsets from sent_ns, shape (output_tokens,)
    queue_ns: int | None
    prefill_ns: int | None
    decode_ns: int | None
    compile_stall_ns: int | None
    batch_id: int | None
    batch_size: int | None
    padded_batch: int | None
    padded_length: int | None
    server_recv_ns: int | None
    server_end_ns: int | None
    phase: str

    @property
    def ok(self) -> bool:
        """Whether the server answered in full."""
        return self.status == "OK"

    @property
    def ttft_ms(self) -> float | None:
        """Scheduled time to first token, in ms; None when no token came."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.scheduled_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Scheduled time to the end, in ms."""
        return (self.end_ns - self.scheduled_ns) / 1e6


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

    def close(self) -> None:
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
            self._spool.close()
        if self._spool.error is not None:
            raise self._spool.error


def request_batch(rows: Sequence[RequestRecord]) -> pa.RecordBatch:
    """`rows` (one or more) as one record batch with the schema REQUESTS."""
    columns = [_column(values, kind) for values, kind in zip(zip(*rows, strict=True), _KINDS, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=REQUESTS)


# pyarrow takes some 100 ns to look at each Python object. numpy reads numbers in 40 ns, and many columns of text hold
# one value throughout. What holds a None goes the general way.


def _column(values: tuple[Any, ...], kind: Any) -> pa.Array:
    first, rows = values[0], len(values)
    if first is None or kind is _TEXT:
        constant = values.count(first) == rows
        if constant and first is None:
            return pa.nulls(rows, kind)
        return _repeated(first, rows) if constant else pa.array(values, kind)
    try:
        return _lists(values) if kind is _TOKEN_LIST else _whole_numbers(values, kind)
    except TypeError:
        return pa.array(values, kind)


def _repeated(text: str, rows: int) -> pa.Array:
    raw = text.encode("utf-8")
    ends = np.arange(rows + 1, dtype=np.int32) * len(raw)
    return pa.Array.from_buffers(_TEXT, rows, [None, pa.py_buffer(ends), pa.py_buffer(raw * rows)])


def _whole_numbers(values: tuple[int, ...], kind: Any) -> pa.Array:
    flat = np.fromiter(values, np.int64 if kind is _LONG else np.int32, len(values))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(flat)])


def _lists(values: tuple[Any, ...]) -> pa.Array:
    # All tokens of all rows as one flat array: a list of Python lists would cost more than all the rest.
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=ends[1:])
    flat = pa.Array.from_buffers(_LONG, int(ends[-1]), [None, pa.py_buffer(b"".join(values))])
    return pa.Array.from_buffers(_TOKEN_LIST, len(values), [None, pa.py_buffer(ends)], children=[flat])


_TEXT, _LONG, _TOKEN_LIST = pa.string(), pa.int64(), pa.list_(pa.int64())
# Each kind as one object: comparing types of columns costs more than comparing identities.
_KINDS = [next((kind for kind in (_TEXT, _LONG, _TOKEN_LIST) if kind == field.type), field.type) for field in REQUESTS]


def _write_files(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> OSError | None:
    """Why they could not be written. Returned, because gevent prints what its threads raise."""
    try:
        for name, content in files.items():
            write_document(directory / name, content)
    except OSError as error:
        return error
    return None


class LagHistogram:
    """Lags in bins 1 % wide from a microsecond up: bounded memory for any run. A quantile is its bin's upper edge."""

    _BINS = 2400  # 1 us * 1.01^2400 is about 6 hours
    _AT_ONCE = 4096  # logarithms of many at once cost a tenth of one by one

    def __init__(self) -> None:
        self._counts = np.zeros(self._BINS, dtype=np.int64)
        self._new = array("q")
        self._max_ns = 0

    def add(self, lag_ns: int) -> None:
        """One more lag; a negative one counts as 0."""
        self._new.append(lag_ns)
        if len(self._new) >= self._AT_ONCE:
            self._count()

    @property
    def max_ms(self) -> float:
        """The largest lag (ms); 0.0 when there is none."""
        self._count()
        return self._max_ns / 1e6

    def quantile_ms(self, q: float) -> float:
        """The lag (ms) that a share `q` does not exceed, at most 1 % too high; 0.0 when there is none."""
        self._count()
        seen = np.cumsum(self._counts)
        if not seen[-1]:
            return 0.0
        position = int(np.searchsorted(seen, max(1, math.ceil(q * int(seen[-1])))))
        return float(min(self.max_ms, math.exp(position / 100.5) / 1e3))

    def summary(self) -> dict[str, float]:
        """{"p50", "p99", "max"} in ms."""
        quantiles = {"p50": self.quantile_ms(0.50), "p99": self.quantile_ms(0.99), "max": self.max_ms}
        return {key: round(value, 4) for key, value in quantiles.items()}

    def _count(self) -> None:
        if not self._new:
            return
        lags, self._new = np.frombuffer(self._new, dtype=np.int64), array("q")
        self._max_ns = max(self._max_ns, int(lags.max()))
        positions = (np.log(np.maximum(lags / 1e3, 1e-3)) * 100.5).astype(np.int64) + 1
        positions = np.where(lags <= 1000, 0, np.minimum(positions, self._BINS - 1))
        self._counts += np.bincount(positions, minlength=self._BINS)


class _ArmTally:
    """Counts of one arm since the start, and exact quantiles of its newest answers (4,096 to 8,192 of them)."""

    _NEWEST = 4096

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.inflight = 0
        self._scheduled_ns = array("q")
        self._first_ns = array("q")  # 0: no token came
        self._end_ns = array("q")

    def add(self, record: RequestRecord) -> None:
        self.finished += 1
        if record.status != "OK":
            self.failed += 1
            return
        self._scheduled_ns.append(record.scheduled_ns)
        self._first_ns.append(record.first_token_ns or 0)
        ends = self._end_ns
        ends.append(record.end_ns)
        if len(ends) > 2 * self._NEWEST:
            for values in (self._scheduled_ns, self._first_ns, self._end_ns):
                del values[: self._NEWEST]

    def summary(self, since_ns: int) -> dict[str, Any]:
        """Counts, and quantiles of the answers that ended at `since_ns` or later (null when there are none)."""
        out: dict[str, Any] = {"n": self.finished, "failed": self.failed, "inflight": self.inflight}
        # Copies: an array whose buffer is shared cannot grow.
        scheduled, first, end = (np.array(values) for values in (self._scheduled_ns, self._first_ns, self._end_ns))
        recent = end >= since_ns
        answered = recent & (first > 0)
        for name, at, chosen in (("ttft", first, answered), ("e2e", end, recent)):
            taken_ms = (at[chosen] - scheduled[chosen]) / 1e6
            p50, p99 = np.percentile(taken_ms, (50, 99)) if len(taken_ms) else (None, None)
            out[f"{name}_p50_ms"] = None if p50 is None else round(float(p50), 3)
            out[f"{name}_p99_ms"] = None if p99 is None else round(float(p99), 3)
        return out


class CpuShare:
    """How much of a core the thread that makes it used, second by second."""

    BUSY = 0.95  # above this a core is as good as used up
    _SHORTEST_S = 0.5

    def __init__(self) -> None:
        self._thread_s, self._wall_s = time.thread_time(), time.perf_counter()
        self._used_s = self._measured_s = self.busy_s = self.most = 0.0

    def restart(self) -> None:
        """What was used up to now counts for nothing: there was no schedule to keep."""
        self.__init__()  # type: ignore[misc]

    def take(self) -> None:
        """The stretch since the last call is counted, unless it is shorter than half a second."""
        thread_s, wall_s = time.thread_time(), time.perf_counter()
        used_s, took_s = thread_s - self._thread_s, wall_s - self._wall_s
        if took_s < self._SHORTEST_S:
            return
        self._thread_s, self._wall_s = thread_s, wall_s
        self._used_s += used_s
        self._measured_s += took_s
        self.most = max(self.most, used_s / took_s)
        if used_s >= self.BUSY * took_s:
            self.busy_s += took_s

    def summary(self) -> dict[str, float]:
        """{"mean", "max"} as shares of a core, {"busy_s", "of_s"} seconds at 95 % or more of those measured."""
        mean = self._used_s / self._measured_s if self._measured_s else 0.0
        figures = {"mean": mean, "max": self.most, "busy_s": self.busy_s, "of_s": self._measured_s}
        return {key: round(value, 4) for key, value in figures.items()}


class LoadLog:
    """What one load process did and how late it was itself, as two small JSON files rewritten each second.

    generator-<worker>.json holds the counts, the schedule lag (actual minus scheduled start; starts held back by a
    concurrency cap do not count), the loop lag (how late a waiting greenlet ran, the error of every token time), CPU
    (of the whole process, and second by second of the thread that keeps the schedule), time spent collecting garbage,
    and how many records are in the file or were dropped. progress-<worker>.json holds live quantiles: "arms" over the
    last 10 s, "overall" over the newest answers, both with counts since the start. Counts are of requests as sent: a
    mirrored request is one for each arm.

    `on_write` is given both contents each time. `clock` is how this process's clock compares with the master's.
    """

    RECENT_NS = 10_000_000_000

    def __init__(
        self,
        directory: Path | None,
        *,
        worker: int,
        planned: int | None,
        arms: Iterable[str] = (),
        recorder: RequestRecorder | None = None,
    ) -> None:
        self._directory = directory
        self._recorder = recorder
        self.worker = worker
        self.planned = planned
        self.started = 0
        self.finished = 0
        self.failed = 0
        self.unrecorded = 0
        self.start_ns: int | None = None  # null in the files until the start is agreed on
        self.lag = LagHistogram()
        self.loop_lag = LagHistogram()
        self.cpu = CpuShare()
        self.gc_ms = {"count": 0, "total": 0.0, "max": 0.0}
        self.error: str | None = None
        self.complete = False
        self.clock: Mapping[str, Any] | None = None
        self.on_write: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        self._arms = {arm: _ArmTally() for arm in arms}
        self._cpu_s = time.process_time()
        self._wall_ns = now_ns()
        self._thread = ThreadPool(1)
        self._writing: AsyncResult | None = None

    def begun(self, arm: str | None) -> None:
        """One more request is on its way to `arm` (None: not known yet)."""
        self.started += 1
        if arm is not None:
            self._tally(arm).inflight += 1

    def ended(self, record: RequestRecord, pinned: str | None) -> None:
        """One request has ended; `pinned` is the arm that `begun` was told."""
        self.finished += 1
        answered = record.arm or "*"
        tally = self._arms.get(answered) or self._tally(answered)
        tally.add(record)
        if record.status != "OK":
            self.failed += 1
        if pinned == answered:
            tally.inflight -= 1
        elif pinned is not None:
            self._tally(pinned).inflight -= 1

    def ended_unrecorded(self, pinned: str | None) -> None:
        """One request has ended of which nothing else is kept; `pinned` is the arm that `begun` was told."""
        self.finished += 1
        self.unrecorded += 1
        if pinned is not None:
            self._tally(pinned).inflight -= 1

    def account(self) -> dict[str, Any]:
        """What generator-<worker>.json says now."""
        recorder = self._recorder
        return {
            "worker": self.worker,
            "planned": self.started if self.planned is None else self.planned,
            "started": self.started,
            "finished": self.finished,
            "failed": self.failed,
            "records": {
                "written": recorder.written if recorder else 0,
                "dropped": (recorder.dropped if recorder else 0) + self.unrecorded,
                "waiting_bytes": recorder.waiting if recorder else 0,
            },
            "lag_ms": self.lag.summary(),
            "loop_lag_ms": self.loop_lag.summary(),
            "gc_ms": self.gc_ms,
            "cpu_s": round(time.process_time() - self._cpu_s, 3),
            "cpu": self.cpu.summary(),
            "wall_s": round((now_ns() - self._wall_ns) / 1e9, 3),
            "start_ns": self.start_ns,
            "clock": self.clock,
            "error": self.error,
            "complete": self.complete,
        }

    def progress(self) -> dict[str, Any]:
        """What progress-<worker>.json says now."""
        at_ns = now_ns()
        return {
            "worker": self.worker,
            "planned": self.planned,
            "started": self.started,
            "finished": self.finished,
            "failed": self.failed,
            "t_s": 0.0 if self.start_ns is None else round(max(0, at_ns - self.start_ns) / 1e9, 3),
            "arms": {arm: tally.summary(at_ns - self.RECENT_NS) for arm, tally in self._arms.items()},
            "overall": {arm: tally.summary(0) for arm, tally in self._arms.items()},
        }

    def tell(self) -> None:
        """Both files will soon say how things stand now; they stay older while the disk is slow. Never waits.

        Raises the OSError with which the disk failed before.
        """
        if self.start_ns is None or now_ns() < self.start_ns:
            self.cpu.restart()
        else:
            self.cpu.take()
        if self._directory is None and self.on_write is None:
            return
        account, progress = self.account(), self.progress()
        if self.on_write is not None:
            self.on_write(account, progress)
        if self._directory is None or (self._writing is not None and not self._writing.ready()):
            return
        self._raise_failure()
        files = {f"generator-{self.worker}.json": account, f"progress-{self.worker}.json": progress}
        self._writing = self._thread.spawn(_write_files, self._directory, files)

    def write(self) -> None:
        """Both files say how things stand now. Waits for a slow disk, but not for ever.

        Raises the OSError with which the disk failed.
        """
        for attempt in range(2):
            if self._writing is not None:
                self._writing.wait(CLOSE_WITHIN_S)
            if attempt == 0:
                self.tell()
        self._raise_failure()

    def _raise_failure(self) -> None:
        error = self._writing.value if self._writing is not None and self._writing.ready() else None
        if error is not None:
            self._writing = None
            raise error

    def _tally(self, arm: str) -> _ArmTally:
        if arm not in self._arms:
            self._arms[arm] = _ArmTally()
        return self._arms[arm]


class GarbageWindow:
    """No unplanned garbage collection between `open` and `close`.

    A full collection walks every object that Locust, pyarrow and protobuf ever made and stops all greenlets for tens of
    milliseconds: it is the hidden tail of a Python load generator. So the objects alive at the start are frozen
    and the collector is switched off. Reference counts still free nearly everything; cycles (some exceptions, web
    requests) would pile up, so `sweep` looks at the young objects alone when many have gathered, which takes well
    under a millisecond, and books the time it took.
    """

    SWEEP_ABOVE = 20_000  # tracked objects made since the last sweep and still alive

    def __init__(self, log: LoadLog) -> None:
        self._log = log
        self._was_enabled: bool | None = None

    def open(self) -> None:
        """The collector is off and everything alive now is out of its sight."""
        if self._was_enabled is not None:
            return
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def sweep(self) -> None:
        """Cycles among young objects are freed, if there may be many. Call it where a pause does least harm."""
        if self._was_enabled is None or gc.get_count()[0] < self.SWEEP_ABOVE:
            return
        began = time.perf_counter()
        gc.collect(0)
        took_ms = (time.perf_counter() - began) * 1e3
        spent = self._log.gc_ms
        spent["count"] += 1
        spent["total"] = round(spent["total"] + took_ms, 3)
        spent["max"] = round(max(spent["max"], took_ms), 3)

    def close(self) -> None:
        """The collector is as it was before `open`."""
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
