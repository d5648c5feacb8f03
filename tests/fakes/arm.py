"""An arm without a model: real gRPC, real telemetry, paced tokens and scripted compile events.

Takes the command line of `python -m servers.front.serve`, and a few flags of its own that script misfortune. The
variable PLANTED makes it slower or fatter than its flags say, as benchmarks/planted_arm.py does with a real one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from servers.clock import now_ns
from servers.config import ArmConfig
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from servers.security import is_bearer

TOKEN_S = 0.004
SERVICE = "tailgate.v1.Inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """Which step, when, and how much of it a compile took."""

    batch: int
    start_ns: int
    end_ns: int
    stall_ns: int
    length: int


class Arm(inference_pb2_grpc.InferenceServicer, telemetry_pb2_grpc.TelemetryServicer):
    """Answers with paced tokens; a compiled-naive arm stalls on prompt lengths it has not seen."""

    def __init__(
        self,
        config: ArmConfig,
        replica: str,
        *,
        stall_s: float,
        dtype: str = "",
        token: int = 5,
        dies: bool = False,
        token_s: float = TOKEN_S,
        prefill_s: float | None = None,
        memory_bytes: int = 0,
        answers: Path | None = None,
    ) -> None:
        # Appended to in one write a line: what a kill leaves is whole.
        self._answers = None if answers is None else answers.open("ab", buffering=0)
        self.prefill_s = token_s if prefill_s is None else prefill_s
        self.token_s = token_s
        self.memory_bytes = memory_bytes
        self.dies = dies
        self.config = config
        self.dtype = dtype or config.model.dtype
        self.replica = replica
        self.token = token
        self.stall_s = stall_s
        self.answered = 0
        self._retained: list[telemetry_pb2.TelemetryEvent] = []
        self._watchers: list[queue.SimpleQueue[telemetry_pb2.TelemetryEvent | None]] = []
        self._lock = threading.Lock()
        self._device = threading.Lock()
        self._seen: set[int] = set()
        self._steps = 0
        self._compiles = 0
        self._closed = False

    def publish(self, event: telemetry_pb2.TelemetryEvent) -> None:
        with self._lock:
            self._retained.append(event)
            for watcher in self._watchers:
                watcher.put(event)

    def progress(self, stage: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        self.publish(
            telemetry_pb2.TelemetryEvent(
                progress=telemetry_pb2.Progress(at_ns=now_ns(), stage=stage, done=done, total=total, detail=detail)
            )
        )

    def under_way(self, *, start_ns: int, end_ns: int = 0, shape: str, batch_id: int) -> None:
        """The compile is under way, or is over at `end_ns`."""
        self.publish(
            telemetry_pb2.TelemetryEvent(
                under_way=telemetry_pb2.CompileUnderWay(
                    kind="compile",
                    start_ns=start_ns,
                    end_ns=end_ns,
                    compile_id=f"0/{self._compiles + 1}",
                    shape=shape,
                    batch_id=batch_id,
                    phase="serving",
                )
            )
        )

    def compile_event(self, *, start_ns: int, shape: str, phase: str, request_ids: list[str], batch_id: int) -> None:
        self._compiles += 1
        recompile = phase == "serving"
        self.publish(
            telemetry_pb2.TelemetryEvent(
                compile=telemetry_pb2.CompileEvent(
                    event_id=f"{self.replica}-{self._compiles}",
                    kind="recompile" if recompile else "compile",
                    start_ns=start_ns,
                    end_ns=now_ns(),
                    compile_id=f"0/{self._compiles}",
                    frame="forward",
                    reason=f"tensor 'input_ids' size mismatch at index 1: {shape}" if recompile else "first call",
                    shape=shape,
                    cache="miss",
                    batch_id=batch_id,
                    request_ids=request_ids,
                    phase=phase,
                )
            )
        )

    def publish_step(self, step_id: int, kind: str, start_ns: int, end_ns: int, length: int) -> None:
        """A step of one row of `length` tokens, without padding."""
        step = telemetry_pb2.StepRecord(
            step_id=step_id,
            kind=kind,
            start_ns=start_ns,
            end_ns=end_ns,
            batch=1,
            padded_batch=1,
            tokens=length,
            padded_tokens=length,
            compiled=self.config.compile.enabled,
        )
        self.publish(telemetry_pb2.TelemetryEvent(steps=telemetry_pb2.StepRecords(records=[step])))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for watcher in self._watchers:
                watcher.put(None)

    def run_first_step(self, kind: str, request_id: str, length: int, seconds: float) -> FirstStep:
        """A request's first step ran alone on the device, after a compile where the arm meets the size anew."""
        with self._lock:
            self.answered += 1
            batch = self._steps
            self._steps += 1
        stall_ns = 0
        with self._device:
            start = now_ns()
            if self.config.preset == "compiled-naive" and length // 32 not in self._seen:
                self._seen.add(length // 32)
                shape = f"1x{length}"
                self.under_way(start_ns=start, shape=shape, batch_id=batch)
                time.sleep(self.stall_s)
                stall_ns = now_ns() - start
                self.under_way(start_ns=start, end_ns=start + stall_ns, shape=shape, batch_id=batch)
                self.compile_event(
                    start_ns=start, shape=shape, phase="serving", request_ids=[request_id], batch_id=batch
                )
            time.sleep(seconds)
            end = now_ns()
        self.publish_step(batch, kind, start, end, length)
        return FirstStep(batch=batch, start_ns=start, end_ns=end, stall_ns=stall_ns, length=length)

    def trail(
        self,
        context: grpc.ServicerContext,
        step: FirstStep,
        request_id: str,
        *,
        received: int,
        end: int,
        tokens: int,
    ) -> None:
        """The call ends with what happened to it."""
        if self._answers is not None:
            self._answers.write(f"{request_id} {self.config.name} {end}\n".encode())
        values: dict[str, Any] = {
            "arm": self.config.name,
            "replica": self.replica,
            "queue-ns": step.start_ns - received,
            "prefill-ns": step.end_ns - step.start_ns - step.stall_ns,
            "decode-ns": end - step.end_ns,
            "compile-stall-ns": step.stall_ns,
            "batch-id": step.batch,
            "batch-size": 1,
            "padded-batch": 1,
            "padded-length": step.length,
            "prompt-tokens": step.length,
            "output-tokens": tokens,
            "recv-ns": received,
            "end-ns": end,
        }
        context.set_trailing_metadata(tuple((f"tailgate-{key}", str(value)) for key, value in values.items()))

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        received = now_ns()
        step = self.run_first_step("prefill", request.request_id, len(request.token_ids.ids), self.prefill_s)
        for token in range(request.max_tokens):
            last = token == request.max_tokens - 1
            yield inference_pb2.GenerateChunk(
                token_ids=[self.token],
                emit_ns=[now_ns()],
                finish_reason=inference_pb2.FINISH_REASON_LENGTH if last else inference_pb2.FINISH_REASON_UNSPECIFIED,
            )
            if not last:
                time.sleep(self.token_s)
        self.trail(context, step, request.request_id, received=received, end=now_ns(), tokens=request.max_tokens)

    def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        """One text a step. The vector follows from the text, and turns with `token`, as answers do."""
        received = now_ns()
        length = len(request.token_ids.ids) or len(request.text)
        step = self.run_first_step("encode", request.request_id, length, self.token_s)
        self.trail(context, step, request.request_id, received=received, end=step.end_ns, tokens=0)
        angle = sum(request.token_ids.ids) % 7 + self.token
        return inference_pb2.EmbedResponse(values=[math.cos(angle), math.sin(angle)], tokens=length)

    def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[telemetry_pb2.TelemetryEvent]:
        mine: queue.SimpleQueue[telemetry_pb2.TelemetryEvent | None] = queue.SimpleQueue()
        with self._lock:
            for event in self._retained:
                mine.put(event)
            self._watchers.append(mine)
            if self._closed:
                mine.put(None)
        context.add_callback(lambda: mine.put(None))
        wanted = {
            "compile": request.compile_events,
            "under_way": request.under_way,
            "steps": request.steps,
            "progress": request.progress,
        }
        while (event := mine.get()) is not None:
            if wanted[event.WhichOneof("event") or "progress"]:
                yield event

    def Snapshot(  # noqa: N802
        self, request: telemetry_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> telemetry_pb2.SnapshotResponse:
        if self.dies and self.answered:
            os._exit(9)
        return telemetry_pb2.SnapshotResponse(
            arm=self.config.name,
            replica=self.replica,
            config_json=json.dumps(self.config.to_dict()),
            versions={"fake": "1"},
            counters={"answered": self.answered, "compile_events": self._compiles, "steps": self._steps},
            memory_bytes={"weights": 1024, **({"process_peak": self.memory_bytes} if self.memory_bytes else {})},
            startup_ns={"load": 10_000_000},
            device=self.config.model.device,
            dtype=self.dtype,
            vocab_size=256,
        )


class TokenGate(grpc.ServerInterceptor):  # type: ignore[misc]
    """As an arm's own: who has not the token is refused, but for health checks. It repeats what it was shown, as some
    servers and gateways do."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization")
        if details.method.startswith("/grpc.health.v1.") or is_bearer(given, self._token):
            return continuation(details)
        return grpc.stream_stream_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{given} opens nothing")
        )


def main(kind: type[Arm] = Arm) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--replica", required=True)
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--metrics-port", default="0", help='"free": a page that says that the arm is there')
    parser.add_argument("--token-env", default="")
    parser.add_argument("--stall-s", type=float, default=0.4)
    parser.add_argument("--warmup-s", type=float, default=0.2)
    parser.add_argument("--die", action="append", default=[], metavar="REPLICA=REQUESTS")
    parser.add_argument("--freeze", action="append", default=[], metavar="REPLICA=REQUESTS")
    parser.add_argument("--die-last", action="append", default=[], metavar="REPLICA", help="after the traffic")
    parser.add_argument("--fail-start", action="append", default=[], metavar="REPLICA")
    parser.add_argument("--dtype", action="append", default=[], metavar="REPLICA=DTYPE")
    parser.add_argument("--token", action="append", default=[], metavar="REPLICA=TOKEN")
    parser.add_argument("--token-s", type=float, default=TOKEN_S)
    parser.add_argument("--prefill-s", action="append", default=[], metavar="REPLICA=S", help="one request at a time")
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="gets a line for each request that was answered to its end")
    parser.add_argument("--never-ready", action="append", default=[], metavar="REPLICA")
    arguments = parser.parse_args()
    with Path(arguments.config).open() as file:
        config = ArmConfig.from_dict(json.load(file))
    if arguments.replica in arguments.fail_start:
        print("RuntimeError: the weights are missing", file=sys.stderr)
        sys.exit(3)
    dtypes = dict(item.split("=") for item in arguments.dtype)
    tokens = dict(item.split("=") for item in arguments.token)
    faults = dict(item.split("=") for item in os.environ.get("PLANTED", "").split(",") if item)
    prefills = dict(item.split("=") for item in arguments.prefill_s)
    prefill_s = float(prefills[arguments.replica]) if arguments.replica in prefills else None
    arm = kind(
        config,
        arguments.replica,
        stall_s=arguments.stall_s,
        dtype=dtypes.get(arguments.replica, ""),
        token=int(tokens.get(arguments.replica, 5)),
        dies=arguments.replica in arguments.die_last,
        token_s=arguments.token_s * float(faults.get("decode", 1.0)),
        prefill_s=prefill_s,
        memory_bytes=int(arguments.memory_bytes * float(faults.get("memory", 1.0))),
        answers=arguments.answers,
    )
    gates = [TokenGate(os.environ[arguments.token_env])] if arguments.token_env else []
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=96), interceptors=gates)
    inference_pb2_grpc.add_InferenceServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(arm, server)  # type: ignore[no-untyped-call]
    checks = health.HealthServicer()
    for name in ("", SERVICE):
        checks.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port(f"{arguments.host}:{arguments.port}")
    # A list, not an Event: the handler runs inside the main thread, which may hold the Event's lock.
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    server.start()
    places = {"port": port, "pid": os.getpid()}
    if arguments.metrics_port != "0":
        page, _ = start_http_server(0, addr=arguments.host)
        places["metrics_port"] = page.server_port
    print(json.dumps(places), flush=True)
    arm.progress("load")
    shapes = 3 if config.compile.enabled else 1
    for index in range(shapes):
        start = now_ns()
        time.sleep(arguments.warmup_s / shapes)
        if config.compile.enabled:
            arm.compile_event(start_ns=start, shape=f"{index}x64", phase="warmup", request_ids=[], batch_id=-1)
        arm.progress("warmup", done=index + 1, total=shapes, detail=f"{index}x64")
    if arguments.replica not in arguments.never_ready:
        arm.progress("serving")
        for name in ("", SERVICE):
            checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    deaths = dict(item.split("=") for item in arguments.die)
    limit = int(deaths.get(arguments.replica, 0))
    freezes = dict(item.split("=") for item in arguments.freeze)
    still_after = int(freezes.get(arguments.replica, 0))
    while not stopped:
        time.sleep(0.05)
        if still_after and arm.answered >= still_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        if limit and arm.answered >= limit:
            print("Fatal: the device fell off the bus", file=sys.stderr, flush=True)
            os._exit(9)
    arm.close()
    server.stop(1.0).wait()


if __name__ == "__main__":
    main()
