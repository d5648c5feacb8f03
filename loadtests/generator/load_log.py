"""A load process's account: what it did, how late it was, what it cost."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.generator.clock_offsets import ClockComparison
from tailgate.loadtests.generator.histogram import ArmTally, Histogram
from tailgate.loadtests.generator.record import RequestRecord
from tailgate.loadtests.generator.recorder import CLOSE_WITHIN_S, RequestRecorder, Spool
from tailgate.servers.clock import now_ns


class LoadLog:
    """What one load process did and how late it was itself, as generator-<worker>.json, which is rewritten each second.

    It holds the counts, the schedule lag (actual minus scheduled start), the loop lag (how late a waiting greenlet ran,
    the error of every token time), CPU (of the process, and the seconds in which the thread that keeps the schedule
    used up its core), time spent collecting garbage, how many records are in the file or were dropped, and the instant
    before which all that was due has ended and is in the file. "arms" has counts since the start and live quantiles
    over the last 10 s, "histograms" all answers. Counts are of requests as sent: a mirrored request is one for each
    arm.

    `recorder` gets every record. `on_write` is given the content each time. Instants are on the master's clock, with
    which `clock` compares.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        worker: int,
        arms: Iterable[str] = (),
        recorder: RequestRecorder | None = None,
        clock: ClockComparison | None = None,
    ) -> None:
        self._clock = clock
        self._path = None if directory is None else directory / f"generator-{worker}.json"
        self._recorder = recorder
        self.worker = worker
        self.planned: int | None = None  # as much as was started, where there is no schedule
        self.started = 0
        self.start_ns: int | None = None  # null in the files until the start is agreed on
        self.settled_ns: int | None = None  # all that was due before has ended and is on disk
        self.lag = Histogram()
        self.loop_lag = Histogram()
        self.cpu = BusySeconds()
        self.garbage = GarbageWindow()
        self.error: str | None = None
        self.complete = False
        self.on_write: Callable[[dict[str, Any]], None] | None = None
        self._arms = defaultdict(ArmTally, {arm: ArmTally() for arm in arms})
        self._cpu_s = time.process_time()
        self._file = Spool(self._replace, most_waiting_bytes=1)  # one account at a time; those that come meanwhile drop

    def begun(self, arm: str | None) -> None:
        """Count a request in flight to `arm` (None: not known yet)."""
        self.started += 1
        if arm is not None:
            self._arms[arm].inflight += 1

    def ended(self, record: RequestRecord, pinned: str | None) -> None:
        """Count and record a request that has ended; `pinned` is the arm given to `begun`.

        Raises the OSError with which the disk failed.
        """
        if pinned is not None:
            self._arms[pinned].inflight -= 1
        self._arms[record.arm or "*"].add(record)
        if self._recorder is not None:
            self._recorder.append(record)

    @property
    def waiting_bytes(self) -> int:
        return 0 if self._recorder is None else self._recorder.file.waiting_bytes

    def account(self) -> dict[str, Any]:
        file = self._recorder.file if self._recorder is not None else None
        offset_ns, at_ns = 0 if self._clock is None else self._clock.best.offset_ns, now_ns()
        return {
            "worker": self.worker,
            "planned": self.started if self.planned is None else self.planned,
            "started": self.started,
            "finished": sum(tally.finished for tally in self._arms.values()),
            "failed": sum(tally.failed for tally in self._arms.values()),
            "records": {
                "written": file.rows if file else 0,
                "dropped": file.dropped_rows if file else 0,
                "waiting_bytes": self.waiting_bytes,
            },
            "lag_ms": self.lag.summary(),
            "loop_lag_ms": self.loop_lag.summary(),
            "gc_ms": self.garbage.spent_ms,
            "cpu_s": round(time.process_time() - self._cpu_s, 3),
            "cpu": self.cpu.summary(),
            "t_s": 0.0 if self.start_ns is None else round(max(0, at_ns - self.start_ns) / 1e9, 3),
            "start_ns": None if self.start_ns is None else self.start_ns + offset_ns,
            "settled_ns": None if self.settled_ns is None else self.settled_ns + offset_ns,
            "clock": None if self._clock is None else self._clock.account(),
            "error": self.error,
            "complete": self.complete,
            "arms": {arm: tally.summary(at_ns) for arm, tally in self._arms.items()},
            "histograms": {arm: tally.histograms() for arm, tally in self._arms.items()},
        }

    def refresh(self) -> None:
        """Flush the records, and have the file say soon how things stand now; it stays older while the disk is slow.
        Never waits.

        Raises the OSError with which the disk failed before.
        """
        if self.start_ns is None or now_ns() < self.start_ns:
            self.cpu = BusySeconds()  # there was no schedule to keep
        else:
            self.cpu.take()
        try:
            if self._recorder is not None:
                self._recorder.flush()
        finally:
            if self._path is not None or self.on_write is not None:
                account = self.account()
                if self.on_write is not None:
                    self.on_write(account)
                self._file.offer(account, 1)
                error, self._file.error = self._file.error, None
                if error is not None:
                    raise error

    def write(self) -> None:
        """Flush the records, and update the file. Waits for a slow disk, but not without limit.

        Raises the OSError with which the disk failed.
        """
        self._file.settle(CLOSE_WITHIN_S)
        try:
            self.refresh()
        finally:
            self._file.settle(CLOSE_WITHIN_S)
        if self._file.error is not None:
            raise self._file.error

    def _replace(self, account: dict[str, Any]) -> None:
        if self._path is not None:
            write_document(self._path, account)


# --- What a load process costs itself ---------------------------------------------------------------------------------


class BusySeconds:
    """For how long the thread that makes it used up its core, second by second."""

    BUSY = 0.95  # above this a core is as good as used up
    _SHORTEST_S = 0.5

    def __init__(self) -> None:
        self._thread_s, self._wall_s = time.thread_time(), time.perf_counter()
        self._busy_s = self._measured_s = 0.0

    def take(self) -> None:
        """Count the stretch since the last call, unless it is shorter than half a second."""
        thread_s, wall_s = time.thread_time(), time.perf_counter()
        used_s, took_s = thread_s - self._thread_s, wall_s - self._wall_s
        if took_s < self._SHORTEST_S:
            return
        self._thread_s, self._wall_s = thread_s, wall_s
        self._measured_s += took_s
        if used_s >= self.BUSY * took_s:
            self._busy_s += took_s

    def summary(self) -> dict[str, float]:
        """Return the seconds "busy_s" of those measured, "of_s"."""
        return {"busy_s": round(self._busy_s, 4), "of_s": round(self._measured_s, 4)}


class GarbageWindow:
    """No unplanned garbage collection between `open` and `close`.

    A full collection walks every object that Locust, pyarrow and protobuf ever made and stops all greenlets for tens of
    milliseconds: it is the hidden tail of a Python load generator. So the objects alive at the start are frozen
    and the collector is switched off. Reference counts still free nearly everything; cycles (some exceptions, web
    requests) would pile up, so `sweep` looks at the young objects alone when many have gathered, which takes well
    under a millisecond, and books the time it took.
    """

    SWEEP_ABOVE = 20_000  # tracked objects made since the last sweep and still alive

    def __init__(self) -> None:
        self._is_open = False
        self.spent_ms = 0.0

    def open(self) -> None:
        """Turn the collector off, and let it never look at what is alive now."""
        self._is_open = True
        gc.collect()
        gc.freeze()
        gc.disable()

    def sweep(self) -> None:
        """Free cycles among young objects, if there may be many. Call it where a pause does least harm."""
        if not self._is_open or gc.get_count()[0] < self.SWEEP_ABOVE:
            return
        began = time.perf_counter()
        gc.collect(0)
        self.spent_ms = round(self.spent_ms + (time.perf_counter() - began) * 1e3, 3)

    def close(self) -> None:
        if self._is_open:
            gc.unfreeze()
            gc.enable()
            self._is_open = False
