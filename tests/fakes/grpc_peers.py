"""Real gRPC servers for the client under test: grpcio's synchronous and asyncio ones, plain or with TLS and a token.

Generate answers `max_tokens` chunks, one each `--token-s`; the text "big N" is answered by one chunk of N tokens; the
name of a status code aborts with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from servers.front.interceptors import TokenCheck
from servers.rpc import inference_pb2, inference_pb2_grpc
from tests.fakes.grpc_servers import add_inference, spawned, trailers

Kind = Literal["sync", "aio"]
TRAILERS = trailers(**{key: 10**18 + number for number, key in enumerate("abcdefghijklmn")})
REASON = "as you asked: \u2713 100 %"


def chunks(request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateChunk]:
    word, _, size = request.text.partition(" ")
    if word == "big":
        return [inference_pb2.GenerateChunk(token_ids=range(int(size)))]
    return [inference_pb2.GenerateChunk(token_ids=[number]) for number in range(request.max_tokens)]


class SyncPeer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateChunk]:  # noqa: N802
        context.set_trailing_metadata(TRAILERS)
        if request.text in grpc.StatusCode.__members__:
            context.abort(grpc.StatusCode[request.text], REASON)
        for number, chunk in enumerate(chunks(request)):
            time.sleep(self.token_s if number else 0.0)
            yield chunk


class AioPeer(SyncPeer):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateChunk]:  # noqa: N802
        context.set_trailing_metadata(TRAILERS)
        if request.text in grpc.StatusCode.__members__:
            await context.abort(grpc.StatusCode[request.text], REASON)
        for number, chunk in enumerate(chunks(request)):
            if number and self.token_s:
                await asyncio.sleep(self.token_s)
            yield chunk


@contextlib.contextmanager
def grpc_peer(
    kind: Kind, *, certificate: str = "", key: str = "", client_ca: str = "", token: str = "", token_s: float = 0.0
) -> Iterator[str]:
    """Serve in a process until the block ends, at host:port. A token is for `aio` alone."""
    security = ["--token", token, "--certificate", certificate, "--key", key, "--client-ca", client_ca]
    with spawned("tests.fakes.grpc_peers", kind, "--token-s", str(token_s), *security) as (_, port):
        yield f"127.0.0.1:{port}"


def _bind(server: Any, options: argparse.Namespace) -> int:
    if not options.certificate:
        return int(server.add_insecure_port("127.0.0.1:0"))
    pair = (Path(options.key).read_bytes(), Path(options.certificate).read_bytes())
    authority = Path(options.client_ca).read_bytes() if options.client_ca else None
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
    return int(server.add_secure_port("127.0.0.1:0", credentials))


def _serve_sync(options: argparse.Namespace) -> None:
    server = grpc.server(ThreadPoolExecutor(128), options=[("grpc.so_reuseport", 0)])
    add_inference(server, SyncPeer(options.token_s))
    port = _bind(server, options)
    server.start()
    print(json.dumps({"port": port}), flush=True)
    server.wait_for_termination()


async def _serve_aio(options: argparse.Namespace) -> None:
    interceptors = (TokenCheck(options.token),) if options.token else ()
    server = grpc.aio.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)], interceptors=interceptors)
    add_inference(server, AioPeer(options.token_s))
    port = _bind(server, options)
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description="A real gRPC server for tests.")
    parser.add_argument("kind", choices=("sync", "aio"))
    for name in ("certificate", "key", "client-ca", "token"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--token-s", type=float, default=0.0)
    options = parser.parse_args()
    if options.kind == "sync":
        _serve_sync(options)
    else:
        asyncio.run(_serve_aio(options))


if __name__ == "__main__":
    main()
