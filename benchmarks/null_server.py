"""A Generate server that is never the bottleneck: no model, no library, frames made ahead and written in batches.

    python -m benchmarks.null_server --report FILE.npz --tokens-per-s 20     # every stream gets 20 tokens/s

It prints {"port": …} and ends at a line on its stdin: then FILE.npz holds what was sent when, and how late it was
itself. Times are tailgate.servers.clock's, so a parent that passes its anchor on reads one clock.

A token's emit_ns, and tailgate-end-ns in the trailers, are taken right before the bytes go to the socket: what a client
stamps later than that is the wire's and the client's own lag. Whatever the client's socket cannot take waits here with
its old stamp. Flow control is not followed: answers are far smaller than the windows of the clients that are measured,
and requests than the 2 GiB that they have here.
Only the message of a request says what it asks, and headers are never decoded, so this server speaks Generate and
the health check that a proxy sends, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import select
import socket
import struct
import sys
from array import array
from pathlib import Path
from typing import Final

import numpy as np

from tailgate.loadtests.clients import frames
from tailgate.loadtests.clients.frames import DATA, END_HEADERS, END_STREAM, HEAD, HEADERS, UINT32, frame
from tailgate.servers.clock import now_ns
from tailgate.servers.rpc.inference_pb2 import GenerateRequest

TICK_NS: Final = 1_000_000
_READ_BYTES: Final = 262_144
_HEALTH_CHECK: Final = b"\x0a\x15tailgate.v1.Inference"  # HealthCheckRequest{service}


class Pace:
    """The instants of tokens: each stream has one of `phases` phases, `tick_ns` apart, and a token every round."""

    def __init__(self, tokens_per_s: float, *, base_ns: int) -> None:
        self.phases = max(1, round(1e9 / tokens_per_s / TICK_NS))
        self.tick_ns = 1e9 / tokens_per_s / self.phases
        self.base_ns = base_ns

    def due_ns(self, tick: int) -> int:
        """Return when tick number `tick` is due."""
        return self.base_ns + round(tick * self.tick_ns)

    def after(self, at_ns: int) -> int:
        """Return the first tick that is due after `at_ns`."""
        tick = int((at_ns - self.base_ns) / self.tick_ns)
        while self.due_ns(tick) <= at_ns:
            tick += 1
        return tick


_FIXED64: Final = struct.Struct("<Q")


def _text(value: bytes) -> bytes:
    """Encode a header's name or value of at most 126 bytes, not Huffman coded, as gRPC does (RFC 7541, section 5.2)."""
    return bytes((len(value),)) + value


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a header that leaves no entry in the peer's table (RFC 7541, section 6.2.2)."""
    return b"\x00" + _text(name) + _text(value)


def _token_head(stream_id: int, token: int) -> bytes:
    """Encode a DATA frame with one token below 128, except its last 8 bytes, which are emit_ns as _FIXED64."""
    # GenerateChunk: token_ids (field 1, packed varint), emit_ns (field 2, packed fixed64)
    message = bytes((0x0A, 1, token, 0x12, 8))
    size = len(message) + _FIXED64.size
    return HEAD.pack(0, 5 + size, DATA, 0, stream_id) + b"\x00" + UINT32.pack(size) + message


# What stands in the trailers of every answer alike.
_TRAILERS: Final = {
    b"grpc-status": b"0",
    b"grpc-message": b"",
    b"tailgate-arm": b"null",
    b"tailgate-replica": b"null-0",
    b"tailgate-queue-ns": b"184203",
    b"tailgate-prefill-ns": b"2048113",
    b"tailgate-decode-ns": b"91820441",
    b"tailgate-compile-stall-ns": b"0",
    b"tailgate-batch-id": b"48213",
    b"tailgate-batch-size": b"7",
    b"tailgate-padded-batch": b"8",
    b"tailgate-padded-length": b"512",
    b"tailgate-prompt-tokens": b"16",
}
_ALIKE: Final = b"".join(_literal(name, value) for name, value in _TRAILERS.items())
_OPEN: Final = b"\x88" + _literal(b"content-type", b"application/grpc")  # static table: ":status: 200"


def _ending(stream_id: int, *, tokens: int, recv_ns: int, end_ns: int) -> bytes:
    """Encode the trailers that end a good answer."""
    own = (b"output-tokens", tokens), (b"recv-ns", recv_ns), (b"end-ns", end_ns)
    block = _ALIKE + b"".join(_literal(b"tailgate-" + name, b"%d" % value) for name, value in own)
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


def _healthy(stream_id: int) -> bytes:
    """Encode a whole answer of grpc.health.v1: SERVING."""
    message = b"\x00" + UINT32.pack(2) + b"\x08\x01"
    end = frame(HEADERS, END_HEADERS | END_STREAM, stream_id, _literal(b"grpc-status", b"0"))
    return frame(HEADERS, END_HEADERS, stream_id, _OPEN) + frame(DATA, 0, stream_id, message) + end


class _Peer:
    """One connection: its unread bytes, and what its socket's buffer could not take yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.left = b""
        self.out = bytearray()
        self.bodies: dict[int, bytes] = {}  # messages of requests that have not ended
        self.live: dict[int, _Group] = {}  # the group that each stream is in
        self.closed = False

    def send(self, data: bytes) -> None:
        """Send `data` in order."""
        full = bool(self.out)  # the loop drains it once the socket takes more
        self.out += data
        if not full:
            self.drain()

    def drain(self) -> None:
        """Send as much as the socket takes now."""
        try:
            del self.out[: self.sock.send(self.out)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True


class _Group:
    """The streams of one connection in one phase: their frames are one join, with the time between the pieces."""

    def __init__(self) -> None:
        self.heads: dict[int, bytes] = {}  # by stream
        self.ends: dict[int, list[tuple[int, int, int]]] = {}  # by last tick: (stream, tokens, recv_ns)
        self._pieces: list[bytes] | None = None

    def add(self, stream_id: int, *, tokens: int, recv_ns: int, last_tick: int) -> None:
        """Give the stream a token each round, the last at `last_tick`."""
        self.heads[stream_id] = _token_head(stream_id, stream_id // 2 % 128)
        self.ends.setdefault(last_tick, []).append((stream_id, tokens, recv_ns))
        self._pieces = None

    def drop(self, stream_id: int) -> None:
        """Send the stream no more tokens."""
        self.heads.pop(stream_id, None)
        self._pieces = None

    def tokens(self, at_ns: int) -> bytes:
        """Return one token of every stream, stamped `at_ns`."""
        if self._pieces is None:
            self._pieces = [*self.heads.values(), b""]
        return _FIXED64.pack(at_ns).join(self._pieces)


class NullServer:
    """Serves on `port` until `run` returns."""

    def __init__(self, *, tokens_per_s: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._pace = Pace(tokens_per_s, base_ns=now_ns())
        self._peers: dict[int, _Peer] = {}
        self._phases: list[dict[_Peer, _Group]] = [{} for _ in range(self._pace.phases)]
        self._tick = 0
        self._streaming = 0
        # the account
        self._ticks, self._emits, self._late = array("q"), array("q"), array("q")
        self._names: list[str] = []
        self._first_ticks, self._lengths = array("q"), array("q")

    def run(self) -> None:
        """Serve until a line comes on stdin, or stdin ends."""
        stdin, listener = sys.stdin.fileno(), self._listener.fileno()
        while True:
            full = [number for number, peer in self._peers.items() if peer.out]
            due_s = max(0, self._pace.due_ns(self._tick) - now_ns()) / 1e9 if self._streaming else None
            readable, writable, _ = select.select([listener, stdin, *self._peers], full, [], due_s)
            for number in writable:
                self._peers[number].drain()
            # The pace first: a burst of requests must not make a token late.
            self._emit()
            for number in readable:
                if number == stdin:
                    return
                if number == listener:
                    self._accept()
                else:
                    self._read(self._peers[number])
                    self._emit()
            for number in [number for number, peer in self._peers.items() if peer.closed]:
                peer = self._peers.pop(number)
                for phase in self._phases:
                    phase.pop(peer, None)
                self._streaming -= len(peer.live)
                peer.sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer = _Peer(sock)
                self._peers[sock.fileno()] = peer
                ample = 2**31 - 1  # RFC 9113, 6.9.1
                settings = (frames.MAX_CONCURRENT_STREAMS, ample), (frames.INITIAL_WINDOW_SIZE, ample)
                values = b"".join(frames.SETTING.pack(*setting) for setting in settings)
                peer.send(frame(frames.SETTINGS, 0, 0, values))
                peer.send(frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(ample - frames.DEFAULT_WINDOW)))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer.closed = True
            return
        recv_ns = now_ns()
        data = peer.left + data if peer.left else data
        position, size = 0, len(data)
        if data.startswith(b"PRI"):
            if size < len(frames.PREFACE):
                peer.left = data
                return
            position = len(frames.PREFACE)
        unpack, bodies = HEAD.unpack_from, peer.bodies
        while size - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            end = position + 9 + (high << 16 | low)
            if end > size:
                break
            if kind == DATA:
                payload = data[position + 9 : end]
                if flags & frames.PADDED:
                    payload = frames.without_padding(payload)
                if stream_id in bodies:
                    body = bodies.pop(stream_id) + payload
                    if flags & END_STREAM:
                        self._take(peer, stream_id, body[5:], recv_ns)
                    else:
                        bodies[stream_id] = body
            elif kind == HEADERS:
                bodies[stream_id] = b""  # trailers of a request do not occur: gRPC clients send none
            else:
                self._control(peer, kind, flags, stream_id, data[position + 9 : end])
            position = end
        peer.left = data[position:]

    def _control(self, peer: _Peer, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind in (frames.PING, frames.SETTINGS):
            if not flags & frames.ACK:
                peer.send(frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        elif kind == frames.RST_STREAM:
            peer.bodies.pop(stream_id, None)
            group = peer.live.pop(stream_id, None)
            if group is not None:
                self._streaming -= 1
                group.drop(stream_id)

    def _take(self, peer: _Peer, stream_id: int, message: bytes, recv_ns: int) -> None:
        """Start to send the tokens of a request at its phase's ticks, from the next tick on."""
        if message == _HEALTH_CHECK:
            peer.send(_healthy(stream_id))
            return
        request = GenerateRequest.FromString(message)
        tokens = request.max_tokens or 1
        peer.send(frame(HEADERS, END_HEADERS, stream_id, _OPEN))
        if not self._streaming:
            self._tick = max(self._tick, self._pace.after(now_ns()))
        self._streaming += 1
        first = self._tick
        group = self._phases[first % self._pace.phases].setdefault(peer, _Group())
        group.add(stream_id, tokens=tokens, recv_ns=recv_ns, last_tick=first + (tokens - 1) * self._pace.phases)
        peer.live[stream_id] = group
        self._names.append(request.request_id)
        self._first_ticks.append(first)
        self._lengths.append(tokens)

    def _emit(self) -> None:
        """Send every tick that is due."""
        pace = self._pace
        while self._streaming:
            tick, at_ns = self._tick, now_ns()
            due_ns = pace.due_ns(tick)
            if at_ns < due_ns:
                return
            self._tick = tick + 1
            self._ticks.append(tick)
            self._emits.append(at_ns)
            self._late.append(at_ns - due_ns)
            for peer, group in self._phases[tick % pace.phases].items():
                if group.heads:
                    peer.send(group.tokens(at_ns))
                for stream_id, tokens, recv_ns in group.ends.pop(tick, ()):
                    if peer.live.pop(stream_id, None) is None:
                        continue
                    self._streaming -= 1
                    group.drop(stream_id)
                    peer.send(_ending(stream_id, tokens=tokens, recv_ns=recv_ns, end_ns=at_ns))

    def report(self, path: Path) -> None:
        """Write to `path` when the tokens of each request were sent, 0 for those that were not, and how late each tick
        was."""
        ticks, emits, rounds = np.array(self._ticks), np.array(self._emits), self._pace.phases
        streams = zip(self._first_ticks, self._lengths, strict=True)
        wanted = np.concatenate([first + np.arange(tokens) * rounds for first, tokens in streams])
        place = np.searchsorted(ticks, wanted).clip(max=len(ticks) - 1)
        np.savez(
            path,
            names=np.array(self._names, dtype=np.str_),
            tokens=np.array(self._lengths),
            token_ns=np.where(ticks[place] == wanted, emits[place], 0),
            late=np.array(self._late),
        )


def main() -> None:
    """Serve until a line comes on stdin, or stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.null_server")
    parser.add_argument("--tokens-per-s", type=float, default=1000.0, help="of each stream")
    parser.add_argument("--report", type=Path, required=True, help="where the account is written at the end")
    options = parser.parse_args()
    server = NullServer(tokens_per_s=options.tokens_per_s)
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps({"port": server.port}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    server.report(options.report)


if __name__ == "__main__":
    main()
