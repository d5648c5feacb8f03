"""Request records that survive a kill, and a load process's account of itself.

Rows wait in memory for at most a second or a few hundred rows, then go out as one Arrow record batch. The kernel has
them from then on: `kill -9` loses what was not yet flushed, and a reader accepts the torn tail. Nothing here waits
for a disk to sync, which would stop every greenlet.
"""

from __future__ import annotations

import gc
import json
import math
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.records import REQUESTS
from servers.clock import now_ns
from servers.config import ConfigError


class RequestRecord(NamedTuple):
    """One row of `analysis.records.REQUESTS`, fields in its order. A plain tuple: rows are made inside the window."""

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


_TOKENS = RequestRecord._fields.index("token_ns")


class RequestRecorder:
    """Rows appended to one new Arrow IPC stream. `append` is cheap; `flush` costs about 1 ms for a full batch."""

    def __init__(self, path: Path, *, rows_per_batch: int = 256) -> None:
        if path.exists():
            raise ConfigError(f'"{path}" exists already: give --records an empty directory')
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")  # unbuffered: what is written is with the kernel
        except OSError as error:
            raise ConfigError(
                f'"{path}" cannot be written ({error.strerror or error}): give another directory'
            ) from None
        self._writer = pa.ipc.new_stream(self._sink, REQUESTS)
        # An empty batch carries the schema with it: a file of a process that died early is empty, not broken.
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=REQUESTS))
        self._rows: list[RequestRecord] = []
        self._rows_per_batch = rows_per_batch
        self.written = 0
        self.closed = False

    def append(self, record: RequestRecord) -> None:
        """The row will be in the file after the next flush, which comes at once when a batch is full."""
        self._rows.append(record)
        if len(self._rows) >= self._rows_per_batch:
            self.flush()

    def flush(self) -> None:
        """Every row appended so far is in the file."""
        if not self._rows or self.closed:
            return
        rows, self._rows = self._rows, []
        self._writer.write_batch(request_batch(rows))
        self.written += len(rows)

    def close(self) -> None:
        """Every row is in the file and the stream has its end mark. A second call does nothing."""
        if self.closed:
            return
        self.flush()
        self._writer.close()
        self._sink.close()
        self.closed = True


def request_batch(rows: list[RequestRecord]) -> pa.RecordBatch:
    """`rows` as one record batch with the schema REQUESTS."""
    columns: list[Any] = []
    for position, (field, values) in enumerate(zip(REQUESTS, zip(*rows, strict=True), strict=True)):
        if position == _TOKENS:
            # All tokens of all rows as one flat array: a list of Python lists would cost more than all the rest.
            ends = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum([len(tokens) for tokens in values], out=ends[1:])
            columns.append(pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values), pa.int64())))
        else:
            columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=REQUESTS)


def write_json(path: Path, content: object) -> None:
    """`path` holds `content` as JSON; a reader sees the old content or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    partial.replace(path)


class LagHistogram:
    """Lags in bins 1 % wide from a microsecond up: bounded memory for any run. A quantile is its bin's upper edge."""

    _BINS = 2400  # 1 us * 1.01^2400 is about 6 hours

    def __init__(self) -> None:
        self._counts = [0] * self._BINS
        self._total = 0
        self.max_ms = 0.0

    def add(self, lag_ns: int) -> None:
        """One more lag; a negative one counts as 0."""
        micros = lag_ns / 1e3
        position = 0 if micros <= 1.0 else min(self._BINS - 1, int(math.log(micros) * 100.5) + 1)
        self._counts[position] += 1
        self._total += 1
        self.max_ms = max(self.max_ms, micros / 1e3)

    def quantile_ms(self, q: float) -> float:
        """The lag (ms) that a share `q` does not exceed, at most 1 % too high; 0.0 when there is none."""
        rank, seen = q * self._total, 0
        for position, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return min(self.max_ms, math.exp(position / 100.5) / 1e3)
        return 0.0

    def summary(self) -> dict[str, float]:
        """{"p50", "p99", "max"} in ms."""
        quantiles = {"p50": self.quantile_ms(0.50), "p99": self.quantile_ms(0.99), "max": self.max_ms}
        return {key: round(value, 4) for key, value in quantiles.items()}


class _ArmTally:
    """Counts of one arm since the start, and exact quantiles of its newest answers (16,384 to 32,768 of them)."""

    _NEWEST = 16_384

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.inflight = 0
        self._end_ns = array("q")
        self._ttft_ms = array("d")  # nan: no token came
        self._e2e_ms = array("d")

    def add(self, record: RequestRecord) -> None:
        self.finished += 1
        if not record.ok:
            self.failed += 1
            return
        ttft = record.ttft_ms
        self._end_ns.append(record.end_ns)
        self._ttft_ms.append(math.nan if ttft is None else ttft)
        self._e2e_ms.append(record.e2e_ms)
        if len(self._end_ns) > 2 * self._NEWEST:
            for values in (self._end_ns, self._ttft_ms, self._e2e_ms):
                del values[: self._NEWEST]

    def summary(self, since_ns: int) -> dict[str, Any]:
        """Counts, and quantiles of the answers that ended at `since_ns` or later (null when there are none)."""
        out: dict[str, Any] = {"n": self.finished, "failed": self.failed, "inflight": self.inflight}
        # Copies: an array whose buffer is shared cannot grow.
        chosen = np.array(self._end_ns) >= since_ns
        for name, values in (("ttft", np.array(self._ttft_ms)[chosen]), ("e2e", np.array(self._e2e_ms)[chosen])):
            known = values[~np.isnan(values)]
            p50, p99 = np.percentile(known, (50, 99)) if len(known) else (None, None)
            out[f"{name}_p50_ms"] = None if p50 is None else round(float(p50), 3)
            out[f"{name}_p99_ms"] = None if p99 is None else round(float(p99), 3)
        return out


class LoadLog:
    """What one load process did and how late it was itself, as two small JSON files rewritten each second.

    generator-<worker>.json holds the counts, the schedule lag (actual minus scheduled start; starts held back by a
    concurrency cap do not count), the loop lag (how late a waiting greenlet ran, the error of every token time), CPU
    and time spent collecting garbage. progress-<worker>.json holds live quantiles: "arms" over the last 10 s,
    "overall" since the start, both with counts since the start. Counts are of requests as sent: a mirrored request is
    one for each arm.
    """

    RECENT_NS = 10_000_000_000

    def __init__(self, directory: Path | None, *, worker: int, planned: int | None, arms: Iterable[str] = ()) -> None:
        self._directory = directory
        self.worker = worker
        self.planned = planned
        self.started = 0
        self.finished = 0
        self.failed = 0
        self.start_ns: int | None = None  # null in the files until the start is agreed on
        self.lag = LagHistogram()
        self.loop_lag = LagHistogram()
        self.gc_ms = {"count": 0, "total": 0.0, "max": 0.0}
        self.error: str | None = None
        self.complete = False
        self._arms = {arm: _ArmTally() for arm in arms}
        self._cpu_s = time.process_time()
        self._wall_ns = now_ns()

    def begun(self, arm: str | None) -> None:
        """One more request is on its way to `arm` (None: not known yet)."""
        self.started += 1
        if arm is not None:
            self._tally(arm).inflight += 1

    def ended(self, record: RequestRecord, pinned: str | None) -> None:
        """One request has ended; `pinned` is the arm that `begun` was told."""
        self.finished += 1
        if not record.ok:
            self.failed += 1
        if pinned is not None:
            self._tally(pinned).inflight -= 1
        self._tally(record.arm or "*").add(record)

    def write(self) -> None:
        """Both files say how things stand now."""
        if self._directory is None:
            return
        at_ns = now_ns()
        write_json(
            self._directory / f"generator-{self.worker}.json",
            {
                "worker": self.worker,
                "planned": self.started if self.planned is None else self.planned,
                "started": self.started,
                "finished": self.finished,
                "failed": self.failed,
                "lag_ms": self.lag.summary(),
                "loop_lag_ms": self.loop_lag.summary(),
                "gc_ms": self.gc_ms,
                "cpu_s": round(time.process_time() - self._cpu_s, 3),
                "wall_s": round((at_ns - self._wall_ns) / 1e9, 3),
                "start_ns": self.start_ns,
                "error": self.error,
                "complete": self.complete,
            },
        )
        write_json(
            self._directory / f"progress-{self.worker}.json",
            {
                "worker": self.worker,
                "planned": self.planned,
                "started": self.started,
                "finished": self.finished,
                "failed": self.failed,
                "t_s": 0.0 if self.start_ns is None else round(max(0, at_ns - self.start_ns) / 1e9, 3),
                "arms": {arm: tally.summary(at_ns - self.RECENT_NS) for arm, tally in self._arms.items()},
                "overall": {arm: tally.summary(0) for arm, tally in self._arms.items()},
            },
        )

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
