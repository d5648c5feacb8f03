"""A Generate server that is never the bottleneck: no model, no library, frames made ahead and written in batches.

    python -m benchmarks.null_server --tokens-per-s 20     # every stream gets 20 tokens/s
    python -m benchmarks.null_server                       # every answer comes whole, at once

It prints {"port": …} and then takes commands on stdin, one a line, each with a JSON line for an answer: `status` (how
many requests came and how many streams are on) and `report FILE.npz` (what was sent when, and how late this server was
itself). It ends with its stdin. Times are servers.clock's, so a parent that passes its anchor on reads one clock.

A token's emit_ns, and tailgate-end-ns in the trailers, are taken right before the bytes go to the socket: what a client
stamps later than that is the wire's and the client's own lag. Whatever the client's socket cannot take waits here with
its old stamp. Flow control is not followed: answers are far smaller than the windows of the clients that are measured.
Requests are told apart by their message alone and their headers are never decoded, so this server speaks Generate and
the health check that a proxy sends, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import socket
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

if not __package__:  # as a script: the repository is importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frames import FIXED64, Answers, token_head
from loadtests.clients import frames
from loadtests.clients.frames import HEAD, UINT32
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest

TICK_NS: Final = 1_000_000
_READ_BYTES: Final = 262_144
_TOGETHER = 16  # answers that share one stamp and one write: about 0.1 ms of work
_HEALTH_CHECK: Final = b"\x0a\x15tailgate.v1.Inference"  # HealthCheckRequest{service}
_REFILL: Final = 1 << 29


class Pace:
    """The instants of tokens: each stream has one of `phases` phases, `tick_ns` apart, and a token every round."""

    def __init__(self, tokens_per_s: float, *, base_ns: int) -> None:
        self.phases = max(1, round(1e9 / tokens_per_s / TICK_NS))
        self.tick_ns = 1e9 / tokens_per_s / self.phases
        self.base_ns = base_ns

    def due_ns(self, tick: int) -> int:
        """When tick number `tick` is due."""
        return self.base_ns + round(tick * self.tick_ns)

    def after(self, at_ns: int) -> int:
        """The first tick that is due later than `at_ns`."""
        tick = int((at_ns - self.base_ns) / self.tick_ns)
        while self.due_ns(tick) <= at_ns:
            tick += 1
        return tick


class _Peer:
    """One connection: its unread bytes, and what its socket's buffer could not take yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.left = b""
        self.out = bytearray()
        self.bodies: dict[int, bytes] = {}  # messages of requests that have not ended
        self.live: dict[int, _Group] = {}  # the group that each paced stream is in
        self.unacknowledged = 0
        self.closed = False

    def send(self, data: bytes) -> None:
        """`data` is on its way in order."""
        full = bool(self.out)  # the loop drains it once the socket takes more
        self.out += data
        if not full:
            self.drain()

    def drain(self) -> None:
        """As much as the socket takes now has left."""
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
        """The stream gets a token each round, the last at `last_tick`."""
        self.heads[stream_id] = token_head(stream_id, stream_id // 2 % 128)
        self.ends.setdefault(last_tick, []).append((stream_id, tokens, recv_ns))
        self._pieces = None

    def drop(self, stream_id: int) -> None:
        """The stream gets no more."""
        self.heads.pop(stream_id, None)
        self._pieces = None

    def tokens(self, at_ns: int) -> bytes:
        """One token of every stream, stamped `at_ns`."""
        if self._pieces is None:
            self._pieces = [*self.heads.values(), b""]
        return FIXED64.pack(at_ns).join(self._pieces)


class NullServer:
    """Serves on `port` until `run` returns. `tokens_per_s` 0: answers come whole, at once."""

    def __init__(self, *, tokens_per_s: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._answers = Answers()
        self._pace = Pace(tokens_per_s, base_ns=now_ns()) if tokens_per_s else None
        self._peers: dict[int, _Peer] = {}
        self._phases: list[dict[_Peer, _Group]] = [{} for _ in range(self._pace.phases)] if self._pace else []
        self._tick = 0
        self._streaming = 0
        self._waiting: deque[tuple[_Peer, int, int, int]] = deque()  # (peer, stream, tokens, recv)
        # the account
        self._ticks, self._emits = array("q"), array("q")
        self._late = array("q")
        self._names: list[str] = []
        self._first_ticks, self._lengths = array("q"), array("q")
        self._requests = self._answered = 0
        self._commands = b""

    def run(self) -> None:
        """Serve until stdin ends."""
        stdin = sys.stdin.fileno()
        os.set_blocking(stdin, False)
        while True:
            sources = [self._listener.fileno(), stdin, *self._peers]
            full = [number for number, peer in self._peers.items() if peer.out]
            readable, writable, _ = select.select(sources, full, [], self._patience())
            for number in writable:
                self._peers[number].drain()
            # The pace first: a burst of requests must not make a token late.
            self._emit()
            for number in readable:
                if number == stdin:
                    if not self._command(stdin):
                        return
                elif number == self._listener.fileno():
                    self._accept()
                else:
                    self._read(self._peers[number])
                    self._emit()
            self._answer()
            for number in [number for number, peer in self._peers.items() if peer.closed]:
                self._forget(number)

    def _patience(self) -> float | None:
        """Seconds until a token is due."""
        if self._pace is None or not self._streaming:
            return None
        return max(0, self._pace.due_ns(self._tick) - now_ns()) / 1e9

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer = _Peer(sock)
                self._peers[sock.fileno()] = peer
                ample = frames.LARGEST_WINDOW
                settings = (frames.MAX_CONCURRENT_STREAMS, ample), (frames.INITIAL_WINDOW_SIZE, ample)
                values = b"".join(frames.SETTING.pack(*setting) for setting in settings)
                peer.send(frames.frame(frames.SETTINGS, 0, 0, values))
                peer.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(ample - frames.DEFAULT_WINDOW)))

    def _forget(self, number: int) -> None:
        peer = self._peers.pop(number)
        for phase in self._phases:
            phase.pop(peer, None)
        self._streaming -= len(peer.live)
        self._waiting = deque(item for item in self._waiting if item[0] is not peer)
        peer.sock.close()

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
            if kind == frames.DATA:
                payload = data[position + 9 : end]
                if flags & frames.PADDED:
                    payload = frames.without_padding(payload)
                peer.unacknowledged += end - position - 9
                if stream_id in bodies:
                    body = bodies.pop(stream_id) + payload
                    if flags & frames.END_STREAM:
                        self._take(peer, stream_id, body, recv_ns)
                    else:
                        bodies[stream_id] = body
            elif kind == frames.HEADERS:
                bodies[stream_id] = b""  # trailers of a request do not occur: gRPC clients send none
            else:
                self._control(peer, kind, flags, stream_id, data[position + 9 : end])
            position = end
        peer.left = data[position:]
        if peer.unacknowledged > _REFILL:
            peer.send(frames.frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(peer.unacknowledged)))
            peer.unacknowledged = 0

    def _control(self, peer: _Peer, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind in (frames.PING, frames.SETTINGS):
            if not flags & frames.ACK:
                peer.send(frames.frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        elif kind == frames.RST_STREAM:
            peer.bodies.pop(stream_id, None)
            group = peer.live.pop(stream_id, None)
            if group is not None:
                self._streaming -= 1
                group.drop(stream_id)

    def _take(self, peer: _Peer, stream_id: int, body: bytes, recv_ns: int) -> None:
        message = body[5:]
        if message == _HEALTH_CHECK:
            peer.send(self._answers.healthy(stream_id))
            return
        self._requests += 1
        request = GenerateRequest.FromString(message)
        tokens = request.max_tokens or 1
        if self._pace is None:
            self._waiting.append((peer, stream_id, tokens, recv_ns))
            if len(self._waiting) >= _TOGETHER:
                self._answer()
        else:
            peer.send(self._answers.opening(stream_id))
            self._join(peer, stream_id, request.request_id, tokens, recv_ns)

    def _join(self, peer: _Peer, stream_id: int, name: str, tokens: int, recv_ns: int) -> None:
        """The stream's tokens go out at its phase's ticks, from the next tick on."""
        assert self._pace is not None
        if not self._streaming:
            self._tick = max(self._tick, self._pace.after(now_ns()))
        self._streaming += 1
        first = self._tick
        phase = self._phases[first % self._pace.phases]
        group = phase.get(peer)
        if group is None:
            group = phase[peer] = _Group()
        group.add(stream_id, tokens=tokens, recv_ns=recv_ns, last_tick=first + (tokens - 1) * self._pace.phases)
        peer.live[stream_id] = group
        self._names.append(name)
        self._first_ticks.append(first)
        self._lengths.append(tokens)

    def _emit(self) -> None:
        """Every tick that is due has been sent."""
        pace = self._pace
        while pace is not None and self._streaming:
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
                    self._answered += 1
                    peer.send(self._answers.ending(stream_id, tokens=tokens, recv_ns=recv_ns, end_ns=at_ns))

    def _answer(self) -> None:
        """Every whole answer has been sent, some at a time, each lot with a stamp of its own."""
        waiting = self._waiting
        while waiting:
            at_ns = now_ns()
            lots: dict[_Peer, list[bytes]] = {}
            stamp = FIXED64.pack(at_ns)
            for peer, stream_id, tokens, recv_ns in [waiting.popleft() for _ in range(min(_TOGETHER, len(waiting)))]:
                lot = lots.setdefault(peer, [])
                lot.append(self._answers.opening(stream_id))
                lot.extend([token_head(stream_id, 1) + stamp] * tokens)
                lot.append(self._answers.ending(stream_id, tokens=tokens, recv_ns=recv_ns, end_ns=at_ns))
                self._answered += 1
            for peer, lot in lots.items():
                peer.send(b"".join(lot))

    def _command(self, stdin: int) -> bool:
        """Whether to go on: commands that came are carried out."""
        got = os.read(stdin, 65_536)
        if not got:
            return False
        *lines, self._commands = (self._commands + got).split(b"\n")
        for line in lines:
            name, *values = line.decode().split()
            answer: dict[str, object] = {}
            if name == "status":
                answer = {"requests": self._requests, "streaming": self._streaming}
            elif name == "report":
                answer = self.report(Path(values[0]))
            print(json.dumps(answer), flush=True)
        return True

    def report(self, path: Path) -> dict[str, object]:
        """`path` holds what was sent when; the answer says how late this server was, in ms."""
        np.savez(
            path,
            ticks=np.array(self._ticks),
            emits=np.array(self._emits),
            names=np.array(self._names, dtype=np.str_),
            first_ticks=np.array(self._first_ticks),
            tokens=np.array(self._lengths),
            phases=np.array(self._pace.phases if self._pace else 0),
        )
        return {
            "requests": self._requests,
            "answered": self._answered,
            "tick_lag_ms": _quantiles(self._late),
        }


def _quantiles(values: array[int]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99, top = np.quantile(np.array(values, dtype=np.int64), (0.5, 0.99, 1.0)) / 1e6
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "max": round(float(top), 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.null_server", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="of each stream; 0: answers come whole")
    options = parser.parse_args(arguments)
    server = NullServer(tokens_per_s=options.tokens_per_s)
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps({"port": server.port}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
