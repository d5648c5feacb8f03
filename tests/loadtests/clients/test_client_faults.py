"""The client against a peer that does whatever HTTP/2 allows, and much that it does not."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.external.client_security import SecurityConfig
from tailgate.servers.rpc.inference_pb2 import GenerateRequest
from tailgate.servers.security import ServerTls
from tailgate.servers.splitter.envoy import Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig
from tests.fakes import http2 as wire
from tests.fakes.credentials import Certificates
from tests.fakes.http2 import (
    OK_END,
    OK_HEADERS,
    RawPeer,
    Wire,
    chunk,
    finished,
    frame,
    generate,
    grpc_message,
    keeping_client,
    literals,
    until,
)
from tests.fakes.inference import Behaviour, serve
from tests.fakes.processes import PATIENCE_S
from tests.loadtests.clients.test_connection import ask, request

WHOLE = wire.END_HEADERS
LAST = wire.END_HEADERS | wire.END_STREAM
PROTOCOL_ERROR, FRAME_SIZE_ERROR = 1, 6


def replies(*frames: bytes) -> Callable[[Wire], None]:
    """A script that sends these frames after the first request of the connection, which is stream 1."""

    def script(link: Wire) -> None:
        link.greet()
        link.request()
        link.send(*frames)

    return script


def answer(*frames: bytes) -> Call:
    with RawPeer(replies(*frames)) as peer:
        return ask(peer)


def good(stream_id: int, *ids: int) -> bytes:
    """A whole good answer."""
    return b"".join(
        (
            frame(wire.HEADERS, WHOLE, stream_id, OK_HEADERS),
            *(frame(wire.DATA, 0, stream_id, chunk([number])) for number in ids),
            frame(wire.HEADERS, LAST, stream_id, OK_END),
        )
    )


def window(stream_id: int, increment: int) -> bytes:
    return frame(wire.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("code", "text", "bad"),
    [
        (FRAME_SIZE_ERROR, "wrong size", [frame(wire.SETTINGS, 0, 0, b"12345")]),
        (FRAME_SIZE_ERROR, "wrong size", [frame(wire.RST_STREAM, 0, 1, b"123")]),
        (FRAME_SIZE_ERROR, "has 16385 bytes", [frame(wire.DATA, 0, 1, bytes(16_385))]),
        (PROTOCOL_ERROR, "names stream 0", [frame(wire.DATA, 0, 0, b"x")]),
        (PROTOCOL_ERROR, "names stream 2", [frame(wire.HEADERS, WHOLE, 2, OK_HEADERS)]),
        (PROTOCOL_ERROR, "names stream 77", [frame(wire.DATA, 0, 77, b"x")]),
        (PROTOCOL_ERROR, "padding", [frame(wire.DATA, wire.PADDED, 1, b"\x05abc")]),
        (PROTOCOL_ERROR, "padding", [frame(wire.HEADERS, wire.PADDED | WHOLE, 1, b"")]),
        (PROTOCOL_ERROR, "pushed", [frame(wire.PUSH_PROMISE, WHOLE, 1, bytes(4))]),
        (PROTOCOL_ERROR, "without a header block", [frame(wire.CONTINUATION, WHOLE, 1, OK_END)]),
        (PROTOCOL_ERROR, "interrupted", [frame(wire.HEADERS, 0, 1, b""), frame(wire.DATA, 0, 1, b"x")]),
        (PROTOCOL_ERROR, "interrupted", [frame(wire.HEADERS, 0, 1, b""), frame(wire.CONTINUATION, WHOLE, 3, b"")]),
        (9, "cannot be decoded: a field", [frame(wire.HEADERS, WHOLE, 1, b"\xbe")]),
        (
            PROTOCOL_ERROR,
            "more than 262144 bytes",
            [frame(wire.HEADERS, 0, 1, b""), *[frame(wire.CONTINUATION, 0, 1, bytes(16_384))] * 17],
        ),
    ],
)
def test_what_breaks_the_connection_is_reported_to_both_sides(code: int, text: str, bad: list[bytes]) -> None:
    with RawPeer(replies(*bad)) as peer:
        call = ask(peer)
        until(lambda: bool(peer.frames(wire.GOAWAY)))
        assert struct.unpack(">II", peer.frames(wire.GOAWAY)[0][3]) == (0, code)
    assert call.status == "UNAVAILABLE"
    assert text in call.error


def test_padding_counts_towards_the_window_and_is_thrown_away() -> None:
    padded = [
        frame(wire.HEADERS, wire.PADDED | WHOLE | 0x20, 1, b"\x04" + bytes(5) + OK_HEADERS + bytes(4)),
        *[frame(wire.DATA, wire.PADDED, 1, b"\xff" + chunk([1]) + bytes(255))] * 10,
        frame(wire.HEADERS, wire.PADDED | LAST, 1, b"\x00" + OK_END),
    ]
    with RawPeer(replies(*padded)) as peer:
        call = ask(peer, stream_window=2_000)
        until(lambda: sum(int.from_bytes(item[3], "big") for item in peer.frames(wire.WINDOW_UPDATE)[1:]) > 2_000)
    assert (call.status, call.output_tokens) == ("OK", 10)


HEAD = frame(wire.HEADERS, WHOLE, 1, OK_HEADERS)
END = frame(wire.HEADERS, LAST, 1, OK_END)
UNKNOWN = [frame(0xFE, 0xFF, 1, b"what"), frame(2, 0, 1, bytes(5)), good(1, 1)]
LATE = [frame(wire.DATA, 0, 1, b"late"), window(1, 5), frame(wire.RST_STREAM, 0, 1, bytes(4))]


@pytest.mark.parametrize(
    ("frames", "tokens"),
    [
        ([HEAD, frame(wire.DATA, 0, 1), frame(wire.DATA, 0, 1, grpc_message(b"")), END], 0),
        ([*UNKNOWN, *LATE], 1),
    ],
    ids=["empty message and frame", "unknown kinds and a stream that ended"],
)
def test_an_unusual_answer_is_good(frames: list[bytes], tokens: int) -> None:
    call = answer(*frames)
    assert (call.status, call.output_tokens, call.first_token_ns is None) == ("OK", tokens, tokens == 0)


PROXY = literals((":status", "503"), ("content-type", "text/html"))
PAGE = [frame(wire.HEADERS, WHOLE, 1, PROXY), frame(wire.DATA, 0, 1, b"<html>upstream connect error")]


@pytest.mark.parametrize(
    ("frames", "status", "error"),
    [
        ([HEAD, HEAD], "INTERNAL", "second header block"),
        ([*PAGE, frame(wire.DATA, wire.END_STREAM, 1, b"</html>")], "UNAVAILABLE", "HTTP status 503"),
        ([HEAD, frame(wire.DATA, 0, 1, b"\x01\0\0\0\x01x")], "INTERNAL", "compressed although no compression was"),
        ([HEAD, frame(wire.DATA, 0, 1, b"\0\x00\x50\0\0x")], "INTERNAL", "has 5242880 bytes; the limit is 4194304"),
    ],
)
def test_an_answer_that_grpc_forbids_fails_the_call(frames: list[bytes], status: str, error: str) -> None:
    call = answer(*frames)
    assert call.status == status
    assert error in call.error


def goaway(last_id: int, code: int = 0, debug: bytes = b"") -> bytes:
    return frame(wire.GOAWAY, 0, 0, struct.pack(">II", last_id, code) + debug)


def test_a_graceful_goaway_lets_running_streams_end_and_retries_what_was_not_seen() -> None:
    """First with the highest id, as a warning; then with the last stream that will be served (RFC 9113, 6.8)."""

    def script(link: Wire) -> None:
        link.greet()
        if link.number == 2:
            link.send(good(link.request(), 20), good(link.request(), 30))
            return
        first = link.request()
        link.request()
        link.send(frame(wire.HEADERS, WHOLE, first, OK_HEADERS), goaway(2**31 - 1))
        assert until_third.wait(PATIENCE_S)
        link.send(goaway(first), frame(wire.DATA, 0, first, chunk([10])), frame(wire.HEADERS, LAST, first, OK_END))

    until_third = threading.Event()
    with RawPeer(script) as peer:
        client = keeping_client(peer.target)
        first, second = generate(client, request()), generate(client, request())
        until(lambda: client.connections and client.connections[0].draining)
        third = generate(client, request())
        until(lambda: len(peer.wires) == 2)
        assert second.status == ""  # the warning alone restarts nothing
        until_third.set()
        ids = [[list(item.token_ids) for item in finished(call).chunks] for call in (first, second, third)]
        until(lambda: len(client.connections) == 1)  # the old one is closed
        client.close()
    assert [call.status for call in (first, second, third)] == ["OK"] * 3
    assert ids[0] == [[10]]
    assert sorted(ids[1] + ids[2]) == [[20], [30]]
    assert second.sent_ns < third.sent_ns  # the retry does not hide when it was first sent


@pytest.mark.parametrize(
    ("refusals", "ending"),
    [(1, ("OK", "")), (2, ("UNAVAILABLE", "the server reset the stream (HTTP/2 error 7)"))],
)
def test_a_refused_stream_is_started_again_once(refusals: int, ending: tuple[str, str]) -> None:
    def script(link: Wire) -> None:
        link.greet()
        for _ in range(refusals):
            link.send(frame(wire.RST_STREAM, 0, link.request(), (7).to_bytes(4, "big")))
        link.send(good(link.request(), 1))

    with RawPeer(script) as peer:
        call = ask(peer)
        assert len(peer.wires) == 1
    assert (call.status, call.error) == ending


@pytest.fixture(
    scope="module",
    params=["plain", "tls", "envoy", "envoy-tls"],
)
def client(
    request: pytest.FixtureRequest, pem: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceClient]:
    """A client of one server, with windows small enough that flow control is at work."""
    name: str = request.param
    secure_arm = name == "tls"
    with contextlib.ExitStack() as stack:
        pair = {"certificate": pem.certificate, "key": pem.key} if secure_arm else {}
        target = stack.enter_context(serve(Behaviour(**pair))).target
        if name.startswith("envoy"):
            folder = tmp_path_factory.mktemp(name)
            config = SplitterConfig(
                arms=(ArmTarget(name="eager", backends=(target,)),),
                health_interval_s=0.1,
                tls=ServerTls(certificate=pem.certificate, key=pem.key) if "tls" in name else None,
            )
            envoy = stack.enter_context(Envoy(config, log_path=folder / "envoy.log", work_dir=folder))
            envoy.wait_ready(PATIENCE_S)
            target = envoy.target
        elif secure_arm:
            target = f"https://{target}"
        made = keeping_client(
            target, security=SecurityConfig(tls_ca=pem.ca), stream_window=70_000, connection_window=200_000
        )
        yield made
        made.close()


def ask_target(text: str = "hello", tokens: int = 3, number: int = 0) -> GenerateRequest:
    return GenerateRequest(request_id=f"r-{number}", text=text, max_tokens=tokens)


def test_answers_and_requests_above_every_window_arrive_whole(client: InferenceClient) -> None:
    calls = [generate(client, ask_target(text="big 300000"), timeout_s=PATIENCE_S) for _ in range(3)]
    calls += [generate(client, ask_target(text="x" * 1_000_000), timeout_s=PATIENCE_S) for _ in range(3)]
    assert [(finished(call).status, call.output_tokens) for call in calls] == [("OK", 300_000)] * 3 + [("OK", 3)] * 3


def test_a_deadline_and_a_cancel_end_calls_and_leave_the_connection_well(client: InferenceClient) -> None:
    late = generate(client, ask_target(tokens=100_000), timeout_s=0.2)
    dropped = generate(client, ask_target(tokens=100_000), timeout_s=PATIENCE_S)
    until(lambda: dropped.output_tokens)
    dropped.cancel()
    assert (finished(late).status, dropped.status) == ("DEADLINE_EXCEEDED", "CANCELLED")
    assert finished(generate(client, ask_target(), timeout_s=PATIENCE_S)).status == "OK"
    assert len(client.connections) == 1


@pytest.mark.process
def test_tokens_are_recorded_in_order_and_soon_after_the_server_sent_them() -> None:
    with serve(Behaviour(token_s=0.02)) as peer:
        client = keeping_client(peer.target)
        calls = [generate(client, ask_target(tokens=15), timeout_s=PATIENCE_S) for _ in range(20)]
        chunks = [finished(call).chunks for call in calls]
        client.close()
    for call, came in zip(calls, chunks, strict=True):
        emitted_ns = [at_ns for chunk in came for at_ns in chunk.emit_ns]
        assert (call.status, len(emitted_ns), list(call.token_ns)) == ("OK", 15, sorted(call.token_ns))
        late_ns = [seen - sent for seen, sent in zip(call.token_ns, emitted_ns, strict=True)]
        assert call.sent_ns < emitted_ns[0]
        assert min(late_ns) > 0
        assert sorted(late_ns)[7] < 100_000_000  # and not with the answer's end, after 300 ms
