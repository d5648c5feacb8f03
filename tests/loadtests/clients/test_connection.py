"""The client against a strict HTTP/2 peer (h2 on a thread) and against a real gRPC server in a process of its own.

gevent runs here without patching anything: the client uses gevent's sockets directly.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Self

import gevent
import gevent.socket
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.connection import Connection
from tailgate.loadtests.clients.frames import literal
from tailgate.loadtests.clients.grpc_call import GrpcCall
from tailgate.loadtests.clients.headers import HeaderDecoder, HeaderError
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.servers.rpc.inference_pb2 import GenerateRequest
from tests.fakes import http2 as wire
from tests.fakes.http2 import Exchange, Peer, RawPeer, chunk, finished, frame, generate, keeping_client, until
from tests.fakes.inference import Behaviour, serve


def request() -> GenerateRequest:
    return GenerateRequest(request_id="r", text="hello", max_tokens=3)


def ask(peer: Peer | RawPeer, timeout_s: float | None = None, **settings: Any) -> Call:
    """One call of a client of its own."""
    with closing(InferenceClient(peer.target, **settings)) as client:
        return finished(generate(client, request(), timeout_s=timeout_s))


def outcome(answer: Callable[[Exchange], None]) -> Call:
    with Peer(answer) as peer:
        return ask(peer)


def test_tokens_and_metadata_of_a_good_answer_arrive() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start(extra=[("x-tailgate-arm", "eager")])
        for number in range(3):
            exchange.data(chunk([number]))
        exchange.trailers((("grpc-status", "0"), ("tailgate-replica", "eager-0")))

    with Peer(answer) as peer, closing(keeping_client(peer.target)) as client:
        call = generate(client, request(), metadata=[("x-tailgate-arm", "eager")])
        received = [list(item.token_ids) for item in finished(call).chunks]
    assert (received, call.status, call.error) == ([[0], [1], [2]], "OK", "")
    assert call.initial_metadata["x-tailgate-arm"] == "eager"
    assert call.trailing_metadata["tailgate-replica"] == "eager-0"
    assert call.sent_ns <= call.token_ns[0] == call.first_token_ns <= call.token_ns[-1] <= call.end_ns
    sent = peer.requests[0]
    assert sent.headers[":path"] == "/tailgate.v1.Inference/Generate"
    assert sent.headers["x-tailgate-arm"] == "eager"
    assert sent.headers["te"] == "trailers"
    assert GenerateRequest.FromString(sent.body[5:]) == request()
    assert not peer.problems


def test_coalesced_tokens_keep_the_servers_gaps_but_never_precede_the_chunk_before() -> None:
    ms = 1_000_000

    def answer(exchange: Exchange) -> None:
        exchange.start()
        exchange.data(chunk([1, 2], [0, 5 * ms]))
        time.sleep(0.05)
        exchange.data(chunk([3, 4, 5], [10 * ms, 20 * ms, 30 * ms]))
        exchange.data(chunk([6, 7], [40 * ms, 9_000 * ms]))
        exchange.trailers()

    times = outcome(answer).token_ns
    assert times[0] == times[1]  # both are new to the user when the first chunk comes
    assert (times[4] - times[3], times[3] - times[2]) == (10 * ms, 10 * ms)
    assert times[5] == times[4]  # 8.96 s before its chunk would be long before the chunk before it
    assert list(times) == sorted(times)


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (
            lambda stream: stream.start(
                extra=[("grpc-status", "8"), ("grpc-message", "queue full: 100%25 of 128%0A%E2%80%94 retry")], end=True
            ),
            *("RESOURCE_EXHAUSTED", "queue full: 100% of 128 — retry"),
        ),
        (lambda stream: stream.start("503", end=True), "UNAVAILABLE", "HTTP status 503"),
        (lambda stream: stream.start("404", end=True), "NOT_FOUND", "HTTP status 404"),
        (lambda stream: stream.start("200", end=True), "UNKNOWN", "without grpc-status"),
        (lambda stream: stream.answer(chunk([1, 2, 3])[:-1]), "INTERNAL", "inside a message"),
        (lambda stream: stream.reset(7), "UNAVAILABLE", "error 7"),
        (lambda stream: stream.reset(8), "CANCELLED", "error 8"),
        (lambda stream: stream.reset(11), "RESOURCE_EXHAUSTED", "error 11"),
        (lambda stream: stream.reset(12), "PERMISSION_DENIED", "error 12"),
        (lambda stream: stream.reset(2), "INTERNAL", "error 2"),
    ],
)
def test_an_end_that_is_not_ok_has_a_status_and_a_reason(
    answer: Callable[[Exchange], None], status: str, error: str
) -> None:
    call = outcome(answer)
    assert (call.status, call.first_token_ns, call.output_tokens) == (status, None, 0)
    assert error in call.error


def test_deadline_is_sent_and_enforced() -> None:
    with Peer(lambda exchange: exchange.start()) as peer:
        call = ask(peer, timeout_s=0.15)
        until(peer.reset_seen.is_set)
    assert call.status == "DEADLINE_EXCEEDED"
    assert peer.links[0].resets == [(1, 8)]
    assert (call.end_ns - call.start_ns) / 1e9 >= 0.14
    sent = peer.requests[0].headers["grpc-timeout"]
    assert sent.endswith("m")
    assert 1 <= int(sent[:-1]) <= 150


def test_lost_connection_ends_calls_and_the_next_call_reconnects() -> None:
    def answer(exchange: Exchange) -> None:
        if len(peer.links) == 1:
            exchange.start()
            exchange.link.sock.shutdown(socket.SHUT_RDWR)
        else:
            exchange.answer(chunk([1]))

    with Peer(answer) as peer, closing(InferenceClient(peer.target)) as client:
        lost = finished(generate(client, request()))
        again = finished(generate(client, request()))
    assert lost.status == "UNAVAILABLE"
    assert "closed the connection" in lost.error
    assert again.status == "OK"


def test_refused_connection_is_a_status_and_heals_when_the_server_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = InferenceClient(f"127.0.0.1:{port}", retry_s=0.05)
    calls = [generate(client, request()) for _ in range(200)]
    assert {finished(call).status for call in calls} == {"UNAVAILABLE"}
    assert f"127.0.0.1:{port}" in calls[0].error
    assert "refused" in calls[0].error
    with serve(Behaviour(), port=port):
        gevent.sleep(0.06)
        assert finished(generate(client, request(), timeout_s=5)).status == "OK"
    client.close()


@pytest.mark.parametrize("connections", [1, 2])
def test_stream_limit_is_respected(connections: int) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start()

        def end() -> None:
            time.sleep(0.02)
            with lock:
                exchange.link.open.pop(exchange.stream_id, None)
                exchange.trailers()

        threading.Thread(target=end, daemon=True).start()

    lock = threading.Lock()
    with Peer(answer, {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1}) as peer:
        client = InferenceClient(peer.target, max_connections=connections)
        calls = [generate(client, request()) for _ in range(9)]
        assert {finished(call).status for call in calls} == {"OK"}
        client.close()
    assert len(peer.links) == connections
    assert [link.most_open for link in peer.links] == [1] * connections
    assert not peer.problems


def test_call_that_waits_for_a_stream_keeps_its_deadline() -> None:
    with Peer(lambda exchange: exchange.start(), {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1}) as peer:
        client = InferenceClient(peer.target, max_connections=1)
        generate(client, request())
        waiting = finished(generate(client, request(), timeout_s=0.1))
        client.close()
    assert waiting.status == "DEADLINE_EXCEEDED"
    assert len(peer.requests) == 1


LARGEST = 65_536
NAMES = st.sampled_from([":status", "content-type", "grpc-status", "tailgate-end-ns", "date", "x", "x-" + "n" * 150])
VALUES = st.one_of(
    st.sampled_from(["", "0", "200", "application/grpc", "1795288083056915310"]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40),
    st.text("0123456789", min_size=100, max_size=300),
    st.text(st.characters(min_codepoint=0, max_codepoint=0xFF), max_size=20),
)
FIELD = st.tuples(NAMES, VALUES)


def joined(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    table: dict[str, str] = {}
    for key, value in fields:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        table[name] = f"{table[name]},{text}" if name in table else text
    return table


@given(
    blocks=st.lists(
        st.tuples(st.lists(st.tuples(FIELD, st.booleans()), max_size=12), st.booleans(), st.integers(0, 4096)),
        max_size=8,
    )
)
def test_whatever_hpack_encodes_comes_back(
    blocks: list[tuple[list[tuple[tuple[str, str], bool]], bool, int]],
) -> None:
    """Indexed or never indexed, Huffman coded or not, with a table that grows and shrinks between blocks."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(largest_list=LARGEST)
    for fields, huffman, table_size in blocks:
        raw = [(name.encode(), value.encode("latin-1"), never) for (name, value), never in fields]
        encoder.header_table_size = table_size
        block = encoder.encode(raw, huffman=huffman)
        assert decoder.decode(block) == joined([(name, value) for name, value, _ in raw])


def agree(blocks: list[bytes]) -> None:
    """Both decoders find the same fields, or both an error."""
    theirs, ours = hpack.Decoder(max_header_list_size=1 << 30), HeaderDecoder(largest_list=1 << 30)
    for block in blocks:
        try:
            expected = joined([(bytes(key), bytes(value)) for key, value in theirs.decode(block, raw=True)])
        except (hpack.HPACKError, IndexError):
            with pytest.raises(HeaderError):
                ours.decode(block)
            return
        assert ours.decode(block) == expected


@settings(max_examples=300)
@given(
    fields=st.lists(FIELD, min_size=1, max_size=6), cut=st.floats(0, 1), flip=st.integers(0, 7), huffman=st.booleans()
)
def test_a_damaged_block_means_what_it_means_to_hpack(
    fields: list[tuple[str, str]], cut: float, flip: int, huffman: bool
) -> None:
    block = bytearray(hpack.Encoder().encode([(k.encode(), v.encode("latin-1")) for k, v in fields], huffman=huffman))
    place = min(len(block) - 1, int(cut * len(block)))
    block[place] ^= 1 << flip
    agree([bytes(block)])
    agree([bytes(block[:place])])


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (b"\x80", "names an entry that is not there"),
        (b"\xbe", "names an entry that is not there"),
        (b"\x3f\xe2\x1f", "the limit is 4096"),
        (b"\x82\x20", "after the first field"),
        (b"\x00\x05abc", "over the end"),
        (b"\x00\x01a\x05b", "over the end"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "too large"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "end-of-string"),
        (b"\x00\x01a\x81\x00", "inside a code"),
    ],
)
def test_a_block_that_breaks_the_rules_says_which(block: bytes, text: str) -> None:
    with pytest.raises(HeaderError, match=text):
        HeaderDecoder(largest_list=LARGEST).decode(block)


FIRST_NS = 1_700_000_000_000_000_000
BODY = GenerateRequest(request_id="r", text="hello", max_tokens=9).SerializeToString()


class DeafSocket(socket.socket):
    """Takes whatever is sent and has nothing to read."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sent = b""

    def send(self, data: Any, flags: int = 0) -> int:
        self.sent += data
        return len(data)


class Fed:
    """A connection with some started calls, fed by hand."""

    def __init__(self, calls: int, sock: Any = None, **settings: Any) -> None:
        self.sock = sock or DeafSocket()
        self.client = InferenceClient("127.0.0.1:1", **settings)
        self.connection = Connection(self.client, self.sock)
        self.connection.feed(frame(wire.SETTINGS, 0, 0), FIRST_NS)
        self.client.connections.append(self.connection)
        self.ended: list[GrpcCall] = []
        self.calls = [
            self.client.start(BODY, headers=literal("x-number", str(n)), on_done=self.ended.append)
            for n in range(calls)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.reader.kill()
        self.client.close()
        self.sock.close()


def seen(call: GrpcCall) -> tuple[object, ...]:
    """What a call came to, without times."""
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

    plans = [plan(number, answer) for number, answer in enumerate(answers)]
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
    with Fed(len(answers)) as whole, Fed(len(answers)) as cut:
        whole.connection.feed(data, FIRST_NS + 1)
        edges = sorted({0, len(data), *(int(place * len(data)) for place in cuts)})
        for start, end in itertools.pairwise(edges):
            cut.connection.feed(data[start:end], FIRST_NS + 1 + end)
        assert [seen(call) for call in cut.calls] == [seen(call) for call in whole.calls]
        assert [(call.status, call.output_tokens) for call in whole.calls] == [expected(item) for item in answers]
        whole.connection.flush()
        cut.connection.flush()
        pings = [
            sent.count(frame(wire.PING, flags, 0, b"whenever")) for sent, flags in ((data, 0), (whole.sock.sent, 1))
        ]
        assert pings[0] == pings[1]
        assert cut.sock.sent == whole.sock.sent
        assert len(cut.ended) == len(answers)
        for call in cut.calls:
            assert list(call.token_ns) == sorted(call.token_ns)


@settings(max_examples=100)
@given(
    size=st.integers(0, 70_000),
    first=st.integers(0, 70_000),
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stream", "connection"]), st.integers(1, 30_000)),
            st.tuples(st.just("settings"), st.integers(0, 70_000)),
        ),
        max_size=12,
    ),
)
def test_a_request_never_overruns_a_window_and_goes_out_whole(
    size: int, first: int, steps: list[tuple[str, int]]
) -> None:
    """Whatever credit comes, in whatever order: the bytes on the wire stay within both windows, in order, all in."""
    with Fed(0) as fed:
        fed.connection.feed(frame(wire.SETTINGS, 0, 0, struct.pack(">HI", 4, first)), FIRST_NS)
        body = bytes(range(256)) * (size // 256 + 1)
        fed.connection.flush()
        fed.sock.sent = b""
        fed.client.start(body[:size])
        stream_credit, connection_credit, initial = first, 65_535, first

        def sent() -> tuple[bytes, bool]:
            """The body so far, and whether a frame of it ended the stream."""
            fed.connection.flush()
            data, out, ended = fed.sock.sent, b"", False
            while data:
                length = int.from_bytes(data[:3], "big")
                if data[3] == wire.DATA:
                    out += data[9 : 9 + length]
                    ended = ended or bool(data[4] & wire.END_STREAM)
                data = data[9 + length :]
            return out, ended

        whole = b"\0" + struct.pack(">I", size) + body[:size]
        allowed = 0
        for kind, amount in [("stream", 0), *steps]:
            if kind == "settings":
                stream_credit += amount - initial
                initial = amount
                fed.connection.feed(frame(wire.SETTINGS, 0, 0, struct.pack(">HI", 4, amount)), FIRST_NS)
            elif amount:
                stream_id = 1 if kind == "stream" else 0
                stream_credit += amount * stream_id
                connection_credit += amount * (1 - stream_id)
                fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", amount)), FIRST_NS)
            # What was allowed once has gone out and cannot be taken back; not a byte more has.
            allowed = max(allowed, min(len(whole), stream_credit, connection_credit))
            assert sent() == (whole[:allowed], allowed == len(whole))
        credit = struct.pack(">I", 1 << 20)  # more than all debts together
        fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, 0, credit), FIRST_NS)
        fed.connection.feed(frame(wire.WINDOW_UPDATE, 0, 1, credit), FIRST_NS)
        assert sent() == (whole, True)


def test_what_the_kernel_does_not_take_at_once_follows_in_order() -> None:
    near, far = gevent.socket.socketpair()
    near.setblocking(False)
    pieces = [frame(0xFE, 0, 0, bytes((number % 256,)) * 10_000) for number in range(300)]  # more than a socket holds
    expected, got = b"".join(pieces), b""
    with Fed(0, near) as fed, far, gevent.Timeout(10.0):
        for number, piece in enumerate(pieces):
            fed.connection.write(piece)
            if number % 50 == 0:
                gevent.sleep(0)
        while not got.endswith(expected):
            got += far.recv(100_000)
