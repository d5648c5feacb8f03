"""The same calls over stock grpcio under gevent: a second opinion on the frame client, for few streams.

It takes a message's time when grpcio hands the message over, later than the frame client, by the time in the queues of
grpcio and gevent. Below a hundred streams both should agree: docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gevent
import grpc
import grpc.experimental.gevent as grpc_gevent

from loadtests.clients.grpc_call import LARGEST_MESSAGE, GrpcCall
from loadtests.clients.headers import HeaderDecoder
from loadtests.clients.inference import GENERATE_PATH
from loadtests.external.addresses import parse_target
from loadtests.external.client_security import OPEN, SecurityConfig, bearer_token
from loadtests.external.grpc_channel import open_channel
from servers.clock import now_ns


class GrpcioClient:
    """Calls to one target over one grpcio channel, with the interface of `InferenceClient`.

    Needs a process that gevent has patched, as Locust's is.
    """

    def __init__(self, target: str, *, security: SecurityConfig = OPEN) -> None:
        grpc_gevent.init_gevent()
        address = parse_target(target)
        self.target = address.target
        options = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.enable_retries", 0)]
        self._channel = open_channel(address, security, options)
        self._generate = self._channel.unary_stream(GENERATE_PATH, request_serializer=None, response_deserializer=None)
        token = bearer_token(security)
        self._common: list[tuple[str, str]] = [("authorization", f"Bearer {token}")] if token else []
        self._running: set[GrpcioCall] = set()
        self._closed = False

    def start(
        self,
        body: bytes,
        *,
        headers: bytes = b"",
        timeout_s: float | None = None,
        on_done: Callable[[Any], None] | None = None,
        tag: Any = None,
    ) -> GrpcioCall:
        call = GrpcioCall(headers=headers, body=body, timeout_s=None, on_done=on_done, tag=tag)
        if self._closed:
            call.finish("UNAVAILABLE", "the client is closed", now_ns())
        else:
            self._running.add(call)
            gevent.spawn(self._run, call, body, timeout_s)
        return call

    def connect(self, timeout_s: float | None = None) -> str:
        """Return why there is no connection, or ""."""
        if self._closed:
            return "the client is closed"
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            return f"cannot connect to {self.target} within {timeout_s:g} s"
        return ""

    def close(self) -> None:
        """End every call, CANCELLED if it was running, and close the channel."""
        self._closed = True
        for call in list(self._running):
            call.cancel(error="the client was closed")
        self._channel.close()

    def _run(self, call: GrpcioCall, body: bytes, timeout_s: float | None) -> None:
        try:
            if not call.status:
                self._answer(call, body, timeout_s)
        finally:
            self._running.discard(call)

    def _answer(self, call: GrpcioCall, body: bytes, timeout_s: float | None) -> None:
        metadata = self._common + list(HeaderDecoder(largest_list=1 << 30).decode(call.headers).items())
        call.sent_ns = now_ns()
        try:
            rpc = call.rpc = self._generate(body, timeout=timeout_s, metadata=metadata)
        except ValueError as problem:  # the channel was closed meanwhile
            return call.finish("UNAVAILABLE", str(problem), now_ns())
        with suppress(grpc.RpcError):  # its status is read below
            for message in rpc:
                call.on_message(message, now_ns())
                if call.status:
                    break
        at_ns = now_ns()
        if not call.status:
            call.initial_metadata = _text(rpc.initial_metadata())
            call.trailing_metadata = _text(rpc.trailing_metadata())
            call.finish(rpc.code().name, rpc.details() or "", at_ns)
        return None


class GrpcioCall(GrpcCall):
    __slots__ = ("rpc",)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rpc: grpc.Call | None = None

    def _withdraw(self) -> None:
        if self.rpc is not None:
            self.rpc.cancel()


def _text(metadata: Any) -> dict[str, str]:
    table: dict[str, str] = {}
    for key, value in metadata or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        table[key] = f"{table[key]},{text}" if key in table else text
    return table
