"""Locust workers that record at a steady rate and send nothing to any arm: the load of a master, without servers.

    python -m benchmarks.recording_workers --master-port 5557 --workers 10 --rate 10000 --seconds 8 --keep FOLDER

All of them are in this one process, each with Locust's own WorkerRunner on a socket of its own and tailgate's own
`Worker`: what goes over the channel is what `tailgate worker` sends. Made up is what a worker drives: batches of 256
records made ahead, and for Locust's statistics and the account a sample of answers with lognormal times. The records
are the same again and again; nobody on the way looks into them.

It prints {"start_ns": …} once every worker knows its start, and at the end one JSON object: what was sent by kind of
message, how long each batch took from this disk to the acknowledgement, and what the clocks' comparison was worth. Its
clock is that of servers.clock; where that has another anchor than the master's, `--ahead-ns` says by how much it is
ahead, and so what the truth is.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import gevent
import numpy as np
from locust import User, argument_parser, task
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtests.generator.load_log import LoadLog
from loadtests.generator.locust_counts import LocustCounts
from loadtests.generator.record import SERVED_COLUMNS, RequestRecord
from loadtests.generator.record_batches import request_batch
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.generator.spool import OnWritten
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.schedule import Schedule
from loadtests.workers.clock_offsets import ClockComparison, Exchange
from loadtests.workers.locust_channel import close_channel
from loadtests.workers.messages import ASSIGN, CLOCK, KEPT, PART, READY, START
from loadtests.workers.worker import Worker
from servers.clock import now_ns

ROWS_PER_BATCH: Final = 256  # RequestRecorder's
_SAMPLED: Final = 100  # answers a second of each worker that Locust's statistics and the account hear of


class ChatUser(User):
    """Idle, as under a schedule. The name is the one that the master hands out."""

    @task
    def idle(self) -> None:
        gevent.sleep(3600.0)


def made_up(rows: int, *, tokens: int, arms: tuple[str, ...]) -> Any:
    """A batch of `rows` records of answers with `tokens` tokens, for each arm in turn."""
    at_ns, times = now_ns(), np.arange(1, tokens + 1, dtype=np.int64) * 20_000_000
    records = []
    for number in range(rows):
        arm, pair = arms[number % len(arms)], f"1-{1_000_000 + number // len(arms)}"
        served = [1_000_000 + number] * len(SERVED_COLUMNS)
        first_ns, end_ns = at_ns + 20_000_000, at_ns + 20_000_000 * tokens
        record = RequestRecord(
            f"{pair}-{arm}", pair, 1, arm, f"{arm}-0", pair, at_ns, at_ns, first_ns, end_ns, "OK", None, 700, tokens,
            tokens, times, "measure", served,
        )  # fmt: skip
        records.append(record)
    return request_batch(records)


class PacedGenerator:
    """What `Worker` drives instead of a generator: `rate` records a second from the start on, for `seconds`."""

    failure: str | None = None
    inflight = 0

    def __init__(
        self, log: LoadLog, recorder: RequestRecorder, *, options: Any, counts: LocustCounts, seed: int
    ) -> None:
        self._log, self._recorder, self._counts = log, recorder, counts
        self._arms = options.arms
        self._rate, self._seconds = options.rate / options.workers, options.seconds
        whole = made_up(ROWS_PER_BATCH, tokens=options.tokens, arms=self._arms)
        self._batch = memoryview(whole.serialize())
        self._whole = whole
        self._times_ms = np.random.default_rng(seed).lognormal(5.0, 1.0, size=16 * _SAMPLED)
        self._sampled = 0

    def load(self, share: Schedule) -> None:
        """Nothing: no request is sent."""

    def connect(self) -> None:
        """Nothing, as in `load`."""

    def run(self, start_ns: int) -> bool:
        """Records until the end, flushed as `RequestRecorder` does: whole batches, and once a second the rest."""
        self._log.start_ns = start_ns
        made, second = 0, 1
        while second <= self._seconds:
            gap_s = (start_ns + second * 1e9 - now_ns()) / 1e9
            if self._rate:
                gap_s = min(gap_s, (start_ns + (made + ROWS_PER_BATCH) / self._rate * 1e9 - now_ns()) / 1e9)
            gevent.sleep(max(0.0, gap_s))
            due = int(min(second, (now_ns() - start_ns) / 1e9) * self._rate)
            while due - made >= ROWS_PER_BATCH:
                self._recorder.file.offer(self._batch, ROWS_PER_BATCH)
                made += ROWS_PER_BATCH
            if now_ns() >= start_ns + second * 1e9:
                if due > made:
                    rest = self._whole.slice(0, due - made)
                    self._recorder.file.offer(memoryview(rest.serialize()), rest.num_rows)
                    made = due
                second += 1
                self._sample()
                self._log.started = self._log.finished = made  # all of them, of which the sample was counted
                self._log.settled_ns = now_ns()
                self._log.refresh()
        return True

    def _sample(self) -> None:
        for number in range(_SAMPLED):
            e2e_ms = float(self._times_ms[(self._sampled + number) % len(self._times_ms)])
            arm, at_ns = self._arms[number % len(self._arms)], now_ns()
            for what, value in (("e2e", e2e_ms), ("ttft", e2e_ms / 10)):
                self._counts.add("gRPC", f"Generate {what} [{arm}]", value, 16)
            record = SimpleNamespace(
                arm=arm, status="OK", scheduled_ns=at_ns - int(e2e_ms * 1e6), output_tokens=16, end_ns=at_ns,
                first_token_ns=at_ns - int(e2e_ms * 9e5),
            )  # fmt: skip
            self._log.begun(arm)
            self._log.ended(record, arm)  # type: ignore[arg-type]  # the part of it that is counted
        self._sampled += _SAMPLED
        self._counts.flush()


class PacedLoad:
    """What `Worker` takes for a `LoadProcess`."""

    def __init__(self, environment: Environment, *, options: Any, seed: int) -> None:
        self._counts = LocustCounts(environment)
        self._options, self._seed = options, seed
        self.generator: PacedGenerator | None = None
        self.log: LoadLog | None = None
        self.recorder: RequestRecorder | None = None
        self.written: Callable[[int], None] = lambda rows: None  # a batch of so many rows is on this disk

    def begin(
        self,
        config: TrialConfig,
        *,
        worker: int,
        workers: int,
        planned: int | None,
        records: str,
        on_written: OnWritten,
    ) -> PacedGenerator:
        """As LoadProcess.begin."""

        def written(at: int, length: int, rows: int) -> None:
            if rows:
                self.written(rows)
            on_written(at, length, rows)

        path = Path(records) / f"requests-{worker}.arrow"
        self.recorder = RequestRecorder(record_file(path, remedy="", on_written=written))
        self.log = LoadLog(None, worker=worker, planned=planned, arms=config.arms, recorder=self.recorder)
        self.generator = PacedGenerator(
            self.log, self.recorder, options=self._options, counts=self._counts, seed=self._seed
        )
        return self.generator

    def close(self) -> None:
        """As LoadProcess.close."""
        if self.recorder is not None and self.log is not None:
            self.recorder.close()
            self.log.write()


class WatchedWorker:
    """One worker, and when what happened to it. Times are this process's, in ns."""

    def __init__(self, options: Any, *, number: int) -> None:
        environment: Any = Environment(
            user_classes=[ChatUser],
            parsed_options=SimpleNamespace(web_base_path="", stop_timeout=0.0),  # type: ignore[arg-type]
        )
        self.runner = runner = WorkerRunner(environment, "127.0.0.1", options.master_port)
        environment.runner = runner
        self._ahead_ns = options.ahead_ns
        self.at_ns: dict[str, int] = {}  # the last time that each kind of message came or went
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.start_ns = 0
        self.parts = 0
        self.written: list[tuple[int, int]] = []  # of each batch: when it was on this disk, its rows
        self.kept_ns: list[int] = []  # of each batch: when the acknowledgement came
        self.trips: list[tuple[int, int]] = []  # of each exchange: when, how long both ways took
        self.clock_error: list[tuple[int, int]] = []  # once each exchange: how far off, how far off at most
        self._clock = ClockComparison()
        load = PacedLoad(environment, options=options, seed=number)
        load.written = lambda rows: self.written.append((now_ns(), rows))
        keep = Path(options.keep) / f"worker-{number}"
        Worker(environment, load, keep=keep)  # type: ignore[arg-type]  # the part of it that a worker asks for
        self._count_sent()
        for kind, look in (
            (ASSIGN, self._assigned), (PART, self._part), (START, self._start), (KEPT, self._kept), (CLOCK, self._trip),
        ):  # fmt: skip
            self._look_at(kind, look)

    def _look_at(self, kind: str, look: Callable[[dict[str, Any]], None]) -> None:
        listener, concurrent = self.runner.custom_messages[kind]

        def both(environment: Environment, msg: Any, **more: Any) -> None:
            look(msg.data)
            listener(environment=environment, msg=msg, **more)

        self.runner.custom_messages[kind] = (both, concurrent)  # a second listener cannot be registered

    def _count_sent(self) -> None:
        client: Any = self.runner.client
        send = client.send

        def counted(msg: Any) -> None:
            self.messages[msg.type] += 1
            self.bytes[msg.type] += len(msg.serialize())
            self.at_ns[msg.type] = now_ns()
            send(msg)

        client.send = counted

    def _assigned(self, data: dict[str, Any]) -> None:
        self.at_ns[ASSIGN] = now_ns()

    def _part(self, data: dict[str, Any]) -> None:
        self.at_ns[PART] = now_ns()
        self.parts += 1
        self.bytes["share"] += len(data["bytes"])

    def _start(self, data: dict[str, Any]) -> None:
        self.start_ns = int(data["start_ns"]) + self._ahead_ns

    def _kept(self, data: dict[str, Any]) -> None:
        self.kept_ns += [now_ns()] * (int(data["number"]) + 1 - len(self.kept_ns))

    def _trip(self, data: dict[str, Any]) -> None:
        exchange = Exchange(data["sent_ns"], data["received_ns"], data["answered_ns"], now_ns())
        self._clock.add(exchange)
        offset_ns, uncertainty_ns = self._clock.at(now_ns())
        self.trips.append((now_ns(), exchange.travel_ns))
        self.clock_error.append((abs(offset_ns + self._ahead_ns), uncertainty_ns))


def figures(workers: list[WatchedWorker], *, seconds: float) -> dict[str, Any]:
    """What all workers saw, for JSON. Times in ms. Batches and exchanges count from the start on.

    taken_per_s: records acknowledged in the window, which is all of `seconds` but the first.
    """
    batches = [
        (kept - at, at - worker.start_ns)
        for worker in workers
        for (at, _), kept in zip(worker.written, worker.kept_ns, strict=False)
    ]
    trips, clocks = [], []
    for worker in workers:
        first = bisect([at for at, _ in worker.trips], worker.start_ns)
        trips += [took for _, took in worker.trips[first:]]
        clocks += worker.clock_error[first:]
    kinds = sorted({kind for worker in workers for kind in worker.messages})
    rows = sum(rows for worker in workers for _, rows in worker.written)
    in_window = [
        rows
        for worker in workers
        for (_, rows), kept in zip(worker.written, worker.kept_ns, strict=False)
        if 1e9 <= kept - worker.start_ns < seconds * 1e9
    ]
    acknowledged = [rows for worker in workers for (_, rows), _ in zip(worker.written, worker.kept_ns, strict=False)]
    return {
        "rows": rows,
        "unacknowledged_rows": rows - sum(acknowledged),
        "taken_per_s": sum(in_window) / (seconds - 1) if seconds > 1 else None,
        "batches": sum(len(worker.written) for worker in workers),
        "ack_ms": quantiles([took for took, _ in batches]),
        "last_ack_after_s": max((at + took for took, at in batches), default=0) / 1e9,
        "round_trip_ms": quantiles(trips),
        "clock_bound_ms": quantiles([bound for _, bound in clocks]),
        "clock_error_ms": quantiles([error for error, _ in clocks]),
        "clock_beyond_bound": sum(error > bound for error, bound in clocks),
        "shares_s": _span(workers, ASSIGN, PART),
        "ready_s": _span(workers, ASSIGN, READY),
        "share_bytes": sum(worker.bytes["share"] for worker in workers),
        "messages": {kind: sum(worker.messages[kind] for worker in workers) for kind in kinds},
        "bytes": {kind: sum(worker.bytes[kind] for worker in workers) for kind in kinds},
        "bytes_per_record": record_bytes(workers),
    }


def record_bytes(workers: list[WatchedWorker]) -> float | None:
    """Bytes of the messages that carry records, by record."""
    rows = sum(rows for worker in workers for _, rows in worker.written)
    return sum(worker.bytes["tailgate_rows"] for worker in workers) / rows if rows else None


def quantiles(values_ns: list[int]) -> dict[str, float] | None:
    """p50, p99 and the largest in ms; None of nothing."""
    if not values_ns:
        return None
    p50, p99, most = np.quantile(np.array(values_ns, np.float64) / 1e6, [0.5, 0.99, 1.0])
    return {"p50": float(p50), "p99": float(p99), "max": float(most)}


def _span(workers: list[WatchedWorker], first: str, last: str) -> float | None:
    begun = [worker.at_ns[first] for worker in workers if first in worker.at_ns]
    ended = [worker.at_ns[last] for worker in workers if last in worker.at_ns]
    return (max(ended) - min(begun)) / 1e9 if begun and ended else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Locust workers that record and send nothing.")
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="records per second of all workers together")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--keep", required=True)
    parser.add_argument("--ahead-ns", type=int, default=0)
    options = parser.parse_args()
    options.arms = ("eager", "compiled")
    logging.basicConfig(level=logging.WARNING)
    # Locust makes its parser anew for each option of the master's: a quarter of a second for each worker, of one core.
    argument_parser.default_args_dict = functools.cache(argument_parser.default_args_dict)
    close_channel()
    made = [gevent.spawn(WatchedWorker, options, number=number) for number in range(options.workers)]
    workers = [greenlet.get() for greenlet in made]
    while not all(worker.start_ns for worker in workers):
        gevent.sleep(0.05)
    print(json.dumps({"start_ns": workers[0].start_ns - options.ahead_ns}), flush=True)
    gevent.joinall([greenlet for worker in workers for greenlet in worker.runner.greenlet.greenlets])
    print(json.dumps(figures(workers, seconds=options.seconds)), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
