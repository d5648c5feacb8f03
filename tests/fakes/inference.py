"""A small Inference server: paces tokens, stalls and fails on demand, and sends every trailing metadata key.

The text "big N" is answered by one chunk of N tokens; the name of a status code aborts with it. `serve` starts it as a
process: grpcio's threads must not share a process with code under gevent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tailgate.servers.clock import now_ns
from tailgate.servers.front.serve import TokenCheck
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.grpc_servers import add_inference, spawned, trailers

REASON = "as you asked: \u2713 100 %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the fake does with each call; a counter decides the calls that fail or stall, so runs repeat exactly."""

    arm: str = "eager"
    replica: str = ""
    token_s: float = 0.002  # between chunks
    first_s: float = 0.0  # before the first chunk
    fail_every: int = 0  # each n-th call ends with RESOURCE_EXHAUSTED before any token
    stall_every: int = 0  # each n-th call waits `stall_s` before its first token
    stall_s: float = 0.0
    certificate: str = ""  # with the key and the authority of clients, paths of PEM files
    key: str = ""
    token: str = ""  # that calls must show


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers as `Behaviour` says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._numbers = itertools.count(1)

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateChunk]:  # noqa: N802
        behaviour, recv_ns, number = self.behaviour, now_ns(), next(self._numbers)
        if request.text in grpc.StatusCode.__members__:
            context.abort(grpc.StatusCode[request.text], REASON)
        if behaviour.fail_every and number % behaviour.fail_every == 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full: 128 of 128")
        stall_s = behaviour.stall_s if behaviour.stall_every and number % behaviour.stall_every == 0 else 0.0
        gone = threading.Event()  # a client that hangs up, or the server's end, wakes every wait
        if context.add_callback(gone.set) is False:
            gone.set()  # the call was over before this thread came to it
        gone.wait(stall_s + behaviour.first_s)
        first_ns, sent = now_ns(), 0
        word, _, size = request.text.partition(" ")
        if word == "big":
            sent = int(size)
            yield inference_pb2.GenerateChunk(token_ids=range(sent))
        while sent < request.max_tokens:
            if gone.is_set():
                return
            sent += 1
            ended = sent == request.max_tokens
            reason = inference_pb2.FINISH_REASON_LENGTH if ended else inference_pb2.FINISH_REASON_UNSPECIFIED
            yield inference_pb2.GenerateChunk(token_ids=[6 + sent], emit_ns=[now_ns()], finish_reason=reason)
            if not ended and behaviour.token_s:
                gone.wait(behaviour.token_s)
        end_ns, prompt = now_ns(), len(request.token_ids.ids) or len(request.text)
        replica = behaviour.replica or f"{behaviour.arm}-0"
        server = {"arm": behaviour.arm, "replica": replica, "batch_id": number}
        sizes = {"batch_size": 1, "padded_batch": 2, "padded_length": prompt + 1, "prompt_tokens": prompt}
        times = {"queue_ns": first_ns - recv_ns, "prefill_ns": 1_000_000, "decode_ns": end_ns - first_ns}
        times |= {"compile_stall_ns": int(stall_s * 1e9), "recv_ns": recv_ns, "end_ns": end_ns}
        context.set_trailing_metadata(trailers(**server, **sizes, **times, output_tokens=sent))


@dataclass(frozen=True, slots=True)
class ServedFake:
    """A fake in a child process, at `target`."""

    target: str


@contextlib.contextmanager
def serve(behaviour: Behaviour, port: int = 0) -> Iterator[ServedFake]:
    words = (str(port), json.dumps(dataclasses.asdict(behaviour)))
    with spawned("tests.fakes.inference", *words) as (_, bound):
        yield ServedFake(f"127.0.0.1:{bound}")


async def main(port: str, described: str) -> None:
    """Serve until a signal ends the process. Print the port as one JSON line."""
    behaviour = Behaviour(**json.loads(described))
    interceptors = (TokenCheck(behaviour.token),) if behaviour.token else ()
    # grpcio runs the servicer on threads.
    server = grpc.aio.server(ThreadPoolExecutor(128), options=[("grpc.so_reuseport", 0)], interceptors=interceptors)
    add_inference(server, FakeInference(behaviour))
    address = f"127.0.0.1:{port}"
    if behaviour.certificate:
        pair = (Path(behaviour.key).read_bytes(), Path(behaviour.certificate).read_bytes())
        bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    else:
        bound = server.add_insecure_port(address)
    await server.start()
    print(json.dumps({"port": bound}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
