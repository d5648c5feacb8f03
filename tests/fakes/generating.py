"""Calls that keep what they receive, so that tests can look at the tokens; those of the load keep their times alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gevent.event import Event

from loadtests.clients.grpc_call import GrpcCall
from loadtests.clients.inference import InferenceClient
from loadtests.clients.metadata import Metadata, encode_metadata
from servers.rpc.inference_pb2 import GenerateChunk, GenerateRequest


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
    """A client whose calls keep what they receive."""
    return InferenceClient(target, call=KeepingCall, **settings)


def generate(
    client: InferenceClient, request: GenerateRequest, *, metadata: Metadata = (), timeout_s: float | None = None
) -> Any:
    """The started call of `request`: a KeepingCall where the client makes such."""
    return client.start(request.SerializeToString(), headers=encode_metadata(metadata), timeout_s=timeout_s)
