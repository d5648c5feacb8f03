"""A cheap arm for very many requests: whole answers at once, and now and then a compile that stalls all of them.

Its memory does not grow: of its steps it keeps the newest alone. COMPILE_S sets the seconds between compiles.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc

from servers.clock import now_ns
from servers.rpc import inference_pb2, telemetry_pb2
from tests.fakes.arm import Arm, FirstStep, main

VARIABLE = "COMPILE_S"


class QuickArm(Arm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._every_s = float(os.environ[VARIABLE])
        self._compiled_s = time.monotonic()
        self._kept_steps: deque[telemetry_pb2.TelemetryEvent] = deque(maxlen=4096)

    def publish(self, event: telemetry_pb2.TelemetryEvent) -> None:
        if event.WhichOneof("event") != "steps":
            super().publish(event)
            return
        with self._lock:
            self._kept_steps.append(event)
            for watcher in self._watchers:
                watcher.put(event)

    def run_first_step(self, kind: str, request_id: str, length: int, seconds: float) -> FirstStep:
        with self._lock:
            self.answered += 1
            batch = self._steps
            self._steps += 1
        stall_ns, shape = 0, f"1x{length}"
        with self._device:
            start = now_ns()
            if self.config.compile.enabled and time.monotonic() - self._compiled_s >= self._every_s:
                self.under_way(start_ns=start, shape=shape, batch_id=batch)
                time.sleep(self.stall_s)
                stall_ns = now_ns() - start
                self.under_way(start_ns=start, end_ns=start + stall_ns, shape=shape, batch_id=batch)
                ids = [request_id]
                self.compile_event(start_ns=start, shape=shape, phase="serving", request_ids=ids, batch_id=batch)
                self._compiled_s = time.monotonic()
        end = now_ns()
        self.publish_step(batch, kind, start, end, length)
        return FirstStep(batch=batch, start_ns=start, end_ns=end, stall_ns=stall_ns, length=length)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        received, tokens = now_ns(), request.max_tokens
        step = self.run_first_step("prefill", request.request_id, len(request.token_ids.ids), 0.0)
        self.trail(context, step, request.request_id, received=received, end=step.end_ns, tokens=tokens)
        yield inference_pb2.GenerateChunk(
            token_ids=[self.token] * tokens,
            emit_ns=[step.end_ns] * tokens,
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        )

    def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[telemetry_pb2.TelemetryEvent]:
        yield from list(self._kept_steps)
        yield from super().Watch(request, context)


if __name__ == "__main__":
    main(QuickArm)
