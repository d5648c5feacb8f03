"""A scripted HTTP/2 server on a thread: the h2 library's strict state machine as the peer of the client under test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from servers.rpc.inference_pb2 import GenerateChunk

OK_TRAILERS = (("grpc-status", "0"),)


def grpc_message(payload: bytes) -> bytes:
    """`payload` as one length-prefixed gRPC message."""
    return b"\x00" + len(payload).to_bytes(4, "big") + payload


def chunk(ids: Sequence[int], emit_ns: Sequence[int] = ()) -> bytes:
    """One GenerateChunk as a gRPC message."""
    return grpc_message(GenerateChunk(token_ids=ids, emit_ns=emit_ns).SerializeToString())


@dataclass
class Exchange:
    """One request, and the ways to answer it."""

    link: Link
    stream_id: int
    headers: dict[str, str]
    body: bytes = b""

    def start(self, status: str = "200", extra: Sequence[tuple[str, str]] = (), *, end: bool = False) -> None:
        """Response headers are sent; with `end` they are the whole answer."""
        fields = [(":status", status), ("content-type", "application/grpc"), *extra]
        self.link.state.send_headers(self.stream_id, fields, end_stream=end)
        self.link.flush()

    def data(self, payload: bytes, *, end: bool = False) -> None:
        """One DATA frame, which must fit the window."""
        self.link.state.send_data(self.stream_id, payload, end_stream=end)
        self.link.flush()

    def all_data(self, payload: bytes) -> None:
        """As many DATA frames as needed, as the client's windows allow; then OK trailers."""
        self.link.pending[self.stream_id] = payload
        self.link.pump()

    def trailers(self, fields: Sequence[tuple[str, str]] = OK_TRAILERS) -> None:
        """The stream ends with these trailers."""
        self.link.state.send_headers(self.stream_id, list(fields), end_stream=True)
        self.link.flush()

    def answer(self, *messages: bytes, trailers: Sequence[tuple[str, str]] = OK_TRAILERS) -> None:
        """A whole good answer."""
        self.start()
        for message in messages:
            self.data(message)
        self.trailers(trailers)


@dataclass
class Link:
    """One accepted connection and what was seen on it."""

    peer: Peer
    sock: socket.socket
    state: h2.connection.H2Connection
    open: dict[int, Exchange] = field(default_factory=dict)
    resets: list[tuple[int, int]] = field(default_factory=list)
    pings: int = 0
    window_updates: int = 0
    most_open: int = 0
    pending: dict[int, bytes] = field(default_factory=dict)
    slice_bytes: int = 0  # write to the socket in slices of this size; 0: whole

    def flush(self) -> None:
        """What the state machine has to say is on the wire."""
        out = self.state.data_to_send()
        size = self.slice_bytes or max(1, len(out))
        for start in range(0, len(out), size):
            self.sock.sendall(out[start : start + size])

    def pump(self) -> None:
        for stream_id, payload in list(self.pending.items()):
            left = payload
            while left:
                room = min(
                    self.state.local_flow_control_window(stream_id), self.state.max_outbound_frame_size, len(left)
                )
                if room <= 0:
                    break
                self.state.send_data(stream_id, left[:room])
                left = left[room:]
            self.pending[stream_id] = left
            if not left:
                del self.pending[stream_id]
                self.state.send_headers(stream_id, list(OK_TRAILERS), end_stream=True)
        self.flush()

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
                self.pump()
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
            self.pending.pop(event.stream_id, None)
            self.resets.append((event.stream_id, int(event.error_code)))
            self.peer.reset_seen.set()
        elif isinstance(event, h2.events.PingAckReceived):
            self.pings += 1
            self.peer.ping_seen.set()
        elif isinstance(event, h2.events.WindowUpdated):
            self.window_updates += 1


class Peer:
    """Listens on a port of its own until the block ends; `answer` runs for each complete request."""

    def __init__(self, answer: Callable[[Exchange], None], settings: dict[int, int] | None = None) -> None:
        self.answer = answer
        self.settings = settings or {}
        self.links: list[Link] = []
        self.requests: list[Exchange] = []
        self.problems: list[str] = []  # protocol errors that the client made
        self.reset_seen = threading.Event()
        self.ping_seen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                config = h2.config.H2Configuration(client_side=False, header_encoding=None)
                link = Link(self, sock, h2.connection.H2Connection(config))
                self.links.append(link)
                threading.Thread(target=link.serve, daemon=True).start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
