"""The proxy that one would write in Python: grpc.aio on both sides.

    python -m benchmarks.peers.proxy HOST:PORT OWN-PORT

It passes messages of every method on as bytes, with metadata, deadline and status, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio


class _Forward(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no annotations
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: Any) -> Any:
        call = self._channel.unary_stream(details.method)  # no serializers: bytes go through

        async def forward(request: bytes, context: Any) -> AsyncIterator[bytes]:
            upstream = call(request, metadata=context.invocation_metadata(), timeout=context.time_remaining())
            try:
                async for message in upstream:
                    yield message
                context.set_trailing_metadata(await upstream.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata())
            finally:
                upstream.cancel()

        return grpc.unary_stream_rpc_method_handler(forward)


async def serve(target: str, port: int) -> None:
    """Forward from `port` to `target` for ever."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.max_concurrent_streams", 100_000))
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((_Forward(grpc.aio.insecure_channel(target, options=options)),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
