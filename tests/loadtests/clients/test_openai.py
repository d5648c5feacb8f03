"""The OpenAI client against scripted HTTP/1.1 servers. gevent runs here without patching, servers on threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from tailgate.loadtests.clients.openai import OpenAiCall, OpenAiClient
from tailgate.loadtests.external.arms import OpenAiArm
from tailgate.servers.clock import now_ns
from tests.fakes.credentials import Certificates
from tests.fakes.http2 import finished, until
from tests.fakes.http_servers import (
    DONE,
    END,
    STREAM_HEAD,
    HttpPeer,
    Request,
    answer,
    chunked,
    event,
    plain,
    said,
    scripted,
    usage,
)
from tests.fakes.processes import PATIENCE_S, free_port
from tests.loadtests.clients.test_tls import context

MS = 1_000_000
GOOD = answer(said("a"), said(" b"), said("", finish="length"), usage(2), DONE)


@contextlib.contextmanager
def client_of(address: str, **settings: Any) -> Iterator[OpenAiClient]:
    config = OpenAiArm(name="x", kind="openai", address=(address,), model_name="m", **settings)
    with contextlib.closing(OpenAiClient(config, address)) as client:
        yield client


def ask(client: OpenAiClient, timeout_s: float | None = 10.0) -> OpenAiCall:
    call = finished(client.start(b"{}", timeout_s=timeout_s))
    gevent.sleep(0)  # its connection is kept
    return call


def outcome(peer_script: Callable[[Request], object], timeout_s: float = 10.0) -> OpenAiCall:
    with HttpPeer(peer_script) as peer, client_of(peer.address) as client:
        return ask(client, timeout_s)


def leaving(reply: bytes) -> Callable[[Request], bool]:
    """A script that closes the connection after its answer."""

    def script(request: Request) -> bool:
        request.send(reply)
        return False

    return script


def hanging(gone: threading.Event, reply: bytes = b"") -> Callable[[Request], bool]:
    """A script that answers so much and then waits until the client hangs up."""

    def script(request: Request) -> bool:
        request.send(reply)
        request.link.recv(1)
        gone.set()
        return False

    return script


def test_answer_has_a_time_for_each_chunk_and_the_servers_token_count() -> None:
    script = scripted([answer(said("a"), said("b c d"), said("", finish="length"), usage(4, 21), DONE)])
    with HttpPeer(script) as peer, client_of(peer.address) as client:
        before = now_ns()
        call = client.start(b'{"x": 1}', headers=b"X-Request-Id: 1-7\r\n", timeout_s=10, tag="mine")
        until(lambda: call.status)
    assert (call.status, call.error, call.tag) == ("OK", "", "mine")
    assert (call.chunks, len(call.token_ns), call.output_tokens) == (2, 2, 4)
    assert call.trailing_metadata == {"tailgate-prompt-tokens": "21"}
    assert call.first_token_ns == call.token_ns[0]
    assert before <= call.start_ns <= call.sent_ns <= call.token_ns[0] <= call.token_ns[1] <= call.end_ns
    request = peer.requests[0]
    assert request.line == "POST /v1/completions HTTP/1.1"
    assert request.body == b'{"x": 1}'
    assert request.headers["x-request-id"] == "1-7"
    assert request.headers["host"] == f"127.0.0.1:{peer.port}"
    assert "authorization" not in request.headers


def test_token_has_the_time_at_which_its_bytes_came() -> None:
    came: list[int] = []

    def script(request: Request) -> None:
        request.send(STREAM_HEAD)
        for _ in range(4):
            time.sleep(0.05)
            came.append(now_ns())
            request.send(chunked(said("x")))
        request.send(chunked(said("", finish="stop"), DONE) + END)

    call = outcome(script)
    assert call.status == "OK"
    assert all(0 <= seen - sent < 40 * MS for seen, sent in zip(call.token_ns, came, strict=True))


LOST = {"code": "InternalError", "message": "the worker went away"}


def part(text: str = "", finish: str | None = None, tokens: int | None = None, **delta: Any) -> bytes:
    """A chunk of a chat; `tokens` is the count of its usage."""
    choice = {"index": 0, "delta": ({"content": text} if text else {}) | delta, "finish_reason": finish}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return event({"choices": [choice], **usage})


ONE = part("one")


@pytest.mark.parametrize("secure", [False, True])
def test_an_answer_ends_with_its_finish_reason_where_nothing_follows(secure: bool, pem: Certificates) -> None:
    tls, trusting = (context(pem, protocols=()), {"tls_ca": pem.ca}) if secure else (None, {})
    script = hanging(threading.Event(), STREAM_HEAD + chunked(ONE, part(" two", "stop")))
    with HttpPeer(script, tls=tls) as peer, client_of(peer.address, **trusting) as client:
        call = ask(client)
    assert (call.status, len(call.token_ns)) == ("OK", 2)
    assert call.end_ns == call.token_ns[-1]


def test_an_answer_ends_no_sooner_than_its_last_token() -> None:
    def script(request: Request) -> None:
        request.send(STREAM_HEAD + chunked(part("one", "stop")))
        time.sleep(0.02)
        request.send(chunked(part(" two"), DONE) + END)

    call = outcome(script)
    assert (call.status, len(call.token_ns)) == ("OK", 2)
    assert call.end_ns == call.token_ns[-1]


@pytest.mark.parametrize(
    ("parts", "chunks", "tokens"),
    [
        ((part("a", tokens=1), part("b c", tokens=3), part(" d", "stop", 4)), 3, 4),
        # Counts below the number of chunks are not counts of a chunk.
        ((part("one", tokens=0), part(" two", tokens=0), part(" three", tokens=0), part("", "stop", 3)), 3, 3),
        # Tokens whose text is held back have the time of their count.
        (
            (part("Let", tokens=1), part(tokens=6), part(tokens=17, tool_calls=[{"index": 0}]), part("", "stop", 20)),
            *(2, 20),
        ),
    ],
)
def test_counts_of_every_chunk_are_believed_where_they_can_be(parts: list[bytes], chunks: int, tokens: int) -> None:
    call = outcome(leaving(answer(*parts, DONE)))
    assert (call.status, call.chunks, len(call.token_ns), call.output_tokens) == ("OK", chunks, tokens, tokens)


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        (plain("429 Too Many", b'{"error": {"message": "slow down"}}'), "RESOURCE_EXHAUSTED", "slow down"),
        (plain("503 Busy", b"<html>try later</html>"), "UNAVAILABLE", "try later"),
        (answer(event({"choices": ["x"]})), "INTERNAL", "unknown form"),
        (b"\x00\x00\x18\x04\x00\x00\x00\x00\x00", "UNAVAILABLE", "does not speak HTTP/1.1"),
        (b"", "UNAVAILABLE", "without an answer"),
        (answer(said("a"), said("b")), "UNAVAILABLE", "without a finish_reason and without [DONE]"),
        (answer(ONE, part(" two", "abort"), DONE), "ABORTED", "abort"),
        (answer(ONE, b"event: error\n" + event(LOST), DONE), "INTERNAL", "the worker went away"),
        (answer(ONE, b"event: error\ndata: gone away\n\n", DONE), "INTERNAL", "gone away"),
        (answer(ONE, b"event: error\ndata: null\n\n", DONE), "INTERNAL", "error event"),
        (answer(ONE, b"event: error\n" + event({"message": "full", "code": 429})), "RESOURCE_EXHAUSTED", "full"),
        (answer(ONE, event({"choices": [], "usage": {"completion_tokens": 859}})), "UNAVAILABLE", "finish_reason"),
        (answer(part("one", ""), part(" two", "")), "UNAVAILABLE", "finish_reason"),  # an empty one is none
        (answer(DONE), "INTERNAL", "neither text"),
    ],
)
def test_every_failure_has_a_status_name_and_a_reason(reply: bytes, status: str, text: str) -> None:
    call = outcome(leaving(reply))
    assert call.status == status
    assert text in call.error


@pytest.mark.parametrize(
    "reply",
    [
        answer(said("a"), said("", finish="length")),  # without [DONE]
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + said("a") + DONE,  # as long as it lasts
        b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream\r\n\r\n" + part("one", "stop") + DONE,
        answer(ONE, b"data:\n\n", b"data: \r\n\r\n", b": PROCESSING\n\n", part(" two", "stop"), DONE),
        *(
            answer(ONE, part(" two", reason), DONE)
            for reason in ("stop", "length", "tool_calls", "function_call", "eos", "eos_token", "")
        ),
    ],
)
def test_every_end_of_a_whole_answer_is_taken_for_one(reply: bytes) -> None:
    assert outcome(leaving(reply)).status == "OK"


def test_connections_are_kept_and_used_again() -> None:
    def script(request: Request) -> None:
        if request.body == b"slow":
            time.sleep(0.2)
        request.send(GOOD)

    with HttpPeer(script) as peer, client_of(peer.address) as client:
        assert [ask(client).status for _ in range(5)] == ["OK"] * 5
        assert peer.connections == 1
        together = [client.start(b"slow", timeout_s=10) for _ in range(3)]
        assert [finished(call).status for call in together] == ["OK"] * 3
        assert peer.connections == 3


def test_connection_that_the_server_closed_while_idle_costs_no_request() -> None:
    # Without Connection: close, as a server whose keep-alive time is over.
    with HttpPeer(leaving(GOOD)) as peer, client_of(peer.address) as client:
        for _ in range(4):
            assert ask(client).status == "OK"
        assert len(peer.requests) == 4


@pytest.mark.parametrize(
    "more",
    [
        plain("408 Request Timeout", b"", "Connection: close"),  # as proxies say to a connection that is idle
        answer(said("of another request"), said("", finish="stop"), DONE),
    ],
)
def test_what_comes_on_an_idle_connection_is_no_answer_to_the_next_request(more: bytes) -> None:
    sent, idle = threading.Event(), threading.Event()

    def script(request: Request) -> None:
        request.send(GOOD)
        if len(peer.requests) == 1:
            idle.wait(PATIENCE_S)
            request.send(more)
            sent.set()

    with HttpPeer(script) as peer, client_of(peer.address) as client:
        assert ask(client).status == "OK"
        idle.set()
        assert sent.wait(PATIENCE_S)
        call = ask(client)
        assert (call.status, call.output_tokens) == ("OK", 2)


def test_an_informational_answer_leaves_its_connection_to_no_other_request() -> None:
    early, late = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", threading.Event()

    def script(request: Request) -> None:
        if len(peer.requests) == 1:
            request.send(early)
            late.wait(PATIENCE_S)
            with contextlib.suppress(OSError):
                request.send(answer(said("of another request"), said("", finish="stop"), DONE))
        else:
            request.send(GOOD)

    with HttpPeer(script) as peer, client_of(peer.address) as client:
        assert ask(client).status == "UNKNOWN"
        call = client.start(b"{}", timeout_s=10)
        gevent.sleep(0.05)
        late.set()
        assert (finished(call).status, call.output_tokens) == ("OK", 2)


def test_deadline_ends_the_call_on_time_and_hangs_up() -> None:
    gone = threading.Event()
    began = now_ns()
    call = outcome(hanging(gone, STREAM_HEAD + chunked(said("a"))), timeout_s=0.3)
    assert (call.status, call.output_tokens) == ("DEADLINE_EXCEEDED", 1)
    assert 250 * MS < call.end_ns - began < 1500 * MS
    assert gone.wait(PATIENCE_S)


def test_a_refused_connection_is_a_status() -> None:
    with client_of(f"http://127.0.0.1:{free_port()}/v1") as client:
        call = ask(client)
    assert (call.status, "cannot connect to 127.0.0.1" in call.error, "refused" in call.error) == (
        "UNAVAILABLE",
        True,
        True,
    )


def test_tls_is_checked_and_connections_are_kept(pem: Certificates) -> None:
    with HttpPeer(scripted([GOOD]), tls=context(pem, protocols=())) as peer:
        with client_of(peer.address, tls_ca=pem.ca) as trusting:
            assert [ask(trusting).status for _ in range(3)] == ["OK"] * 3
            assert peer.connections == 1
        with client_of(peer.address) as doubting:
            call = ask(doubting)
        assert (call.status, "certificate is not trusted" in call.error) == ("UNAVAILABLE", True)
