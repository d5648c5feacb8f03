"""Real gRPC servers for the client under test: grpcio's synchronous and asyncio ones, plain or with TLS and a token.

Each runs in a process of its own (`grpc_peer`). Generate answers `max_tokens` chunks, one each `--token-s`; the prompt
text "big N" is answered by one chunk of N tokens; a status code's name as text aborts with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from servers.front.service import TokenCheck
from servers.rpc import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
Kind = Literal["sync", "aio"]
TRAILERS = tuple((f"tailgate-{key}", str(10**18 + number)) for number, key in enumerate("abcdefghijklmn"))


def big(request: inference_pb2.GenerateRequest) -> int:
    """The size of the one chunk that is asked for, 0 for none."""
    word, _, number = request.text.partition(" ")
    return int(number) if word == "big" else 0


class SyncPeer(inference_pb2_grpc.InferenceServicer):
    """Generate on threads."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateChunk]:
        context.set_trailing_metadata(TRAILERS)
        if request.text in grpc.StatusCode.__members__:
            context.abort(grpc.StatusCode[request.text], "as you asked: \u2713 100 %")
        if size := big(request):
            yield inference_pb2.GenerateChunk(token_ids=range(size))
            return
        for number in range(request.max_tokens):
            if number and self.token_s:
                time.sleep(self.token_s)
            yield inference_pb2.GenerateChunk(token_ids=[number])


class AioPeer(inference_pb2_grpc.InferenceServicer):
    """Generate on an event loop."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        context.set_trailing_metadata(TRAILERS)
        if request.text in grpc.StatusCode.__members__:
            await context.abort(grpc.StatusCode[request.text], "as you asked: \u2713 100 %")
        if size := big(request):
            yield inference_pb2.GenerateChunk(token_ids=range(size))
            return
        for number in range(request.max_tokens):
            if number and self.token_s:
                await asyncio.sleep(self.token_s)
            yield inference_pb2.GenerateChunk(token_ids=[number])


@contextlib.contextmanager
def grpc_peer(
    kind: Kind, *, certificate: str = "", key: str = "", client_ca: str = "", token: str = "", token_s: float = 0.0
) -> Iterator[str]:
    """The address, host:port, of a server that listens until the block ends. A token is for `aio` alone."""
    argv = [sys.executable, "-m", "tests.fakes.grpc_peers", kind, "--token-s", str(token_s), "--token", token]
    argv += ["--certificate", certificate, "--key", key, "--client-ca", client_ca]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.kill()
        process.wait()


def _bind(server: Any, options: argparse.Namespace) -> int:
    if not options.certificate:
        return int(server.add_insecure_port("127.0.0.1:0"))
    pair = (Path(options.key).read_bytes(), Path(options.certificate).read_bytes())
    authority = Path(options.client_ca).read_bytes() if options.client_ca else None
    return int(
        server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
        )
    )


def _serve_sync(options: argparse.Namespace) -> None:
    server = grpc.server(ThreadPoolExecutor(128), options=[("grpc.so_reuseport", 0)])
    add: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    add(SyncPeer(options.token_s), server)
    checks = health.HealthServicer()
    checks.set("tailgate.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = _bind(server, options)
    server.start()
    print(json.dumps({"port": port}), flush=True)
    server.wait_for_termination()


async def _serve_aio(options: argparse.Namespace) -> None:
    interceptors = (TokenCheck(options.token),) if options.token else ()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], interceptors=interceptors)
    add: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    add(AioPeer(options.token_s), server)
    checks = health.aio.HealthServicer()
    await checks.set("tailgate.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = _bind(server, options)
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await server.wait_for_termination()


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is killed; one JSON line with the port first."""
    parser = argparse.ArgumentParser(description="A real gRPC server for tests.")
    parser.add_argument("kind", choices=("sync", "aio"))
    for name in ("certificate", "key", "client-ca", "token"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--token-s", type=float, default=0.0)
    options = parser.parse_args(argv)
    if options.kind == "sync":
        _serve_sync(options)
    else:
        asyncio.run(_serve_aio(options))


if __name__ == "__main__":
    main()
