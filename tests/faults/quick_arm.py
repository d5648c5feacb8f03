"""A cheap arm for very many requests: whole answers at once, and now and then a compile that stalls all of them.

Its memory does not grow: of its steps it keeps the newest alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from servers.clock import now_ns
from servers.config import ArmConfig
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tests.fakes.arm import SERVICE, Arm

STEPS_KEPT = 4096
_TOGETHER = 32  # steps in one event


class QuickArm(Arm):
    """An arm that compiles does so every `compile_s`."""

    def __init__(self, config: ArmConfig, replica: str, *, stall_s: float, compile_s: float) -> None:
        super().__init__(config, replica, stall_s=stall_s)
        self._compile_s = compile_s if config.compile.enabled else 0.0
        self._compiled_s = time.monotonic()
        self._kept_steps: deque[telemetry_pb2.TelemetryEvent] = deque(maxlen=STEPS_KEPT // _TOGETHER)
        self._new_steps: list[telemetry_pb2.StepRecord] = []

    def _compile(self, request_id: str, length: int) -> int:
        """Return how long a compile stalled everything, in ns."""
        if not self._compile_s or time.monotonic() - self._compiled_s < self._compile_s:
            return 0
        start, shape = now_ns(), f"1x{length}"
        self.under_way(start_ns=start, shape=shape, batch_id=self._steps)
        time.sleep(self.stall_s)
        stall_ns = now_ns() - start
        self.under_way(start_ns=start, end_ns=start + stall_ns, shape=shape, batch_id=self._steps)
        self.compile_event(start_ns=start, shape=shape, phase="serving", request_ids=[request_id], batch_id=self._steps)
        self._compiled_s = time.monotonic()
        return stall_ns

    def _step(self, start_ns: int, end_ns: int, length: int) -> None:
        self._new_steps.append(
            telemetry_pb2.StepRecord(
                step_id=self._steps,
                kind="prefill",
                start_ns=start_ns,
                end_ns=end_ns,
                batch=1,
                padded_batch=1,
                tokens=length,
                padded_tokens=length,
                compiled=self.config.compile.enabled,
            )
        )
        self._steps += 1
        if len(self._new_steps) >= _TOGETHER:
            event = telemetry_pb2.TelemetryEvent(steps=telemetry_pb2.StepRecords(records=self._new_steps))
            self._new_steps = []
            with self._lock:
                self._kept_steps.append(event)
                for watcher in self._watchers:
                    watcher.put(event)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        received, length, tokens = now_ns(), len(request.token_ids.ids), request.max_tokens
        self.answered += 1
        step, stall_ns = self._steps, self._compile(request.request_id, length)
        end = now_ns()
        self._step(received, end, length)
        values = {
            "arm": self.config.name,
            "replica": self.replica,
            "queue-ns": 0,
            "prefill-ns": end - received - stall_ns,
            "decode-ns": 0,
            "compile-stall-ns": stall_ns,
            "batch-id": step,
            "batch-size": 1,
            "padded-batch": 1,
            "padded-length": length,
            "prompt-tokens": length,
            "output-tokens": tokens,
            "recv-ns": received,
            "end-ns": end,
        }
        context.set_trailing_metadata(tuple((f"tailgate-{key}", str(value)) for key, value in values.items()))
        yield inference_pb2.GenerateChunk(
            token_ids=[self.token] * tokens,
            emit_ns=[end] * tokens,
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        )

    def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[telemetry_pb2.TelemetryEvent]:
        yield from list(self._kept_steps)
        yield from super().Watch(request, context)


async def serve(arm: QuickArm, port: int) -> None:
    server = grpc.aio.server(migration_thread_pool=futures.ThreadPoolExecutor(max_workers=8))
    inference_pb2_grpc.add_InferenceServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    checks = health.HealthServicer()
    for name in ("", SERVICE):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(json.dumps({"port": bound, "pid": os.getpid()}), flush=True)
    arm.progress("serving")
    await stopped.wait()
    arm.close()
    await server.stop(1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--stall-s", type=float, default=0.1)
    parser.add_argument("--compile-s", type=float, default=10.0)
    options, _ = parser.parse_known_args(arguments)
    config = ArmConfig.from_dict(json.loads(options.config.read_text(encoding="utf-8")))
    asyncio.run(
        serve(QuickArm(config, options.replica, stall_s=options.stall_s, compile_s=options.compile_s), options.port)
    )


if __name__ == "__main__":
    main()
