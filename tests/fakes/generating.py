"""Calls that keep the tokens that they receive; those of the load keep only their times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gevent
from gevent.event import Event

from loadtests.clients.grpc_call import GrpcCall
from loadtests.clients.inference import InferenceClient
from loadtests.clients.metadata import Metadata, encode_metadata
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateChunk, GenerateRequest
from tests.fakes.http2 import Exchange, Peer, chunk
from tests.fakes.patience import wait_for

until = partial(wait_for, sleep=gevent.sleep, every_s=0.001)  # greenlets run meanwhile


class KeepingCall(GrpcCall):
    """Iterate it for its chunks, each as soon as it came; it ends with the call, whatever its status."""

    __slots__ = ("_came", "_chunks")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._chunks: list[GenerateChunk] = []
        self._came = Event()

    def on_message(self, message: bytes, at_ns: int) -> None:
        super().on_message(message, at_ns)
        if not self.status:
            self._chunks.append(GenerateChunk.FromString(message))
            self._came.set()

    def finish(self, status: str, error: str, at_ns: int) -> None:
        super().finish(status, error, at_ns)
        self._came.set()

    def __iter__(self) -> Iterator[GenerateChunk]:
        position = 0
        while True:
            while position < len(self._chunks):
                yield self._chunks[position]
                position += 1
            if self.status:
                return
            self._came.clear()
            self._came.wait()


def keeping_client(target: str, **settings: Any) -> InferenceClient:
    return InferenceClient(target, call=KeepingCall, **settings)


def generate(
    client: InferenceClient, request: GenerateRequest, *, metadata: Metadata = (), timeout_s: float | None = None
) -> Any:
    return client.start(request.SerializeToString(), headers=encode_metadata(metadata), timeout_s=timeout_s)


def read_slowly(*, peer: dict[str, Any] | None = None, client: dict[str, Any] | None = None) -> tuple[list[float], ...]:
    """Read ten tokens, 10 ms apart, taking 50 ms for each.

    Return how late the client stamped each and how late the reader saw it, in ms. `peer` and `client` are settings.
    """
    sent_at: list[int] = []

    def paced(exchange: Exchange) -> None:
        exchange.start()
        for number in range(10):
            time.sleep(0.01)
            sent_at.append(now_ns())
            exchange.data(chunk([number]))
        exchange.trailers()

    with Peer(paced, **(peer or {})) as listening:
        keeping = keeping_client(listening.target, **(client or {}))
        call = generate(keeping, GenerateRequest(request_id="r", text="hello", max_tokens=10))
        seen_at = []
        for _ in call:
            gevent.sleep(0.05)
            seen_at.append(now_ns())
        keeping.close()
    stamped = [(stamp - sent) / 1e6 for stamp, sent in zip(call.token_ns, sent_at, strict=True)]
    return stamped, [(seen - sent) / 1e6 for seen, sent in zip(seen_at, sent_at, strict=True)]
