"""A small Inference server for tests: paces tokens, stalls and fails on demand, and sends every trailing metadata key.

Run it in a process of its own (`serve` starts one and waits for its port): the grpcio server's threads must not share
a process with code under gevent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from servers.clock import now_ns
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the fake does with each call; a counter decides the calls that fail or stall, so runs repeat exactly."""

    arm: str = "eager"
    replica: str = ""
    token_s: float = 0.002  # between chunks
    first_s: float = 0.0  # before the first chunk
    tokens_per_chunk: int = 1
    fail_every: int = 0  # each n-th call ends with `fail_status` before any token
    fail_status: str = "RESOURCE_EXHAUSTED"
    fail_message: str = "the queue is full: 128 of 128"
    empty_every: int = 0  # each n-th call ends with OK before any token
    miscount: int = 0  # tokens that the trailing count has more than were sent
    stall_every: int = 0  # each n-th call waits `stall_s` before its first token
    stall_s: float = 0.0
    max_prompt_tokens: int = 0  # 0: no limit
    threads: int = 64
    max_streams: int = 0  # HTTP/2 MAX_CONCURRENT_STREAMS; 0: grpc's default


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers Generate and Embed as `Behaviour` says.

    `requests` lists (request_id, arm header, session header, receive ns).
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[tuple[str, str, str, int]] = []
        self.cancelled = 0
        self._lock = threading.Lock()

    def Generate(  # noqa: N802  (the name is the method's on the wire)
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        recv_ns, behaviour = now_ns(), self.behaviour
        number, prompt = self._admit(request, context, recv_ns)
        stalled = behaviour.stall_s if behaviour.stall_every and number % behaviour.stall_every == 0 else 0.0
        gone = threading.Event()  # a client that hangs up, or the server's end, wakes every wait
        if not context.add_callback(gone.set):
            gone.set()  # the call was over before this thread came to it
        gone.wait(stalled + behaviour.first_s)
        first_ns = now_ns()
        sent = 0
        empty = bool(behaviour.empty_every) and number % behaviour.empty_every == 0
        while sent < request.max_tokens and not empty:
            if gone.is_set():
                with self._lock:
                    self.cancelled += 1
                return
            count = min(behaviour.tokens_per_chunk, request.max_tokens - sent)
            at_ns = now_ns()
            # Tokens of one chunk were "made" at an even pace since the previous chunk.
            gap_ns = int(behaviour.token_s * 1e9 / count)
            ids = [7 + (sent + offset) % 200 for offset in range(count)]
            emitted = [at_ns - (count - 1 - offset) * gap_ns for offset in range(count)]
            sent += count
            ended = sent == request.max_tokens
            reason = inference_pb2.FINISH_REASON_LENGTH if ended else inference_pb2.FINISH_REASON_UNSPECIFIED
            yield inference_pb2.GenerateChunk(token_ids=ids, emit_ns=emitted, finish_reason=reason)
            if sent < request.max_tokens and behaviour.token_s:
                gone.wait(behaviour.token_s)
        self._account(
            context, number=number, prompt=prompt, recv_ns=recv_ns, first_ns=first_ns, stalled=stalled, sent=sent
        )

    def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        recv_ns, behaviour = now_ns(), self.behaviour
        number, prompt = self._admit(request, context, recv_ns)
        stalled = behaviour.stall_s if behaviour.stall_every and number % behaviour.stall_every == 0 else 0.0
        threading.Event().wait(stalled + behaviour.first_s)
        self._account(
            context, number=number, prompt=prompt, recv_ns=recv_ns, first_ns=now_ns(), stalled=stalled, sent=0
        )
        empty = bool(behaviour.empty_every) and number % behaviour.empty_every == 0
        return inference_pb2.EmbedResponse(values=[] if empty else [0.6, 0.8], tokens=prompt)

    def _admit(self, request: Any, context: grpc.ServicerContext, recv_ns: int) -> tuple[int, int]:
        """(the call's number, the tokens of its prompt); a call that fails by script is aborted here."""
        behaviour, headers = self.behaviour, dict(context.invocation_metadata())
        with self._lock:
            self.requests.append(
                (request.request_id, headers.get("x-tailgate-arm", ""), headers.get("x-tailgate-session", ""), recv_ns)
            )
            number = len(self.requests)
        prompt = len(request.token_ids.ids) or len(request.text)
        if behaviour.max_prompt_tokens and prompt > behaviour.max_prompt_tokens:
            limit = behaviour.max_prompt_tokens
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"prompt has {prompt} tokens; the limit is {limit}")
        if behaviour.fail_every and number % behaviour.fail_every == 0:
            context.abort(grpc.StatusCode[behaviour.fail_status], behaviour.fail_message)
        return number, prompt

    def _account(
        self,
        context: grpc.ServicerContext,
        *,
        number: int,
        prompt: int,
        recv_ns: int,
        first_ns: int,
        stalled: float,
        sent: int,
    ) -> None:
        """The trailing metadata of the call are set."""
        end_ns, behaviour = now_ns(), self.behaviour
        arm = behaviour.arm or dict(context.invocation_metadata()).get("x-tailgate-arm", "")
        context.set_trailing_metadata(
            (
                ("tailgate-arm", arm),
                ("tailgate-replica", behaviour.replica or f"{arm}-0"),
                ("tailgate-queue-ns", str(first_ns - recv_ns)),
                ("tailgate-prefill-ns", "1000000"),
                ("tailgate-decode-ns", str(end_ns - first_ns)),
                ("tailgate-compile-stall-ns", str(int(stalled * 1e9))),
                ("tailgate-batch-id", str(number)),
                ("tailgate-batch-size", "1"),
                ("tailgate-padded-batch", "2"),
                ("tailgate-padded-length", str(prompt + 1)),
                ("tailgate-prompt-tokens", str(prompt)),
                ("tailgate-output-tokens", str(sent + behaviour.miscount)),
                ("tailgate-recv-ns", str(recv_ns)),
                ("tailgate-end-ns", str(end_ns)),
            )
        )


def start_server(behaviour: Behaviour, port: int = 0) -> tuple[grpc.Server, FakeInference, int]:
    """A listening server in this process, its servicer and its port."""
    options: list[tuple[str, int]] = [("grpc.so_reuseport", 0)]
    if behaviour.max_streams:
        options.append(("grpc.max_concurrent_streams", behaviour.max_streams))
    server = grpc.server(ThreadPoolExecutor(behaviour.threads), options=options)
    servicer = FakeInference(behaviour)
    add: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    add(servicer, server)
    checks = health.HealthServicer()
    for name in ("", "tailgate.v1.Inference"):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, servicer, bound


class ServedFake:
    """A fake in a child process: its `target`, and what it saw once `stop` was called."""

    def __init__(self, process: subprocess.Popen[str], target: str) -> None:
        self.process = process
        self.target = target
        self.requests: list[tuple[str, str, str, int]] = []
        self.cancelled = 0

    def stop(self) -> None:
        """The process is gone; `requests` and `cancelled` are filled. A second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        if self.process.stdout is not None and not self.process.stdout.closed:
            out, _ = self.process.communicate(timeout=PATIENCE_S)
            with contextlib.suppress(json.JSONDecodeError, IndexError):
                told = json.loads(out.splitlines()[-1])
                self.requests = [tuple(row) for row in told["requests"]]
                self.cancelled = told["cancelled"]


@contextlib.contextmanager
def serve(behaviour: Behaviour, port: int = 0) -> Iterator[ServedFake]:
    """A fake that listens in a child process until the block ends."""
    argv = [sys.executable, "-m", "tests.fakes.inference", "--port", str(port)]
    argv += ["--behaviour", json.dumps(dataclasses.asdict(behaviour))]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(timeout=PATIENCE_S)
        raise RuntimeError(f"the fake server ended with exit code {process.returncode} before it listened")
    served = ServedFake(process, f"127.0.0.1:{json.loads(line)['port']}")
    try:
        yield served
    finally:
        served.stop()


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM: one JSON line with the port first, one with what it saw last."""
    parser = argparse.ArgumentParser(description="A fake Inference server for tests.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", default="{}", help=f"JSON: {', '.join(item.name for item in fields(Behaviour))}")
    options = parser.parse_args(argv)
    # Waited for, not handled: a handler that sets an event on which this thread waits can deadlock.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server, servicer, port = start_server(Behaviour(**json.loads(options.behaviour)), options.port)
    print(json.dumps({"port": port}), flush=True)
    signal.sigwait({signal.SIGTERM})
    server.stop(grace=0.2).wait()
    print(json.dumps({"requests": servicer.requests, "cancelled": servicer.cancelled}), flush=True)


if __name__ == "__main__":
    main()
