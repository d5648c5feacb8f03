"""Streams that real servers were reported to send, replayed against the client and against the readiness probe."""

from __future__ import annotations

import gzip
import json
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loadtests.clients.openai import OpenAiClient
from loadtests.clients.openai_call import OpenAiCall
from loadtests.external.addresses import ExternalConfig, OpenAiOptions, external_from_table, parse_address
from loadtests.external.answers import Asking, ask
from loadtests.external.openai_wire import request_body, request_path
from servers.fields import ConfigError
from tests.fakes.http1 import HttpPeer, Request, plain

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ASKING = Asking(prompt="x", max_tokens=2, whole_length=False, seed=1)
ERROR = {"code": "InternalError", "message": "the worker went away"}


def data(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def part(text: str = "", finish: str | None = None, tokens: int | None = None, **delta: Any) -> bytes:
    """A chunk of a chat; `tokens` is the count of its usage."""
    choice = {"index": 0, "delta": ({"content": text} if text else {}) | delta, "finish_reason": finish}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return data({"choices": [choice], **usage})


def replay(*pieces: bytes | None, head: bytes = HEAD, timeout_s: float = 5.0) -> OpenAiCall:
    """The call that gets these bytes, a moment apart; None leaves the connection open."""

    def script(request: Request) -> bool:
        request.send(head)
        for piece in pieces:
            if piece is not None:
                request.send(piece)
                time.sleep(0.01)
        return None in pieces

    with HttpPeer(script) as peer:
        options = OpenAiOptions(endpoint="chat", usage="each")
        config = ExternalConfig(kind="openai", addresses=(peer.address,), model_name="m", openai=options)
        client = OpenAiClient(config, peer.address)
        call = client.start(b"{}", timeout_s=timeout_s)
        assert call.wait(30.0)
        client.close()
    return call


@pytest.mark.parametrize(
    ("pieces", "status", "said"),
    [
        ([part("one"), part(" two", "abort"), DONE], "ABORTED", "abort"),
        ([part("one"), part(" two", "content_filter"), DONE], "ABORTED", "content_filter"),
        ([part("one"), b"event: error\n" + data(ERROR), DONE], "INTERNAL", "the worker went away"),
        ([part("one"), b"event: error\ndata: gone away\n\n", DONE], "INTERNAL", "gone away"),
        ([part("one"), data(ERROR), DONE], "INTERNAL", "the worker went away"),
        ([part("one"), data({"error": {"message": "engine", "code": 500}}), DONE], "INTERNAL", "engine"),
        ([part("one"), data({"choices": [], "usage": {"completion_tokens": 859}})], "UNAVAILABLE", "finish_reason"),
        ([part("one", ""), part(" two", "")], "UNAVAILABLE", "finish_reason"),
        ([DONE], "INTERNAL", "neither text"),
    ],
)
def test_an_answer_that_breaks_off_has_failed(pieces: list[bytes], status: str, said: str) -> None:
    call = replay(*pieces)
    assert call.status == status
    assert said in call.error


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "function_call", "eos", "eos_token"])
def test_an_answer_that_the_server_calls_whole_is_whole(reason: str) -> None:
    assert replay(part("one"), part(" two", reason), DONE).status == "OK"


def test_an_empty_finish_reason_is_none() -> None:
    assert replay(part("one", ""), part(" two", ""), DONE).status == "OK"


def test_an_answer_ends_with_its_finish_reason_where_nothing_follows() -> None:
    call = replay(part("one"), part(" two", "stop"), None)
    assert (call.status, len(call.token_ns)) == ("OK", 2)
    assert call.end_ns == call.token_ns[-1]


def test_counts_below_the_number_of_chunks_are_not_counts_of_a_chunk() -> None:
    call = replay(part("one", tokens=0), part(" two", tokens=0), part(" three", tokens=0), part("", "stop", 3), DONE)
    assert (call.status, call.chunks, len(call.token_ns), call.output_tokens) == ("OK", 3, 3, 3)


def test_tokens_whose_text_is_held_back_have_the_time_of_their_count() -> None:
    tool = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    ends = part("", "tool_calls", 20)
    call = replay(part("Let", tokens=1), part(tokens=6), part(tokens=11), part(tokens=17, **tool), ends, DONE)
    assert (call.status, len(call.token_ns), call.output_tokens) == ("OK", 20, 20)


@pytest.mark.parametrize("between", [b"data:\n\n", b"data: \r\n\r\n", b": PROCESSING\n\n: PROCESSING\n\n"])
def test_events_without_data_are_skipped(between: bytes) -> None:
    call = replay(part("one"), between, part(" two", "stop"), DONE)
    assert (call.status, call.chunks) == ("OK", 2)


def test_a_compressed_stream_is_refused_by_the_name_of_its_encoding() -> None:
    body = gzip.compress(part("one", "stop") + DONE)
    call = replay(body, head=HEAD.replace(b"connection", b"content-encoding: gzip\r\nconnection"))
    assert call.status == "INTERNAL"
    assert "content-encoding gzip" in call.error


@pytest.mark.parametrize(
    ("media_type", "status"), [(b"Text/Event-Stream", "OK"), (b"application/octet-stream", "INTERNAL")]
)
def test_media_types_have_no_case(media_type: bytes, status: str) -> None:
    head = HEAD.replace(b"text/event-stream; charset=utf-8", media_type)
    assert replay(part("one", "stop"), DONE, head=head).status == status


# --- Requests ---------------------------------------------------------------------------------------------------------


def test_extra_tables_and_lists_are_sent_as_they_are() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["</s>"]}
    table = {"kind": "openai", "address": "http://h/v1", "model_name": "m", "openai": {"extra": extra}}
    config = external_from_table(table, where="arms.a")
    assert isinstance(config.options, OpenAiOptions)
    body = request_body(config.options, model="m", prompt="x", max_tokens=8, whole_length=False, seed=1)
    assert extra.items() <= json.loads(body).items()
    with pytest.raises(ConfigError, match=r"openai\.extra"):
        OpenAiOptions(extra={"stop": {1, 2}})


@pytest.mark.parametrize(
    ("text", "target", "host_header", "path"),
    [
        (
            "https://r.azure.com/openai/deployments/m/?api-version=2024-10-21",
            "r.azure.com:443",
            "r.azure.com",
            "/openai/deployments/m/completions?api-version=2024-10-21",
        ),
        ("http://[fe80::1%25eth0]:8000/v1", "[fe80::1%eth0]:8000", "[fe80::1]:8000", "/v1/completions"),
        ("unix:///run/vllm.sock", "/run/vllm.sock", "localhost", "/v1/completions"),
        ("unix:///run/vllm.sock:/api/v2?x=1", "/run/vllm.sock", "localhost", "/api/v2/completions?x=1"),
    ],
)
def test_addresses_have_queries_zones_and_sockets(text: str, target: str, host_header: str, path: str) -> None:
    address = parse_address(text, "openai")
    assert (address.target, address.host_header) == (target, host_header)
    assert request_path(OpenAiOptions(), address) == path


@pytest.mark.parametrize(
    ("text", "words"),
    [("http://h/v1?api-key=hunter2", "headers"), ("unix://run/x.sock", "unix:///"), ("http://h/v1#top", "fragment")],
)
def test_an_address_that_cannot_be_used_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_address(text, "openai")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Authorization": "Bearer x"}, "token_env"),
        ({"host": "h"}, "remove it"),
        ({"a b": "c"}, "no header"),
        ({"a": "b\r\nc: d"}, "no header"),
        ({"a": "$no name"}, "environment variable"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused(headers: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OpenAiOptions(headers=headers)


def test_headers_and_a_query_reach_the_server_and_no_error_holds_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Request) -> None:
        request.send(plain("401 Unauthorized", b'{"error": {"message": "key hunter2 is wrong"}}'))

    options = OpenAiOptions(headers={"x-api-key": "$MY_KEY", "x-team": "serving"})
    with HttpPeer(refuse) as peer:
        config = ExternalConfig(kind="openai", addresses=(f"{peer.address}?a=1",), model_name="m", openai=options)
        with pytest.raises(ConfigError, match="MY_KEY"):
            config.check("a")
        monkeypatch.setenv("MY_KEY", "hunter2")
        config.check("a")
        client = OpenAiClient(config, config.addresses[0])
        call = client.start(b"{}", timeout_s=5.0)
        assert call.wait(30.0)
        client.close()
        answer = ask(config, config.addresses[0], ASKING, timeout_s=5.0, alternatives=0)
    assert call.status == "UNAUTHENTICATED"
    assert "hunter2" not in call.error + answer.error
    for request in peer.requests:
        assert (request.headers["x-api-key"], request.headers["x-team"]) == ("hunter2", "serving")
        assert request.line == "POST /v1/completions?a=1 HTTP/1.1"
    assert len(peer.requests) == 2


def test_a_server_on_a_unix_socket_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "server.sock"

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(HEAD + part("one", "stop") + DONE)

    with socketserver.ThreadingUnixStreamServer(str(file), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = OpenAiOptions(endpoint="chat")
        config = ExternalConfig(kind="openai", addresses=(f"unix://{file}",), model_name="m", openai=options)
        client = OpenAiClient(config, config.addresses[0])
        call = client.start(b"{}", timeout_s=5.0)
        assert call.wait(30.0)
        client.close()
        answer = ask(config, config.addresses[0], ASKING, timeout_s=5.0, alternatives=0)
        server.shutdown()
    assert (call.status, answer.text, answer.error) == ("OK", "one", "")
