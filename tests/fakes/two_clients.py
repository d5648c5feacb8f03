"""The same calls over stock grpcio under gevent: a second opinion on the frame client, for few streams.

It takes a message's time when grpcio hands the message over, later than the frame client, by the time in the queues of
grpcio and gevent. Below a hundred streams both should agree: docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gevent
import grpc
import grpc.experimental.gevent as grpc_gevent
from gevent import monkey

from loadtests.clients.call import Call
from loadtests.clients.grpc_call import LARGEST_MESSAGE, GrpcCall
from loadtests.clients.headers import HeaderDecoder
from loadtests.clients.inference import GENERATE_PATH, InferenceClient
from loadtests.clients.metadata import encode_metadata
from loadtests.external.addresses import parse_target
from loadtests.external.client_security import OPEN, SecurityConfig, bearer_token
from loadtests.external.grpc_channel import open_channel
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest


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


monkey.patch_all()


Client = InferenceClient | GrpcioClient
CLIENTS: dict[str, type[Client]] = {"frames": InferenceClient, "grpcio": GrpcioClient}


def ask(text: str = "hello", tokens: int = 3) -> bytes:
    return GenerateRequest(request_id="r", text=text, max_tokens=tokens).SerializeToString()


def wait(calls: list[Call]) -> None:
    with gevent.Timeout(60):
        while not all(call.done for call in calls):
            gevent.sleep(0.005)


def paced(client: Client, streams: int, tokens: int) -> dict[str, Any]:
    """Run streams that start 10 ms apart: counts, statuses, median first-token time and gap in ms."""
    calls, ended = [], []
    for number in range(streams):
        headers = encode_metadata([("x-number", str(number))])
        calls.append(
            client.start(ask(tokens=tokens), headers=headers, timeout_s=30.0, on_done=ended.append, tag=number)
        )
        gevent.sleep(0.01)
    wait(calls)
    gaps = [later - sooner for call in calls for sooner, later in zip(call.token_ns, call.token_ns[1:], strict=False)]
    return {
        "statuses": sorted({call.status for call in calls}),
        "tokens": [call.output_tokens for call in calls],
        "tags": sorted(call.tag for call in ended),
        "ttft_ms": statistics.median(((call.first_token_ns or 0) - call.sent_ns) / 1e6 for call in calls),
        "itl_ms": statistics.median(gaps) / 1e6,
        "trailing": sorted(calls[0].trailing_metadata),
        "initial": sorted(calls[0].initial_metadata),
        "ordered": all(
            call.start_ns <= call.sent_ns <= call.token_ns[0] <= call.token_ns[-1] <= call.end_ns for call in calls
        ),
    }


def in_turns(options: dict[str, Any], security: SecurityConfig) -> dict[str, Any]:
    """Run both clients by turns, after one round that warms the server up; times over all rounds."""
    clients = {name: kind(options["target"], security=security) for name, kind in CLIENTS.items()}
    out: dict[str, Any] = {name: {"connect": client.connect(10.0)} for name, client in clients.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    for number in range(options.get("rounds", 1) + 1):
        for name, client in clients.items():
            seen = paced(client, options["streams"], options["tokens"])
            if number:
                rounds[name].append(seen)
    for name, client in clients.items():
        out[name] |= rounds[name][0]
        # A disturbance makes a wait longer; it makes gaps shorter too, when two tokens are late together.
        out[name]["ttft_ms"] = min(item["ttft_ms"] for item in rounds[name])
        out[name]["itl_ms"] = statistics.median(item["itl_ms"] for item in rounds[name])
        client.close()
    return out


def ends(client: Client) -> dict[str, Any]:
    failed = client.start(ask("RESOURCE_EXHAUSTED"), timeout_s=30.0)
    late = client.start(ask(tokens=100_000), timeout_s=0.3)
    dropped = client.start(ask(tokens=100_000), timeout_s=30.0)
    while not dropped.output_tokens:
        gevent.sleep(0.001)
    dropped.cancel()
    running = client.start(ask(tokens=100_000), timeout_s=30.0)
    wait([failed, late, dropped])
    gevent.sleep(0.1)
    answered = client.start(ask("hi"), timeout_s=30.0)
    wait([answered])
    client.close()
    after = client.start(ask())
    wait([running, after])
    return {
        "failed": [failed.status, failed.error],
        "late": late.status,
        "dropped": [dropped.status, dropped.error],
        "answered": [answered.status, answered.output_tokens],
        "running": [running.status, running.error],
        "after": [after.status, after.error],
    }


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    security = SecurityConfig(**options.get("security", {}))
    if options["script"] == "paced":
        out = in_turns(options, security)
    else:
        out = {}
        for name, kind in CLIENTS.items():
            client = kind(options["target"], security=security)
            out[name] = {"connect": client.connect(10.0)} | ends(client)
    print(json.dumps(out))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
