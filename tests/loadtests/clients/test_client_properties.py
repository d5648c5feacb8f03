"""However the bytes of a connection are cut and its streams' frames are mixed, the calls come out the same.

The connection is fed without a network: no greenlet switches, so nothing but the bytes decides.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import gevent
import gevent.socket
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.clients.connection import Connection
from loadtests.clients.frames import ProtocolError
from loadtests.clients.grpc_call import GrpcCall
from loadtests.clients.inference import InferenceClient
from loadtests.clients.metadata import encode_metadata
from servers.rpc.inference_pb2 import GenerateRequest
from tests.fakes import http2 as wire
from tests.fakes.http2 import chunk, frame

FIRST_NS = 1_700_000_000_000_000_000
BODY = GenerateRequest(request_id="r", text="hello", max_tokens=9).SerializeToString()


class DeafSocket:
    """Takes whatever is sent and has nothing to read."""

    def __init__(self) -> None:
        self._pair = socket.socketpair()
        self.sent = b""

    def fileno(self) -> int:
        return self._pair[0].fileno()

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)

    def shutdown(self, how: int) -> None:
        del how

    def close(self) -> None:
        for end in self._pair:
            end.close()


class Fed:
    """A connection with some started calls, fed by hand."""

    def __init__(self, calls: int, **settings: Any) -> None:
        self.sock = DeafSocket()
        self.client = InferenceClient("127.0.0.1:1", **settings)
        self.connection = Connection(self.client, self.sock)  # type: ignore[arg-type]
        self.connection.feed(frame(wire.SETTINGS, 0, 0), FIRST_NS)
        self.client.connections.append(self.connection)
        self.ended: list[GrpcCall] = []
        self.calls = [
            self.client.start(BODY, headers=encode_metadata([("x-number", str(n))]), on_done=self.ended.append)
            for n in range(calls)
        ]

    def close(self) -> None:
        self.connection.reader.kill()
        self.client.close()
        self.sock.close()


def seen(call: GrpcCall) -> tuple[object, ...]:
    """What a call came to, times apart."""
    return (call.status, call.error, call.output_tokens, call.initial_metadata, call.trailing_metadata)


ANSWER = st.fixed_dictionaries(
    {
        "chunks": st.lists(st.lists(st.integers(0, 100_000), max_size=4), max_size=6),
        "headers": st.dictionaries(st.sampled_from(["x-tailgate-arm", "date", "x-a"]), st.text("abc 019", max_size=30)),
        "trailers": st.dictionaries(st.sampled_from(["tailgate-end-ns", "x-b"]), st.text("0123456789", max_size=19)),
        "status": st.sampled_from(["0", "8", "13"]),
        "only": st.booleans(),  # a trailers-only reply
    }
)


def blocks_of(block: bytes, ended: bool, stream_id: int, rng: random.Random) -> bytes:
    """HEADERS and as many CONTINUATION frames as chance wants; nothing may come between them."""
    cuts = sorted(rng.randrange(len(block) + 1) for _ in range(rng.randrange(4)))
    pieces = [block[start:end] for start, end in zip([0, *cuts], [*cuts, len(block)], strict=True)]
    out = b""
    for number, piece in enumerate(pieces):
        flags = wire.END_STREAM if ended and number == 0 else 0
        flags |= wire.END_HEADERS if number == len(pieces) - 1 else 0
        out += frame(wire.CONTINUATION if number else wire.HEADERS, flags, stream_id, piece)
    return out


def stream(answers: list[dict[str, Any]], rng: random.Random) -> bytes:
    """The server's bytes: frames of all streams mixed by chance, each stream's own in order.

    Blocks are compressed in the order in which they are sent, as the shared table asks for.
    """
    encoder = hpack.Encoder()
    plans: list[Iterator[bytes]] = []

    def plan(number: int, answer: dict[str, Any]) -> Iterator[bytes]:
        stream_id = 2 * number + 1
        head = [(":status", "200"), ("content-type", "application/grpc"), *answer["headers"].items()]
        tail = [("grpc-status", answer["status"]), *answer["trailers"].items()]

        def block(fields: list[tuple[str, str]], ended: bool) -> bytes:
            return blocks_of(encoder.encode(fields, huffman=rng.random() < 0.5), ended, stream_id, rng)

        if answer["only"]:
            yield block(head + tail, True)
            return
        if rng.random() < 0.3:
            yield block([(":status", "103")], False)
        yield block(head, False)
        body = b"".join(chunk(ids) for ids in answer["chunks"])
        while body:
            size = rng.randrange(len(body) + 1)
            piece, body = body[:size], body[size:]
            if rng.random() < 0.3:
                pad = rng.randrange(20)
                yield frame(wire.DATA, wire.PADDED, stream_id, bytes((pad,)) + piece + bytes(pad))
            else:
                yield frame(wire.DATA, 0, stream_id, piece)
        yield block(tail, True)

    for number, answer in enumerate(answers):
        plans.append(plan(number, answer))
    out = b""
    while plans:
        chosen = rng.choice(plans)
        try:
            out += next(chosen)
        except StopIteration:
            plans.remove(chosen)
        if rng.random() < 0.1:
            out += frame(wire.PING, 0, 0, b"whenever")
    return out


def expected(answer: dict[str, Any]) -> tuple[str, int]:
    statuses = {"0": "OK", "8": "RESOURCE_EXHAUSTED", "13": "INTERNAL"}
    return statuses[answer["status"]], 0 if answer["only"] else sum(map(len, answer["chunks"]))


@settings(max_examples=150)
@given(answers=st.lists(ANSWER, min_size=1, max_size=5), seed=st.integers(0, 2**32), cuts=st.lists(st.floats(0, 1)))
def test_cuts_and_mixing_change_nothing(answers: list[dict[str, Any]], seed: int, cuts: list[float]) -> None:
    data = stream(answers, random.Random(seed))
    whole, cut = Fed(len(answers)), Fed(len(answers))
    try:
        whole.connection.feed(data, FIRST_NS + 1)
        edges = sorted({0, len(data), *(int(place * len(data)) for place in cuts)})
        for start, end in itertools.pairwise(edges):
            cut.connection.feed(data[start:end], FIRST_NS + 1 + end)
        assert [seen(call) for call in cut.calls] == [seen(call) for call in whole.calls]
        assert [(call.status, call.output_tokens) for call in whole.calls] == [expected(item) for item in answers]
        whole.connection.flush()
        cut.connection.flush()
        assert cut.sock.sent == whole.sock.sent
        assert len(cut.ended) == len(answers)
        for call in cut.calls:
            assert list(call.token_ns) == sorted(call.token_ns)
    finally:
        whole.close()
        cut.close()


@settings(max_examples=20)
@given(answers=st.lists(ANSWER, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_bytes_may_come_one_at_a_time(answers: list[dict[str, Any]], seed: int) -> None:
    fed = Fed(len(answers))
    try:
        for number, byte in enumerate(stream(answers, random.Random(seed))):
            fed.connection.feed(bytes((byte,)), FIRST_NS + number)
        assert [(call.status, call.output_tokens) for call in fed.calls] == [expected(item) for item in answers]
    finally:
        fed.close()


@settings(max_examples=300)
@given(data=st.binary(max_size=200), seed=st.integers(0, 2**32), place=st.floats(0, 1))
def test_garbage_fails_calls_and_raises_nothing_but_a_protocol_error(data: bytes, seed: int, place: float) -> None:
    """A good stream with garbage written over a part of it: each call ends once or goes on, and nothing else breaks."""
    answers = [
        {"chunks": [[1, 2], [3]], "headers": {}, "trailers": {"x-b": "1"}, "status": "0", "only": False} for _ in "ab"
    ]
    good = stream(answers, random.Random(seed))
    start = int(place * len(good))
    bad = good[:start] + data + good[start + len(data) :]
    fed = Fed(2)
    try:
        try:
            fed.connection.feed(bad, FIRST_NS)
        except ProtocolError as problem:
            fed.connection.close("UNAVAILABLE", str(problem))
            # A call that was moved elsewhere by a forged GOAWAY waits for a new connection; all others have ended.
            assert all(call.status or call.restarted for call in fed.calls)
        assert len(fed.ended) == len({id(call) for call in fed.ended})
    finally:
        fed.close()


@settings(max_examples=100)
@given(
    size=st.integers(0, 70_000),
    first=st.integers(0, 70_000),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("stream"), st.integers(1, 30_000)),
            st.tuples(st.just("connection"), st.integers(1, 30_000)),
            st.tuples(st.just("settings"), st.integers(0, 70_000)),
        ),
        max_size=12,
    ),
)
def test_a_request_never_overruns_a_window_and_goes_out_whole(
    size: int, first: int, steps: list[tuple[str, int]]
) -> None:
    """Whatever credit comes, in whatever order: the bytes on the wire stay within both windows, in order, all in."""
    fed = Fed(0)
    try:
        fed.connection.feed(frame(wire.SETTINGS, 0, 0, struct.pack(">HI", 4, first)), FIRST_NS)
        body = bytes(range(256)) * (size // 256 + 1)
        fed.connection.flush()
        fed.sock.sent = b""
        fed.client.start(body[:size])
        stream_credit, connection_credit, initial = first, 65_535, first

        def sent() -> bytes:
            fed.connection.flush()
            data, out = fed.sock.sent, b""
            while data:
                length = int.from_bytes(data[:3], "big")
                out += data[9 : 9 + length] if data[3] == wire.DATA else b""
                data = data[9 + length :]
            return out

        whole = b"\0" + struct.pack(">I", size) + body[:size]
        allowed = 0
        for kind, amount in [("stream", 0), *steps]:
            if kind == "settings":
                stream_credit += amount - initial
                initial = amount
                fed.connection.feed(frame(wire.SETTINGS, 0, 0, struct.pack(">HI", 4, amount)), FIRST_NS)
            elif amount:
                stream_credit += amount if kind == "stream" else 0
                connection_credit += amount if kind == "connection" else 0
                stream_id = 1 if kind == "stream" else 0
                fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", amount)), FIRST_NS)
            # What was allowed once has gone out and cannot be taken back; not a byte more has.
            allowed = max(allowed, min(len(whole), stream_credit, connection_credit))
            assert sent() == whole[:allowed]
        credit = struct.pack(">I", 1 << 20)  # more than all debts together
        fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, 0, credit), FIRST_NS)
        fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, 1, credit), FIRST_NS)
        assert sent() == whole
    finally:
        fed.close()


@pytest.mark.parametrize("size", [1, 9, 10, 100])
def test_all_frames_of_one_read_have_its_time(size: int) -> None:
    fed = Fed(1)
    try:
        answers = [{"chunks": [[1]] * size, "headers": {}, "trailers": {}, "status": "0", "only": False}]
        fed.connection.feed(stream(answers, random.Random(1)), FIRST_NS + 5)
        assert set(fed.calls[0].token_ns) == {FIRST_NS + 5}
        assert fed.calls[0].end_ns == FIRST_NS + 5
    finally:
        fed.close()


def test_what_is_written_in_one_turn_goes_to_the_kernel_in_few_calls_and_soon() -> None:
    fed = Fed(0)
    try:
        fed.connection.flush()
        fed.sock.sent = b""
        sizes: list[int] = []
        send = fed.sock.send
        fed.sock.send = lambda data: (sizes.append(len(data)), send(data))[1]  # type: ignore[method-assign]
        for _ in range(20):
            fed.client.start(BODY)
        assert sizes == []
        gevent.sleep(0)
        assert len(sizes) == 1
        for _ in range(100):  # a burst that never lets go does not hold its first request back to the end
            fed.client.start(BODY)
        assert len(sizes) == 4
        gevent.sleep(0)
        assert len(sizes) == 5
        assert fed.sock.sent.count(BODY) == 120
    finally:
        fed.close()


def test_what_the_kernel_does_not_take_at_once_follows_in_order() -> None:
    near, far = gevent.socket.socketpair()
    near.setblocking(False)
    client = InferenceClient("127.0.0.1:1")
    connection = Connection(client, near)
    client.connections.append(connection)
    connection.feed(frame(wire.SETTINGS, 0, 0), FIRST_NS)
    expected, got = b"", b""
    for number in range(300):  # 3 MB: far more than a socket holds
        piece = frame(0xFE, 0, 0, bytes((number % 256,)) * 10_000)
        expected += piece
        connection.write(piece)
        if number % 50 == 0:
            gevent.sleep(0)
    while not got.endswith(expected[-10_000:]) or len(got) < len(expected):
        data = far.recv(100_000)
        assert data
        got += data
    assert got.endswith(expected)
    client.close()
    far.close()
