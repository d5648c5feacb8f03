"""A small Inference server: paces tokens, stalls and fails on demand, and sends every trailing metadata key.

`serve` starts it as a process: grpcio's threads must not share a process with code under gevent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from servers.clock import now_ns
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.grpc_servers import add_inference, spawned, trailers


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the fake does with each call; a counter decides the calls that fail or stall, so runs repeat exactly."""

    arm: str = "eager"
    replica: str = ""
    token_s: float = 0.002  # between chunks
    first_s: float = 0.0  # before the first chunk
    fail_every: int = 0  # each n-th call ends with RESOURCE_EXHAUSTED before any token
    empty_every: int = 0  # each n-th call ends with OK before any token
    stall_every: int = 0  # each n-th call waits `stall_s` before its first token
    stall_s: float = 0.0


@dataclass(slots=True)
class Admitted:
    number: int
    prompt: int  # its tokens
    stall_s: float
    empty: bool
    recv_ns: int
    first_ns: int = 0


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers as `Behaviour` says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._numbers = itertools.count(1)

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateChunk]:  # noqa: N802
        call, sent = self._admit(request, context), 0
        gone = threading.Event()  # a client that hangs up, or the server's end, wakes every wait
        if not context.add_callback(gone.set):
            gone.set()  # the call was over before this thread came to it
        gone.wait(call.stall_s + self.behaviour.first_s)
        call.first_ns = now_ns()
        while sent < request.max_tokens and not call.empty:
            if gone.is_set():
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
        recv_ns, behaviour, number = now_ns(), self.behaviour, next(self._numbers)

        def is_turn(every: int) -> bool:
            return every > 0 and number % every == 0

        prompt = len(request.token_ids.ids) or len(request.text)
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
        context.set_trailing_metadata(trailers(**server, **sizes, **times, output_tokens=sent))


@dataclass(frozen=True, slots=True)
class ServedFake:
    """A fake in a child process, at `target`."""

    target: str


@contextlib.contextmanager
def serve(behaviour: Behaviour, port: int = 0) -> Iterator[ServedFake]:
    settings = ("--port", str(port), "--behaviour", json.dumps(dataclasses.asdict(behaviour)))
    with spawned("tests.fakes.inference", *settings) as (_, bound):
        yield ServedFake(f"127.0.0.1:{bound}")


def main() -> None:
    """Serve until a signal ends the process. Print the port as one JSON line."""
    parser = argparse.ArgumentParser(description="A fake Inference server for tests.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", default="{}")
    options = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
    add_inference(server, FakeInference(Behaviour(**json.loads(options.behaviour))))
    port = server.add_insecure_port(f"127.0.0.1:{options.port}")
    server.start()
    print(json.dumps({"port": port}), flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
