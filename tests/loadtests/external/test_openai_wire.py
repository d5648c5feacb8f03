"""Request bodies, server-sent events and errors, apart from any connection."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.external.addresses import OpenAiOptions
from loadtests.external.openai_wire import (
    DONE,
    LARGEST_EVENT,
    EventStream,
    context_of,
    error_of_body,
    http_status_name,
    read_event,
    request_body,
    request_path,
)
from loadtests.traffic.prompts import Message


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


# What people write: no line ends inside, since those would be new lines of the stream.
lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=20)


@given(
    st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_events_are_the_same_at_any_byte_boundary(
    events: list[list[str]], end: str, mark: bool, places: list[int]
) -> None:
    text = "".join("".join(f"data: {line}{end}" for line in event) + f": note{end}id: 7{end}{end}" for event in events)
    data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    stream = EventStream()
    found = [event for piece in cut(data, places) for event in stream.feed(piece)]
    assert found == ["\n".join(event).encode() for event in events]
    assert stream.close() is None


@given(st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=10))
def test_any_bytes_give_the_same_events_whole_or_in_pieces(data: bytes, places: list[int]) -> None:
    whole, pieces = EventStream(), EventStream()
    assert whole.feed(data) == [event for piece in cut(data, places) for event in pieces.feed(piece)]


def test_event_is_there_with_its_empty_line_and_not_a_byte_later() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\r") == []
    assert stream.feed(b"\r") == [b"a"]
    assert stream.feed(b"\ndata: b\r\n\r\n") == [b"b"]


def test_end_mark_counts_without_its_empty_line() -> None:
    for tail in (b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"):
        stream = EventStream()
        assert stream.feed(b"data: a\n\n" + tail) == [b"a"]
        assert stream.close() == DONE
    stream = EventStream()
    stream.feed(b'data: {"half": ')
    assert stream.close() is None


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
    assert (chunk.text, chunk.ended) == (text, ended)
    assert chunk.failed is None


def test_usage_is_the_servers_count() -> None:
    chunk = read_event(b'{"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 21}}')
    assert (chunk.completion_tokens, chunk.prompt_tokens) == (7, 21)
    odd = read_event(b'{"choices": [], "usage": {"completion_tokens": -1, "prompt_tokens": "x"}}')
    assert (odd.completion_tokens, odd.prompt_tokens) == (None, None)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({"error": {"message": "slow down", "code": 429}}, "RESOURCE_EXHAUSTED", "slow down"),
        ({"error": {"message": "gone", "type": "x", "code": None}}, "INTERNAL", "gone"),
        ({"error": "CUDA out of memory"}, "INTERNAL", "CUDA out of memory"),
        ({"object": "error", "message": "too long", "code": "400"}, "INVALID_ARGUMENT", "too long"),
        ({"detail": [{"loc": ["body"]}]}, "INTERNAL", '[{"loc": ["body"]}]'),
    ],
)
def test_error_inside_a_stream_has_a_status_and_a_message(content: object, status: str, message: str) -> None:
    assert read_event(json.dumps(content).encode()).failed == (status, message)


def test_http_statuses_have_grpc_names() -> None:
    names = {code: http_status_name(code) for code in (400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504)}
    assert names == {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED",
        413: "INVALID_ARGUMENT",
        422: "INVALID_ARGUMENT",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        502: "UNAVAILABLE",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }


def test_body_of_an_error_is_told_whatever_it_is() -> None:
    assert error_of_body(503, b"<html>\n<b>busy</b>\x00</html>") == (
        "UNAVAILABLE",
        "HTTP 503: <html> <b>busy</b> </html>",
    )
    assert error_of_body(400, b'{"error": {"message": "prompt must be a string."}}') == (
        "INVALID_ARGUMENT",
        "HTTP 400: prompt must be a string.",
    )
    assert error_of_body(404, b"") == ("NOT_FOUND", "HTTP 404")
    assert error_of_body(500, b"\xff" * 9000)[1].endswith("…")
    assert error_of_body(307, b"", "https://elsewhere/v1") == (
        "FAILED_PRECONDITION",
        "HTTP 307: the server redirects to https://elsewhere/v1: give that address",
    )
    assert error_of_body(200, b'{"choices": []}')[0] == "INTERNAL"
    assert error_of_body(200, b'{"error": {"message": "no", "code": 429}}') == ("RESOURCE_EXHAUSTED", "no")


def body(options: OpenAiOptions, prompt: str | list[int] | list[Message], *, whole: bool = True) -> dict[str, object]:
    content: dict[str, object] = json.loads(
        request_body(options, model="m", prompt=prompt, max_tokens=9, whole_length=whole, seed=2**40 + 3)
    )
    return content


def test_completion_takes_text_or_token_ids() -> None:
    sent = body(OpenAiOptions(), "hello")
    assert sent == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 9,
        "temperature": 0,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert body(OpenAiOptions(prompt="token_ids"), [5, 6])["prompt"] == [5, 6]
    each = {"include_usage": True, "continuous_usage_stats": True}
    assert body(OpenAiOptions(usage="each"), "x")["stream_options"] == each
    assert request_path(OpenAiOptions(), "/v1") == "/v1/completions"


def test_chat_takes_text_as_its_one_message_or_messages() -> None:
    options = OpenAiOptions(endpoint="chat", max_tokens_field="max_completion_tokens", usage="off")
    sent = body(options, "hello")
    assert sent["messages"] == [{"role": "user", "content": "hello"}]
    assert sent["max_completion_tokens"] == 9
    assert not {"max_tokens", "stream_options", "prompt"} & set(sent)
    talk = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert body(options, talk)["messages"] == [{"role": item.role, "content": item.content} for item in talk]
    assert request_path(options, "") == "/chat/completions"


def test_exact_length_is_asked_for_in_the_servers_own_words_and_only_when_wanted() -> None:
    options = OpenAiOptions(length_fields=("ignore_eos", "min_tokens"), extra={"top_k": 1, "temperature": 0.5})
    sent = body(options, "x")
    assert (sent["ignore_eos"], sent["min_tokens"], sent["top_k"], sent["temperature"]) == (True, 9, 1, 0.5)
    assert not {"ignore_eos", "min_tokens"} & set(body(options, "x", whole=False))


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"data": [{"id": "other", "max_model_len": 7}, {"id": "llama", "max_model_len": 512}]}', 512),
        (b'{"data": [{"id": "a/path", "meta": {"n_ctx": 256, "n_ctx_train": 1024}}]}', 256),  # llama.cpp
        (b'{"data": [{"id": "a", "max_model_len": 7}, {"id": "b", "max_model_len": 8}]}', None),
        (b'{"data": [{"id": "llama"}]}', None),
        (b'{"data": [{"id": "llama", "max_model_len": 0}]}', None),
        (b'{"data": [{"id": "llama", "meta": "x"}]}', None),
        (b'{"data": []}', None),
        (b'{"object": "list"}', None),
        (b"[1]", None),
        (b"no json", None),
        (b"[" * 100_000, None),
    ],
)
def test_the_list_of_models_tells_the_context_or_nothing(body: bytes, limit: int | None) -> None:
    assert context_of(body, "llama") == limit


def test_a_count_that_no_answer_has_ends_the_call_before_it_takes_memory() -> None:
    event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 10**10}}
    chunk = read_event(json.dumps(event).encode())
    assert chunk.failed == (
        "INTERNAL",
        "the server counts 2147483647 tokens or more in its answer; the limit is 1048576",
    )
    usage = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 10**40}}
    assert read_event(json.dumps(usage).encode()).prompt_tokens == 2**31 - 1
