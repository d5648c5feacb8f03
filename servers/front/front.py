"""What the gRPC services of a replica share: requests in flight, the engine's state, and the telemetry log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from tailgate.servers.clock import now_ns
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.messages import BlindSpots, Cancel, Finished, Report, StepOutput, Submit
from tailgate.servers.front.metrics import FrontMetrics
from tailgate.servers.front.requests import Encode, RefusedError
from tailgate.servers.rpc.telemetry_pb2 import (
    CompileEvent,
    CompileUnderWay,
    MemoryReading,
    Progress,
    SnapshotResponse,
    StepRecord,
)

log = logging.getLogger("tailgate.front")

# What Telemetry.Watch streams.
TelemetryEvent = CompileEvent | CompileUnderWay | StepRecord | Progress | MemoryReading

# How many events of each kind Telemetry.Watch replays to a late subscriber.
_RETAINED = {
    Progress: 1000,
    CompileEvent: 100_000,
    CompileUnderWay: 1,
    StepRecord: 200_000,
    MemoryReading: 10_000,
}


# The events of one telemetry subscriber: those retained, then new ones, and None at the end.
Watcher = asyncio.Queue[TelemetryEvent | None]


class Answer:
    """The growing answer to a request: tokens as they come, then how it ended."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.emit_ns: list[int] = []
        self.finished: Finished | None = None
        self.output_tokens = 0
        self._changed = asyncio.Event()

    def add(self, token_id: int, emit_ns: int) -> None:
        self.token_ids.append(token_id)
        self.emit_ns.append(emit_ns)
        self.output_tokens += 1
        self._changed.set()

    def finish(self, finished: Finished) -> None:
        self.finished = finished
        self._changed.set()

    async def next(self) -> tuple[list[int], list[int]]:
        """Wait for tokens and return all since the last call with their times: a slow stream gets larger chunks."""
        await self._changed.wait()
        self._changed.clear()
        token_ids, emit_ns = self.token_ids, self.emit_ns
        self.token_ids, self.emit_ns = [], []
        return token_ids, emit_ns

    async def ended(self) -> Finished:
        while self.finished is None:
            await self.next()
        return self.finished


class Front:
    def __init__(
        self,
        arm: ArmConfig,
        replica: str,
        send: Callable[[Submit | Cancel], None],
        encode: Encode,
        metrics: FrontMetrics,
        number: int = 0,
    ) -> None:
        self.arm = arm
        self.replica = replica
        self.encode = encode
        self.metrics = metrics
        self.warm: SnapshotResponse | None = None  # what the engine reports; `ready` once it has answered a request
        self.ready: SnapshotResponse | None = None
        self.draining = False
        self.failure = ""
        self.blind_spots: tuple[str, ...] = ()
        frontends, total = arm.engine.frontends, arm.engine.slots + arm.engine.max_queue
        self.reports = {other: Report(number=other, port=0) for other in range(1, frontends) if not number}
        self._over = f" over {frontends} frontends" if frontends > 1 else ""
        self._limit = (total + frontends - 1 - number) // frontends  # the shares of all make the total
        metrics.in_flight.set_function(lambda: self.in_flight + sum(self.others("in_flight")))
        self._watchers: set[Watcher] = set()
        self._logs: dict[type, deque[TelemetryEvent]] = {kind: deque(maxlen=most) for kind, most in _RETAINED.items()}
        self._send = send
        self._answers: dict[str, Answer] = {}
        # Clients may use a name again, also at once: each request has an id of its own. Its remainder names the
        # frontend.
        self._ids = itertools.count(number, frontends)

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def others(self, what: str) -> list[Any]:
        """Return what the other frontends reported last; none at one that is not the first."""
        return [getattr(report, what) for report in self.reports.values()]

    def admit(self, submit: Submit) -> Answer:
        """Pass a checked request on to the engine. Raises RefusedError when it cannot be taken now."""
        if self.draining:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, f"{self.replica} is draining: send to another replica")
        if self.failure:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, f"{self.replica} has failed: {self.failure}")
        if self.ready is None:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, f"{self.replica} is not warm yet: wait for health SERVING")
        if self.in_flight >= self._limit:
            # Counted here and not in the engine, so that the answer comes at once even while a compile runs there.
            raise RefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.in_flight} requests are in flight; the limit is {self._limit} (slots + max_queue{self._over}): "
                "send slower or raise max_queue",
            )
        return self.take(submit)

    def take(self, submit: Submit) -> Answer:
        """Pass a request on to the engine, under an id of its own, without checks or counts."""
        submit.request_id = f"{next(self._ids)}"
        answer = self._answers[submit.request_id] = Answer()
        self._send(submit)
        return answer

    def abandon(self, request_id: str) -> None:
        """Free the slot of a request whose client needs no more, if it has not ended."""
        if self._answers.pop(request_id, None) is not None:
            self._send(Cancel(request_id=request_id))

    def receive(self, messages: Iterable[object]) -> None:
        """Process the engine's messages in order. Log one that cannot be processed and go on."""
        for message in messages:
            try:
                self._receive(message)
            except Exception:
                log.exception("a message of the engine: %s", type(message).__name__)

    def _receive(self, message: object) -> None:
        match message:
            case StepOutput():
                self._take_output(message)
            case CompileUnderWay() | CompileEvent():
                if self._is_probing:
                    message.phase = "warmup"
                if isinstance(message, CompileEvent):
                    self.metrics.count_compile(message)
                self.publish(message)
            case BlindSpots():
                self.blind_spots = message.texts
            case MemoryReading():
                self.metrics.show_memory(message)
                self.publish(message)
            case Progress():
                if message.stage == "failed":
                    self.failure = message.detail
                self.publish(message)
            case SnapshotResponse():
                self.warm = message
            case Report():
                for status, count in (message.counts - self.reports[message.number].counts).items():
                    self.metrics.count(status, count)
                self.reports[message.number] = message

    @property
    def _is_probing(self) -> bool:
        """Whether the engine is warm and has not answered yet: what happens now is part of the warm-up."""
        return self.warm is not None and self.ready is None

    def open(self) -> None:
        """Serve from now on: the engine is warm and has answered."""
        assert self.warm is not None
        self.ready = self.warm
        self.publish(Progress(at_ns=now_ns(), stage="serving", detail=f"{self.ready.device} {self.ready.dtype}"))

    def _take_output(self, output: StepOutput) -> None:
        if not self._is_probing:
            self.metrics.count("", len(output.tokens))
        for request_id, token_id in output.tokens:
            answer = self._answers.get(request_id)
            if answer is not None:
                answer.add(token_id, output.emit_ns)
        for finished in output.finished:
            answer = self._answers.pop(finished.request_id, None)
            if answer is not None:
                answer.finish(finished)
        if output.step is not None and not self._is_probing:
            fell_back = self.arm.compile.enabled and not output.step.compiled
            self.metrics.steps(kind=output.step.kind, fell_back="yes" if fell_back else "no").inc()
            self.publish(output.step)

    def fail(self, message: str) -> None:
        """End every request in flight with UNAVAILABLE: the engine process has died."""
        self.failure = self.failure or message
        self._logs[CompileUnderWay].clear()
        self.publish(Progress(at_ns=now_ns(), stage="failed", detail=self.failure))
        for request_id, answer in self._answers.items():
            answer.finish(Finished(request_id=request_id, status="UNAVAILABLE", message=self.failure))
        self._answers.clear()

    def publish(self, event: TelemetryEvent) -> None:
        """Retain the event and queue it for each watcher."""
        self._logs[type(event)].append(event)
        for watcher in self._watchers:
            watcher.put_nowait(event)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Queue everything retained and everything to come."""
        watcher: Watcher = asyncio.Queue()
        for event in itertools.chain.from_iterable(self._logs.values()):
            watcher.put_nowait(event)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End every telemetry stream once it has delivered what it holds."""
        while self._watchers:
            self._watchers.pop().put_nowait(None)
