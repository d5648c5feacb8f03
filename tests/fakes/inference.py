"""A small Inference server: paces tokens, stalls and fails on demand, and sends every trailing metadata key.

`serve` starts it as a process: grpcio's threads must not share a process with code under gevent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from servers.clock import now_ns
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.grpc_servers import add_inference, spawned, trailers
from tests.fakes.processes import PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the fake does with each call; a counter decides the calls that fail or stall, so runs repeat exactly."""

    arm: str = "eager"
    replica: str = ""
    token_s: float = 0.002  # between chunks
    first_s: float = 0.0  # before the first chunk
    fail_every: int = 0  # each n-th call ends with RESOURCE_EXHAUSTED before any token
    empty_every: int = 0  # each n-th call ends with OK before any token
    miscount: int = 0  # tokens that the trailing count has more than were sent
    stall_every: int = 0  # each n-th call waits `stall_s` before its first token
    stall_s: float = 0.0
    max_prompt_tokens: int = 0  # 0: no limit


@dataclass(slots=True)
class Admitted:
    number: int
    prompt: int  # its tokens
    stall_s: float
    empty: bool
    recv_ns: int
    first_ns: int = 0


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers as `Behaviour` says; `requests` lists (request_id, arm header, session header, receive ns)."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[tuple[str, str, str, int]] = []
        self.cancelled = 0
        self._lock = threading.Lock()

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateChunk]:  # noqa: N802
        call, sent = self._admit(request, context), 0
        gone = threading.Event()  # a client that hangs up, or the server's end, wakes every wait
        if not context.add_callback(gone.set):
            gone.set()  # the call was over before this thread came to it
        gone.wait(call.stall_s + self.behaviour.first_s)
        call.first_ns = now_ns()
        while sent < request.max_tokens and not call.empty:
            if gone.is_set():
                with self._lock:
                    self.cancelled += 1
                return
            sent += 1
            ended = sent == request.max_tokens
            reason = inference_pb2.FINISH_REASON_LENGTH if ended else inference_pb2.FINISH_REASON_UNSPECIFIED
            yield inference_pb2.GenerateChunk(token_ids=[6 + sent], emit_ns=[now_ns()], finish_reason=reason)
            if not ended and self.behaviour.token_s:
                gone.wait(self.behaviour.token_s)
        self._account(context, call, sent)

    def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:  # noqa: N802
        call = self._admit(request, context)
        threading.Event().wait(call.stall_s + self.behaviour.first_s)
        call.first_ns = now_ns()
        self._account(context, call, sent=0)
        return inference_pb2.EmbedResponse(values=[] if call.empty else [0.6, 0.8], tokens=call.prompt)

    def _admit(self, request: Any, context: Any) -> Admitted:
        """Count the call, or abort it."""
        recv_ns, behaviour, headers = now_ns(), self.behaviour, dict(context.invocation_metadata())
        named = (headers.get(f"x-tailgate-{name}", "") for name in ("arm", "session"))
        with self._lock:
            self.requests.append((request.request_id, *named, recv_ns))
            number = len(self.requests)

        def is_turn(every: int) -> bool:
            return every > 0 and number % every == 0

        prompt = len(request.token_ids.ids) or len(request.text)
        limit = behaviour.max_prompt_tokens
        if limit and prompt > limit:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"prompt has {prompt} tokens; the limit is {limit}")
        if is_turn(behaviour.fail_every):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full: 128 of 128")
        stall_s = behaviour.stall_s if is_turn(behaviour.stall_every) else 0.0
        return Admitted(number, prompt, stall_s, is_turn(behaviour.empty_every), recv_ns)

    def _account(self, context: Any, call: Admitted, sent: int) -> None:
        end_ns = now_ns()
        arm = self.behaviour.arm or dict(context.invocation_metadata()).get("x-tailgate-arm", "")
        server = {"arm": arm, "replica": self.behaviour.replica or f"{arm}-0", "batch_id": call.number}
        sizes = {"batch_size": 1, "padded_batch": 2, "padded_length": call.prompt + 1, "prompt_tokens": call.prompt}
        times = {"queue_ns": call.first_ns - call.recv_ns, "prefill_ns": 1_000_000, "decode_ns": end_ns - call.first_ns}
        times |= {"compile_stall_ns": int(call.stall_s * 1e9), "recv_ns": call.recv_ns, "end_ns": end_ns}
        context.set_trailing_metadata(
            trailers(**server, **sizes, **times, output_tokens=sent + self.behaviour.miscount)
        )


class ServedFake:
    """A fake in a child process: its `target`, and what it saw once `stop` was called."""

    def __init__(self, process: subprocess.Popen[str], target: str) -> None:
        self.process = process
        self.target = target
        self.requests: list[tuple[str, str, str, int]] = []
        self.cancelled = 0

    def stop(self) -> None:
        """End the process and fill `requests` and `cancelled`. A second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        if self.process.stdout is not None and not self.process.stdout.closed:
            out, _ = self.process.communicate(timeout=PATIENCE_S)
            with contextlib.suppress(json.JSONDecodeError, IndexError):
                seen = json.loads(out.splitlines()[-1])
                self.requests = [tuple(row) for row in seen["requests"]]
                self.cancelled = seen["cancelled"]


@contextlib.contextmanager
def serve(behaviour: Behaviour, port: int = 0) -> Iterator[ServedFake]:
    settings = ("--port", str(port), "--behaviour", json.dumps(dataclasses.asdict(behaviour)))
    with spawned("tests.fakes.inference", *settings) as (process, bound):
        served = ServedFake(process, f"127.0.0.1:{bound}")
        try:
            yield served
        finally:
            served.stop()


def main() -> None:
    """Serve until SIGTERM. Print the port as one JSON line first, and what was seen as one last."""
    parser = argparse.ArgumentParser(description="A fake Inference server for tests.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", default="{}")
    options = parser.parse_args()
    # `sigwait` instead of a handler: one that sets an event on which this thread waits can deadlock.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    servicer = FakeInference(Behaviour(**json.loads(options.behaviour)))
    server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
    add_inference(server, servicer)
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    print(json.dumps({"port": port}), flush=True)
    signal.sigwait({signal.SIGTERM})
    server.stop(grace=0.2).wait()
    print(json.dumps({"requests": servicer.requests, "cancelled": servicer.cancelled}), flush=True)


if __name__ == "__main__":
    main()
