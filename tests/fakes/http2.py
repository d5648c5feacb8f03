"""Scripted HTTP/2 servers: one on the strict state machine of the h2 library, one that may break every rule."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gevent
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from tailgate.loadtests.clients.frames import literal
from tailgate.loadtests.clients.grpc_call import GrpcCall
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.servers.rpc.inference_pb2 import GenerateChunk, GenerateRequest
from tests.fakes.http_servers import Listening
from tests.fakes.processes import wait_for

OK_TRAILERS = (("grpc-status", "0"),)


def grpc_message(payload: bytes) -> bytes:
    return b"\x00" + len(payload).to_bytes(4, "big") + payload


def chunk(ids: Sequence[int], emit_ns: Sequence[int] = ()) -> bytes:
    return grpc_message(GenerateChunk(token_ids=ids, emit_ns=emit_ns).SerializeToString())


@dataclass
class Exchange:
    """One request, and the ways to answer it."""

    link: Link
    stream_id: int
    headers: dict[str, str]
    body: bytes = b""

    def start(self, status: str = "200", extra: Sequence[tuple[str, str]] = (), *, end: bool = False) -> None:
        fields = [(":status", status), ("content-type", "application/grpc"), *extra]
        self.link.state.send_headers(self.stream_id, fields, end_stream=end)
        self.link.flush()

    def data(self, payload: bytes, *, end: bool = False) -> None:
        """Send one DATA frame, which must fit the window."""
        self.link.state.send_data(self.stream_id, payload, end_stream=end)
        self.link.flush()

    def trailers(self, fields: Sequence[tuple[str, str]] = OK_TRAILERS) -> None:
        self.link.state.send_headers(self.stream_id, list(fields), end_stream=True)
        self.link.flush()

    def answer(self, *messages: bytes, trailers: Sequence[tuple[str, str]] = OK_TRAILERS) -> None:
        self.start()
        for message in messages:
            self.data(message)
        self.trailers(trailers)

    def reset(self, code: int) -> None:
        self.start()
        self.link.state.reset_stream(self.stream_id, code)
        self.link.flush()


@dataclass
class Link:
    """One accepted connection and what was seen on it."""

    peer: Peer
    sock: socket.socket
    state: h2.connection.H2Connection
    open: dict[int, Exchange] = field(default_factory=dict)
    resets: list[tuple[int, int]] = field(default_factory=list)
    most_open: int = 0

    def flush(self) -> None:
        self.sock.sendall(self.state.data_to_send())

    def serve(self) -> None:
        self.state.initiate_connection()
        self.state.update_settings(self.peer.settings)
        self.flush()
        with contextlib.suppress(OSError, h2.exceptions.ProtocolError):
            while data := self.sock.recv(65_536):
                try:
                    received = self.state.receive_data(data)
                except h2.exceptions.ProtocolError as problem:
                    self.peer.problems.append(repr(problem))
                    raise
                for event in received:
                    self.handle(event)
                self.flush()
        self.sock.close()

    def handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            headers = {key.decode(): value.decode() for key, value in event.headers}
            self.open[event.stream_id] = Exchange(self, event.stream_id, headers)
            self.most_open = max(self.most_open, len(self.open))
        elif isinstance(event, h2.events.DataReceived):
            self.open[event.stream_id].body += event.data
            self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            exchange = self.open[event.stream_id]
            self.peer.requests.append(exchange)
            self.peer.answer(exchange)
            if self.state.streams[event.stream_id].closed:
                self.open.pop(event.stream_id, None)
        elif isinstance(event, h2.events.StreamReset):
            self.open.pop(event.stream_id, None)
            self.resets.append((event.stream_id, int(event.error_code)))
            self.peer.reset_seen.set()


class Peer(Listening):
    """`answer` runs for each complete request."""

    def __init__(
        self,
        answer: Callable[[Exchange], None],
        settings: dict[int, int] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer = answer
        self.tls = tls
        self.settings = settings or {}
        self.links: list[Link] = []
        self.requests: list[Exchange] = []
        self.problems: list[str] = []  # protocol errors that the client made
        self.reset_seen = threading.Event()
        super().__init__()
        self.target = f"https://{self.target}" if tls else self.target

    def connected(self, sock: socket.socket, number: int) -> Callable[[], object] | None:
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:  # the client refuses the certificate
                return None
            self.socks.append(sock)
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.links.append(Link(self, sock, h2.connection.H2Connection(config)))
        return self.links[-1].serve


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def literals(*fields: tuple[str, str]) -> bytes:
    """Return a header block of short literals that need no table."""
    return b"".join(b"\x00" + bytes((len(k),)) + k.encode() + bytes((len(v),)) + v.encode() for k, v in fields)


OK_HEADERS = b"\x88" + literals(("content-type", "application/grpc"))
OK_END = literals(("grpc-status", "0"))


class Wire:
    """A raw connection of the client under test: frames in, any bytes out."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number  # 1 for the first connection
        self.seen: list[tuple[int, int, int, bytes]] = []
        self._buffer = b""

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def greet(self, settings: bytes = b"") -> None:
        """Read the client's preface and send SETTINGS (raw pairs)."""
        while len(self._buffer) < len(_PREFACE):
            self._buffer += self.sock.recv(65_536)
        assert self._buffer.startswith(_PREFACE)
        self._buffer = self._buffer[len(_PREFACE) :]
        self.send(frame(SETTINGS, 0, 0, settings))

    def read(self) -> tuple[int, int, int, bytes]:
        """Return the client's next frame: kind, flags, stream, payload. Raise ConnectionError at the end."""
        while len(self._buffer) < 9 or len(self._buffer) < 9 + int.from_bytes(self._buffer[:3], "big"):
            data = self.sock.recv(65_536)
            if not data:
                raise ConnectionError("the client closed the connection")
            self._buffer += data
        size = int.from_bytes(self._buffer[:3], "big")
        kind, flags, stream_id = struct.unpack(">BBI", self._buffer[3:9])
        payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
        self.seen.append((kind, flags, stream_id, payload))
        return self.seen[-1]

    def request(self) -> int:
        """Return the stream of the next request, once all of it has come."""
        while True:
            kind, flags, stream_id, _ = self.read()
            if kind == DATA and flags & END_STREAM:
                return stream_id

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.read()


class RawPeer(Listening):
    """`script` runs for each connection, then the rest is read."""

    def __init__(self, script: Callable[[Wire], None], port: int = 0) -> None:
        self.wires: list[Wire] = []
        self.failures: list[BaseException] = []
        self._script = script
        super().__init__(port)

    def connected(self, sock: socket.socket, number: int) -> Callable[[], object]:
        self.wires.append(Wire(sock, number))
        return partial(self._serve, self.wires[-1])

    def _serve(self, wire: Wire) -> None:
        try:
            self._script(wire)
            wire.drain()
        except OSError:
            pass
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            wire.sock.close()

    def frames(self, kind: int, number: int = 1) -> list[tuple[int, int, int, bytes]]:
        """Return what the client sent of this kind on its connection `number`, without acknowledgements."""
        return [
            item for item in self.wires[number - 1].seen if item[0] == kind and not (kind in (4, 6) and item[1] & ACK)
        ]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for thread in self.threads:
            thread.join(5.0)
        assert not self.failures, self.failures


until = partial(wait_for, sleep=gevent.sleep, every_s=0.001)  # greenlets run meanwhile


def finished(call: Any) -> Any:
    until(lambda: call.status)
    return call


class KeepingCall(GrpcCall):
    """Keeps its chunks."""

    __slots__ = ("chunks",)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.chunks: list[GenerateChunk] = []

    def on_message(self, message: bytes, at_ns: int) -> None:
        super().on_message(message, at_ns)
        if not self.status:
            self.chunks.append(GenerateChunk.FromString(message))


def keeping_client(target: str, **settings: Any) -> InferenceClient:
    return InferenceClient(target, call=KeepingCall, **settings)


def generate(
    client: InferenceClient,
    request: GenerateRequest,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    timeout_s: float | None = None,
) -> Any:
    headers = b"".join(literal(*field) for field in metadata)
    return client.start(request.SerializeToString(), headers=headers, timeout_s=timeout_s)
