"""An arm without a model: real gRPC, real telemetry, paced tokens and scripted compile events.

Takes the command line of `python -m tailgate.servers.front.serve`, and flags of its own that script faults.
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
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import grpc
from prometheus_client import start_http_server

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a run starts this file by its path

from tailgate.servers.clock import now_ns
from tailgate.servers.config import ArmConfig
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tailgate.servers.security import is_bearer
from tests.fakes.grpc_servers import add_inference, trailers

TOKEN_S = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """Which step, when, and how much of it a compile took."""

    batch: int
    start_ns: int
    end_ns: int
    stall_ns: int
    length: int


class Arm(inference_pb2_grpc.InferenceServicer, telemetry_pb2_grpc.TelemetryServicer):
    """Answers with paced tokens; a compiled-naive arm stalls on prompt lengths it has not seen.

    Of its steps it keeps the newest alone, so that its memory does not grow over a million requests.
    """

    token = 5  # all that it answers
    token_s = TOKEN_S
    prefill_s = TOKEN_S
    dies = False  # when it is asked for a snapshot after the traffic
    compile_every_s = 0.0  # how often a compiled arm compiles, whatever the lengths; 0: for the lengths that are new
    whole = False  # whether all tokens of an answer are one chunk
    answers_file: BinaryIO | None = None  # gets a line for each request that is answered to its end

    def __init__(self, config: ArmConfig, replica: str, *, stall_s: float) -> None:
        self.config = config
        self.replica = replica
        self.stall_s = stall_s
        self.answered = 0
        self._retained: list[telemetry_pb2.TelemetryEvent] = []
        self._newest_steps: deque[telemetry_pb2.TelemetryEvent] = deque(maxlen=4096)
        self._watchers: list[queue.SimpleQueue[telemetry_pb2.TelemetryEvent | None]] = []
        self._lock = threading.Lock()
        self._device = threading.Lock()
        self._seen: set[int] = set()
        self._compiled_s = time.monotonic()
        self._compiles = 0
        self._closed = False

    def publish(self, event: telemetry_pb2.TelemetryEvent) -> None:
        with self._lock:
            (self._newest_steps if event.WhichOneof("event") == "steps" else self._retained).append(event)
            for watcher in self._watchers:
                watcher.put(event)

    def progress(self, stage: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        progress = telemetry_pb2.Progress(at_ns=now_ns(), stage=stage, done=done, total=total, detail=detail)
        self.publish(telemetry_pb2.TelemetryEvent(progress=progress))

    def under_way(self, *, start_ns: int, end_ns: int = 0, shape: str, batch_id: int) -> None:
        where: dict[str, Any] = {"shape": shape, "batch_id": batch_id, "phase": "serving", "kind": "compile"}
        compiling = telemetry_pb2.CompileUnderWay(
            start_ns=start_ns, end_ns=end_ns, compile_id=f"0/{self._compiles + 1}", **where
        )
        self.publish(telemetry_pb2.TelemetryEvent(under_way=compiling))

    def compile_event(self, *, start_ns: int, shape: str, phase: str, request_ids: list[str], batch_id: int) -> None:
        self._compiles += 1
        kind, reason = "compile", "first call"
        if phase == "serving":
            kind, reason = "recompile", f"tensor 'input_ids' size mismatch at index 1: {shape}"
        event = telemetry_pb2.CompileEvent(
            event_id=f"{self.replica}-{self._compiles}",
            compile_id=f"0/{self._compiles}",
            start_ns=start_ns,
            end_ns=now_ns(),
            **{"kind": kind, "reason": reason, "shape": shape, "phase": phase, "frame": "forward", "cache": "miss"},
            batch_id=batch_id,
            request_ids=request_ids,
        )
        self.publish(telemetry_pb2.TelemetryEvent(compile=event))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for watcher in self._watchers:
                watcher.put(None)

    def compiles(self, length: int) -> bool:
        """Return whether a prompt of the length waits for a compile now."""
        if self.compile_every_s:
            is_due = self.config.compile.enabled and time.monotonic() - self._compiled_s >= self.compile_every_s
        else:
            is_due = self.config.preset == "compiled-naive" and length // 32 not in self._seen
        if is_due:
            self._seen.add(length // 32)
            self._compiled_s = time.monotonic()
        return is_due

    def run_first_step(self, kind: str, request_id: str, length: int, seconds: float) -> FirstStep:
        """Run a request's first step alone on the device, after a compile where the size is new to the arm."""
        stall_ns = 0
        with self._device:
            start, batch = now_ns(), self.answered
            compiles = self.compiles(length)
            step: dict[str, Any] = {"start_ns": start, "shape": f"1x{length}", "batch_id": batch}
            if compiles:
                self.under_way(**step)
            self.answered += 1  # at a number of these the arm may die, after what it published
            if compiles:
                time.sleep(self.stall_s)
                stall_ns = now_ns() - start
                self.under_way(end_ns=start + stall_ns, **step)
                self.compile_event(phase="serving", request_ids=[request_id], **step)
            time.sleep(seconds)
            end = now_ns()
        sizes = {"batch": 1, "padded_batch": 1, "tokens": length, "padded_tokens": length}
        record = telemetry_pb2.StepRecord(
            step_id=batch, kind=kind, start_ns=start, end_ns=end, compiled=self.config.compile.enabled, **sizes
        )
        self.publish(telemetry_pb2.TelemetryEvent(steps=telemetry_pb2.StepRecords(records=[record])))
        return FirstStep(batch=batch, start_ns=start, end_ns=end, stall_ns=stall_ns, length=length)

    def trail(
        self, context: grpc.ServicerContext, step: FirstStep, request_id: str, *, received: int, end: int, tokens: int
    ) -> None:
        if self.answers_file is not None:
            self.answers_file.write(f"{request_id} {self.config.name} {end}\n".encode())
        times = {"queue_ns": step.start_ns - received, "prefill_ns": step.end_ns - step.start_ns - step.stall_ns}
        times |= {"decode_ns": end - step.end_ns, "compile_stall_ns": step.stall_ns}
        times |= {"recv_ns": received, "end_ns": end}
        sizes = {"batch_id": step.batch, "batch_size": 1, "padded_batch": 1, "padded_length": step.length}
        sizes |= {"prompt_tokens": step.length, "output_tokens": tokens}
        context.set_trailing_metadata(trailers(arm=self.config.name, replica=self.replica, **times, **sizes))

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        received = now_ns()
        step = self.run_first_step("prefill", request.request_id, len(request.token_ids.ids), self.prefill_s)
        size = request.max_tokens if self.whole else 1  # of a chunk
        for end in range(size, request.max_tokens + 1, size):
            last = end == request.max_tokens
            reason = inference_pb2.FINISH_REASON_LENGTH if last else inference_pb2.FINISH_REASON_UNSPECIFIED
            yield inference_pb2.GenerateChunk(
                token_ids=[self.token] * size, emit_ns=[now_ns()] * size, finish_reason=reason
            )
            if not last:
                time.sleep(self.token_s)
        self.trail(context, step, request.request_id, received=received, end=now_ns(), tokens=request.max_tokens)

    def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        """Return a vector that follows from the text and turns with `token`. Each text is a step."""
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
            for event in (*self._retained, *self._newest_steps):
                mine.put(event)
            self._watchers.append(mine)
            if self._closed:
                mine.put(None)
        context.add_callback(lambda: mine.put(None))
        yield from iter(mine.get, None)

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
            counters={"answered": self.answered, "compile_events": self._compiles, "steps": self.answered},
            memory_bytes={"weights": 1024},
            startup_ns={"load": 10_000_000},
            device=self.config.model.device,
            dtype=self.config.model.dtype,
            vocab_size=256,
        )


Lie = Literal[
    "more tokens than came",  # output-tokens in the trailers
    "every token twice",
    "one token of all",  # and the trailers say that all were sent
    "nothing at once",  # OK, without a token
    "no trailers",
    "late trailers",
    "times that go backwards",  # in the trailers
    "another name",
    "compiles twice",
    "compiles lost",  # and counted all the same
    "compiles from the future",
    "compiles of negative length",
    "steps that go backwards",
]
LIES: tuple[Lie, ...] = get_args(Lie)
LATE_S = 2.0
_HOUR_NS = 3_600_000_000_000


class LyingArm(Arm):
    """Reports falsely, as `lies` say."""

    lies: Collection[str] = ()

    def publish(self, event: telemetry_pb2.TelemetryEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "compile":
            if "compiles lost" in self.lies:
                return
            if "compiles from the future" in self.lies:
                event.compile.start_ns += _HOUR_NS
                event.compile.end_ns += _HOUR_NS
            if "compiles of negative length" in self.lies:
                event.compile.start_ns, event.compile.end_ns = event.compile.end_ns, event.compile.start_ns
            if "compiles twice" in self.lies:
                super().publish(event)
        if kind == "under_way" and "compiles lost" in self.lies:
            return
        if kind == "steps" and "steps that go backwards" in self.lies:
            for record in event.steps.records:
                record.step_id = 1_000_000 - record.step_id
                record.start_ns, record.end_ns = record.end_ns - _HOUR_NS, record.start_ns - _HOUR_NS
        super().publish(event)

    def trail(self, context: grpc.ServicerContext, step: FirstStep, request_id: str, **trailers: Any) -> None:
        if "no trailers" in self.lies:
            return
        if "late trailers" in self.lies:
            time.sleep(LATE_S)
        if "more tokens than came" in self.lies:
            trailers["tokens"] += 5
        if "times that go backwards" in self.lies:
            trailers["received"], trailers["end"] = trailers["end"] + _HOUR_NS, trailers["received"] - _HOUR_NS
        super().trail(context, step, request_id, **trailers)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        if "nothing at once" in self.lies:
            at_ns = now_ns()
            step = FirstStep(batch=0, start_ns=at_ns, end_ns=at_ns, stall_ns=0, length=len(request.token_ids.ids))
            self.trail(context, step, request.request_id, received=at_ns, end=at_ns, tokens=request.max_tokens)
            return
        for number, chunk in enumerate(super().Generate(request, context)):
            if "one token of all" in self.lies and number:
                continue
            yield chunk
            if "every token twice" in self.lies:
                yield chunk

    def Snapshot(  # noqa: N802
        self, request: telemetry_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> telemetry_pb2.SnapshotResponse:
        said = super().Snapshot(request, context)
        if "another name" in self.lies:
            said.arm, said.replica = "eager", "eager-0"
        return said


class TokenGate(grpc.ServerInterceptor):
    """Refuses calls without the token, except health checks. The refusal repeats what was shown, as some servers do."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization")
        if details.method.startswith("/grpc.health.v1.") or is_bearer(given, self._token):
            return continuation(details)
        return grpc.stream_stream_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{given} opens nothing")
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--replica", required=True)
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--metrics-port", default="0", help='"free": a page that says that the arm is there')
    parser.add_argument("--token-env", default="")
    parser.add_argument("--json", action="store_true", help="this one always does")
    parser.add_argument("--stall-s", type=float, default=0.4)
    parser.add_argument("--warmup-s", type=float, default=0.2)
    parser.add_argument("--token-s", type=float, default=TOKEN_S)
    parser.add_argument("--compile-every-s", type=float, default=0.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--answers", type=Path)
    for name in ("die", "freeze", "token", "prefill-s", "lie"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="REPLICA=VALUE")
    for name in ("die-last", "fail-start", "never-ready"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="REPLICA")
    options = parser.parse_args()

    def own(items: Sequence[str], otherwise: Any) -> str:
        return str(dict(item.split("=") for item in items).get(options.replica, otherwise))

    config = ArmConfig.from_dict(json.loads(options.config.read_text()))
    if options.replica in options.fail_start:
        print("RuntimeError: the weights are missing", file=sys.stderr)
        sys.exit(3)
    arm = LyingArm(config, options.replica, stall_s=options.stall_s)
    arm.lies = [lie for replica, lie in (item.split("=") for item in options.lie) if replica == options.replica]
    assert set(arm.lies) <= set(LIES), f"a lie is one of {', '.join(LIES)}"
    arm.token = int(own(options.token, arm.token))
    arm.compile_every_s, arm.whole = options.compile_every_s, options.whole
    arm.dies = options.replica in options.die_last
    arm.token_s = options.token_s
    arm.prefill_s = float(own(options.prefill_s, arm.token_s))
    if options.answers:  # each line is one write, so a kill leaves whole lines
        arm.answers_file = options.answers.open("ab", buffering=0)
    gates = [TokenGate(os.environ[options.token_env])] if options.token_env else []
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=96), interceptors=gates)
    checks = add_inference(server, arm, serving=False)
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(arm, server)
    port = server.add_insecure_port(f"{options.host}:{options.port}")
    # A list, not an Event: the handler runs inside the main thread, which may hold the Event's lock.
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    server.start()
    places = {"port": port, "pid": os.getpid()}
    if options.metrics_port != "0":
        page, _ = start_http_server(0, addr=options.host)
        places["metrics_port"] = page.server_port
    print(json.dumps(places), flush=True)
    warm_up(arm, options.warmup_s)
    if options.replica not in options.never_ready:
        arm.progress("serving")
        checks.answer(serving=True)
    dies_at, freezes_at = int(own(options.die, 0)), int(own(options.freeze, 0))
    while not stopped:
        time.sleep(0.05)
        if freezes_at and arm.answered >= freezes_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if dies_at and arm.answered >= dies_at:
            time.sleep(0.2)  # until its watchers have what it published
            print("Fatal: the device fell off the bus", file=sys.stderr, flush=True)
            os._exit(9)
    arm.close()
    server.stop(1.0).wait()


def warm_up(arm: Arm, seconds: float) -> None:
    arm.progress("load")
    shapes = 3 if arm.config.compile.enabled else 1
    for index in range(shapes):
        start = now_ns()
        time.sleep(seconds / shapes)
        if arm.config.compile.enabled:
            arm.compile_event(start_ns=start, shape=f"{index}x64", phase="warmup", request_ids=[], batch_id=-1)
        arm.progress("warmup", done=index + 1, total=shapes, detail=f"{index}x64")


if __name__ == "__main__":
    main()
