"""Request bodies, server-sent events and errors, without a connection."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.loadtests.external.addresses import parse_address
from tailgate.loadtests.external.answers import Answer, FailedError, Probe, ask, wait_ready
from tailgate.loadtests.external.arms import ExternalArm, OipArm, OipOptions, OpenAiArm, OpenAiOptions
from tailgate.loadtests.external.asking import Asking
from tailgate.loadtests.external.openai_wire import (
    LARGEST_EVENT,
    EventStream,
    models_of,
    read_event,
    request_body,
    request_path,
)
from tests.fakes.credentials import make_certificates
from tests.fakes.http_servers import DONE, HttpPeer, Request, answer, event, plain, said, usage
from tests.fakes.processes import refusal
from tests.loadtests.clients.test_openai import leaving
from tests.loadtests.clients.test_tls import context


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


# What people write: no line ends inside, since those would be new lines of the stream.
lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=20)


@given(
    st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_events_are_the_same_at_any_byte_boundary(events: list[list[str]], end: str, places: list[int]) -> None:
    text = "".join("".join(f"data: {line}{end}" for line in event) + f": note{end}id: 7{end}{end}" for event in events)
    data = text.encode()
    stream = EventStream()
    found = [event for piece in cut(data, places) for event in stream.feed(piece)]
    whole = ["\n".join(event).encode() for event in events]
    assert found == [data for data in whole if data.strip()]


def test_endless_event_is_refused() -> None:
    stream = EventStream()
    line = b"data: " + b"x" * (LARGEST_EVENT // 2 + 1) + b"\n"
    stream.feed(line)
    with pytest.raises(ValueError, match="more than"):
        stream.feed(line)


@pytest.mark.parametrize(
    ("content", "text", "ended"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, True, False),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, False, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, False, False),
        ({"choices": [{"delta": {"content": "a"}}]}, True, False),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True, False),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True, False),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False, True),
        ({"choices": [], "usage": None}, False, False),
    ],
)
def test_chunk_counts_when_it_carries_some_of_the_answer(content: object, text: bool, ended: bool) -> None:
    chunk = read_event(json.dumps(content).encode())
    assert (chunk.answers, chunk.ended) == (text, ended)
    assert chunk.failed is None


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"error": {"message": "slow down", "code": 429}}, "RESOURCE_EXHAUSTED", "slow down"),
        ({"error": {"message": "gone", "type": "x", "code": None}}, "INTERNAL", "gone"),
        ({"error": "CUDA out of memory"}, "INTERNAL", "CUDA out of memory"),
        ({"object": "error", "message": "too long", "code": "400"}, "INVALID_ARGUMENT", "too long"),
        (  # before it takes memory
            {"choices": [{"text": "a"}], "usage": {"completion_tokens": 10**10}},
            *("INTERNAL", "the server counts 10000000000 tokens in its answer; the limit is 1048576"),
        ),
    ],
)
def test_error_inside_a_stream_has_a_status_and_a_message(content: object, status: str, message: str) -> None:
    assert read_event(json.dumps(content).encode()).failed == (status, message)


def body(options: OpenAiOptions, prompt: str, *, whole: bool = True) -> dict[str, object]:
    content: dict[str, object] = json.loads(
        request_body(options, "m", Asking(prompt=prompt, max_tokens=9, whole_length=whole, seed=2**40 + 3))
    )
    return content


def test_completions_take_text_and_chats_one_message() -> None:
    common = {"model": "m", "max_tokens": 9, "temperature": 0, "seed": 3, "stream": True}
    counts = {"stream_options": {"include_usage": True}}
    assert body(OpenAiOptions(), "hello") == {**common, **counts, "prompt": "hello"}
    each = {"include_usage": True, "continuous_usage_stats": True}
    assert body(OpenAiOptions(usage="each"), "x")["stream_options"] == each
    chat = OpenAiOptions(endpoint="chat", usage="off")
    assert body(chat, "hello") == {**common, "messages": [{"role": "user", "content": "hello"}]}
    assert request_path(chat, parse_address("http://h/m/", "openai")) == "/m/chat/completions"


@pytest.mark.parametrize(
    ("body", "models"),
    [
        (
            b'{"data": [{"id": "other", "max_model_len": 7}, {"id": "llama", "max_model_len": 512}]}',
            {"other": 7, "llama": 512},
        ),
        (b'{"data": [{"id": "a/path", "meta": {"n_ctx": 256, "n_ctx_train": 1024}}]}', {"a/path": 256}),  # llama.cpp
        (b'{"data": [{"id": "llama", "max_model_len": 0}]}', {"llama": None}),
        (b'{"data": [{"id": "llama", "meta": "x"}]}', {}),
        (b"[" * 100_000, {}),
    ],
)
def test_the_list_of_models_tells_each_context_or_nothing(body: bytes, models: dict[str, int | None]) -> None:
    assert models_of(body) == models


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
ASKING = Asking(prompt="Say it.", max_tokens=4, whole_length=True, seed=7, greedy=True)


def openai(address: str, **settings: Any) -> ExternalArm:
    return OpenAiArm(name="x", kind="openai", address=(address,), model_name="llama", **settings)


def oip(address: str, model: str, **options: Any) -> ExternalArm:
    given = {"name": "x", "kind": "oip", "address": (address,), "model_name": model}
    return OipArm(**given, oip=OipOptions(**options))  # type: ignore[arg-type]


def asked(config: ExternalArm, timeout_s: float = 5.0) -> Answer:
    return ask(config, config.address[0], ASKING, timeout_s=timeout_s)


def test_completions_are_asked_greedily_whatever_the_settings_say() -> None:
    with HttpPeer(leaving(answer(said(" a b", finish="length"), DONE))) as peer:
        options = OpenAiOptions(length_fields=("ignore_eos",), extra={"temperature": 0.8, "seed": 1, "stop": ["</s>"]})
        found = asked(openai(peer.address, openai=options))
    assert (found.text, found.pieces) == (" a b", 1)
    body = peer.requests[-1].json
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 7, 4)
    assert (body["ignore_eos"], body["stop"]) == (True, ["</s>"])


@pytest.mark.parametrize("piece", [said(" a"), b": still busy\n\n"])
def test_time_is_over_even_while_a_server_sends_now_and_then(piece: bytes) -> None:
    def script(request: Request) -> bool:
        request.send(HEAD)
        for _ in range(30):
            request.send(piece)
            time.sleep(0.05)
        return False

    with HttpPeer(script) as peer:
        assert refusal(FailedError, asked, openai(peer.address), timeout_s=0.4) == "no answer within 0.4 s"


def test_a_token_that_is_not_there_is_named() -> None:
    assert "MY_TOKEN" in refusal(FailedError, asked, openai("http://127.0.0.1:9/v1", token_env="MY_TOKEN"))


GOOD = answer(said("a"), said(" b"), said("", finish="length"), usage(8, 9), DONE)
HEALTHY = plain("200 OK")


def server(post: bytes) -> Callable[[Request], None]:
    return lambda request: request.send(post if request.line.startswith("POST") else HEALTHY)


def probe(config: ExternalArm, timeout_s: float = 5.0, check: Callable[[], None] = lambda: None) -> Probe:
    return wait_ready(config, config.address[0], timeout_s=timeout_s, check=check, not_yet=lambda why: None)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (plain("404 No", b'{"error": {"message": "The model `llama` does not exist."}}'), "does not exist.*model_name"),
        (plain("401 No", b"{}"), "HTTP 401.*token_env"),
        (plain("422 No", b'{"detail": "Unexpected fields: ignore_eos"}'), "ignore_eos.*: it does not take a field"),
        (plain("308 Moved", b"", "Location: http://b/v1"), "redirects to http://b/v1"),
        (plain("200 OK", b'{"choices": []}', "Content-Type: application/json"), "Content-Type application/json.*proxy"),
        (plain("200 OK", b"x", "Content-Type: text/event-stream", "Content-Encoding: gzip"), "gzip"),
        (plain("200 OK", b"data: {}"), "no Content-Type and not text/event-stream"),
        (plain("500 Broken", b"oops"), "HTTP 500: oops"),
        (answer(said(" a")), "without a finish_reason"),
        (answer(event({"error": {"message": "out of memory"}})), "out of memory"),
        (answer(event("[1]")), "no JSON object"),
    ],
)
def test_answer_that_waiting_will_not_change_ends_the_wait(reply: bytes, says: str) -> None:
    with HttpPeer(server(reply)) as peer:
        with pytest.raises(FailedError, match=says) as caught:
            probe(openai(peer.address))
        assert not caught.value.not_yet
        assert refusal(FailedError, asked, openai(peer.address))


@pytest.mark.parametrize(("reply", "says"), [(b"nonsense\r\n\r\n", "BadStatusLine"), (b"", "RemoteDisconnected")])
def test_a_connection_that_breaks_may_come_back(reply: bytes, says: str) -> None:
    with HttpPeer(leaving(reply)) as peer, pytest.raises(FailedError, match=says) as caught:
        probe(openai(peer.address), timeout_s=0.1)
    assert caught.value.not_yet


def test_server_that_loads_its_model_is_waited_for() -> None:
    reasons: list[str] = []
    began = time.monotonic()

    def script(request: Request) -> None:
        reply = GOOD if request.line.startswith("POST") else HEALTHY
        request.send(reply if time.monotonic() - began > 0.3 else plain("503 Busy", b"loading"))

    with HttpPeer(script) as peer:
        config = openai(peer.address)
        found = wait_ready(config, peer.address, timeout_s=10, check=lambda: None, not_yet=reasons.append)
    assert found.tokens == 8
    assert "loading" in reasons[0]


def test_user_can_end_the_wait_for_a_server_that_is_silent() -> None:
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.2:
            raise LookupError("enough")

    with HttpPeer(lambda request: time.sleep(20)) as peer, pytest.raises(LookupError, match="enough"):
        probe(openai(peer.address), check=check)


def test_certificate_is_checked(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, "model.example")
    with HttpPeer(server(GOOD), tls=context(files, protocols=())) as peer:
        assert probe(openai(peer.address, tls_ca=files.ca, tls_server_name="model.example")).tokens == 8
        with pytest.raises(FailedError, match=r"is for another name.*tls_server_name") as caught:
            probe(openai(peer.address, tls_ca=files.ca))
        assert not caught.value.not_yet


def test_inference_servers_give_text_and_no_count(triton_address: str) -> None:
    text = asked(oip(triton_address, "text"))
    assert (text.text, text.pieces) == (" word0 word1 word2 word3", 4)
    assert probe(oip(triton_address, "text")).tokens is None


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("missing", {}, "NOT_FOUND.*'missing' is not found: give the arms.x.model_name"),
        ("raises", {}, "UNKNOWN.*Model raises not found: see arms.x.model_name"),
        (
            "text",
            {"prompt_tensor": "prompt"},
            r"unexpected inference input 'prompt'.*: see arms.x.model_name, the tensors of \[arms.oip\]",
        ),
        ("broken", {}, "CUDA error: out of memory"),
    ],
)
def test_inference_server_that_cannot_be_used_says_why(
    triton_address: str, model: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(FailedError, match=says) as caught:
        probe(oip(triton_address, model, **options))
    assert not caught.value.not_yet


def test_model_that_loads_is_waited_for(triton_address: str) -> None:
    for config, says in (
        (oip(triton_address, "loading"), 'model "loading" is not ready'),
        (oip("grpc://127.0.0.1:1", "text"), "UNAVAILABLE"),
    ):
        with pytest.raises(FailedError, match=says) as caught:
            probe(config, timeout_s=0.2)
        assert caught.value.not_yet


def test_a_list_of_models_that_gets_no_answer_is_named() -> None:
    def script(request: Request) -> bool:
        request.send(GOOD if request.line.startswith("POST") else b"")
        return request.line.startswith("POST")  # else the connection ends

    with HttpPeer(script) as peer, pytest.raises(FailedError, match=r"no answer to GET /v1/models: "):
        probe(openai(peer.address), timeout_s=1.0)


def test_a_name_that_the_server_does_not_know_is_answered_with_those_that_it_lists() -> None:
    listed, unknown = plain("200 OK", b'{"data": [{"id": "toy"}]}'), plain("404 No", b"{}")

    def script(request: Request) -> bool:
        request.send(unknown if request.line.startswith("POST") else listed)
        return False

    says = r"and the arms\.x\.model_name of the server, which lists toy"
    with HttpPeer(script) as peer, pytest.raises(FailedError, match=says):
        probe(openai(peer.address), timeout_s=1.0)
