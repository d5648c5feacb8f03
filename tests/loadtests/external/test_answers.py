"""One greedy answer: its text, its log-probabilities where the server tells them, or why there is none, in one line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.external.answers import ALTERNATIVES, Answer, Asking, ask
from loadtests.external.client_security import SecurityConfig
from tests.fakes import triton
from tests.fakes.http1 import DONE, HttpPeer, answer, event, plain, said

ASKING = Asking(prompt="Say it.", max_tokens=4, whole_length=True, seed=7)
COMPLETION = {"tokens": [" a", " b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": [{" a": -0.1, " c": -3}, None]}
CHAT = {"content": [{"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " c", "logprob": float("-inf")}]}]}


def asked(address: str, *, timeout_s: float = 5.0, asking: Asking = ASKING, **settings: Any) -> Answer:
    config = ExternalConfig(kind="openai", addresses=(address,), model_name="llama", **settings)
    return ask(config, address, asking, timeout_s=timeout_s, alternatives=ALTERNATIVES)


def told(logprobs: object, *, chat: bool = False) -> bytes:
    choice = {"delta": {"content": " a b"}} if chat else {"text": " a b"}
    return answer(event({"choices": [{**choice, "logprobs": logprobs, "finish_reason": "length"}]}), DONE)


def test_completions_are_asked_greedily_for_log_probabilities() -> None:
    with HttpPeer(lambda request: request.send(told(COMPLETION))) as peer:
        options = OpenAiOptions(length_fields=("ignore_eos",), extra={"temperature": 0.8, "seed": 1, "top_k": 4})
        found = asked(peer.address, openai=options)
    assert (found.text, found.pieces, found.error, found.refused) == (" a b", 1, "", "")
    assert [tuple(token) for token in found.tokens] == [(" a", -0.1, {" a": -0.1, " c": -3.0}), (" b", -0.2, {})]
    body = peer.requests[-1].json
    assert (body["temperature"], body["seed"], body["logprobs"], body["max_tokens"]) == (0, 7, 5, 4)
    assert (body["ignore_eos"], body["top_k"]) == (True, 4)


def test_chats_are_asked_by_the_fields_of_chats() -> None:
    with HttpPeer(lambda request: request.send(told(CHAT, chat=True))) as peer:
        found = asked(peer.address, openai=OpenAiOptions(endpoint="chat"))
    # A token without a chance has no log-probability that could be compared.
    assert [tuple(token) for token in found.tokens] == [(" a", -0.1, {})]
    assert (peer.requests[-1].json["logprobs"], peer.requests[-1].json["top_logprobs"]) == (True, 5)


@pytest.mark.parametrize("status", ["400 No", "422 No"])
def test_server_that_refuses_log_probabilities_is_asked_again_without(status: str) -> None:
    def script(request: Any) -> None:
        refused = plain(status, b'{"error": {"message": "logprobs is not supported"}}')
        request.send(refused if "logprobs" in request.json else answer(said(" a"), said("", finish="stop"), DONE))

    with HttpPeer(script) as peer:
        found = asked(peer.address)
    assert (found.text, found.tokens, found.error) == (" a", [], "")
    assert found.refused.endswith("logprobs is not supported")
    assert len(peer.requests) == 2


def test_what_is_refused_all_the_same_was_not_refused_for_them() -> None:
    with HttpPeer(lambda request: request.send(plain("400 No", b'{"error": "prompt is too long"}'))) as peer:
        found = asked(peer.address)
    assert (found.error, found.refused) == ("HTTP 400: prompt is too long", "")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (plain("500 Broken", b"oops"), "HTTP 500: oops"),
        (answer(said(" a")), "without a finish_reason"),
        (answer(event({"error": {"message": "out of memory"}})), "out of memory"),
        (answer(event("[1]")), "no JSON object"),
        (answer(b"data: {\n\n"), "JSONDecodeError"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_what_goes_wrong_is_a_line_of_the_answer(reply: bytes, says: str) -> None:
    def script(request: Any) -> bool:
        request.send(reply)
        return False

    with HttpPeer(script) as peer:
        assert says in asked(peer.address).error


@pytest.mark.parametrize("logprobs", [3, {"tokens": [" a"]}, {"content": [{"token": " a"}]}, {"content": 5}])
def test_log_probabilities_of_an_unknown_form_are_none(logprobs: object) -> None:
    with HttpPeer(lambda request: request.send(told(logprobs))) as peer:
        found = asked(peer.address)
    assert (found.text, found.tokens, found.error) == (" a b", [], "")


def test_time_is_over_even_while_a_server_sends_now_and_then() -> None:
    def script(request: Any) -> None:
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for _ in range(100):
            request.send(said(" a"))
            time.sleep(0.05)

    with HttpPeer(script) as peer:
        began = time.monotonic()
        assert asked(peer.address, timeout_s=0.4).error == "no answer within 0.4 s"
    assert time.monotonic() - began < 4


def test_token_is_shown_to_the_server_and_in_no_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    security = SecurityConfig(token_file=str(tmp_path / "token"))
    with HttpPeer(lambda request: request.send(plain("403 No", b"s3cret may not"))) as peer:
        found = asked(peer.address, security=security)
    assert peer.requests[-1].headers["authorization"] == "Bearer s3cret"
    assert found.error == "HTTP 403: *** may not"


def test_token_that_is_not_there_is_a_line_too(tmp_path: Path) -> None:
    found = asked("http://127.0.0.1:9/v1", security=SecurityConfig(token_env="NOBODY_SET_THIS"))
    assert "NOBODY_SET_THIS" in found.error


def test_answer_without_end_is_cut_off() -> None:
    def script(request: Any) -> None:
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for _ in range(40):
            request.send(said("x" * 50_000))

    with HttpPeer(script) as peer:
        assert "more than 1000000 characters" in asked(peer.address).error


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed")
    with triton.served() as address:
        yield address


def over_oip(address: str, model: str, asking: Asking = ASKING, **options: Any) -> Answer:
    config = ExternalConfig(
        kind="oip", addresses=(address,), model_name=model, vocab_size=100, oip=OipOptions(**options)
    )
    return ask(config, address, asking, timeout_s=20, alternatives=ALTERNATIVES)


def test_inference_servers_give_text_or_token_ids_and_no_log_probabilities(address: str) -> None:
    text = over_oip(address, "text")
    assert (text.text, text.pieces, text.tokens, text.error) == (" word0 word1 word2 word3", 4, [], "")
    asking = Asking(prompt=[1, 2, 3], max_tokens=3, whole_length=False, seed=1)
    names = {"prompt": "token_ids", "prompt_tensor": "input_ids", "prompt_length_tensor": "input_lengths"}
    names |= {"max_tokens_tensor": "request_output_len", "stream_tensor": "", "parameters_tensor": ""}
    ids = over_oip(address, "ids", asking, **names, output_tensor="output_ids", batched=True)
    assert (ids.text, ids.pieces, ids.error) == (" 7 8 9", 3, "")


def test_failure_inside_a_stream_and_a_model_that_is_not_there_are_lines(address: str) -> None:
    assert over_oip(address, "broken").error == "CUDA error: out of memory"
    assert over_oip("grpc://127.0.0.1:9", "text").error.startswith("UNAVAILABLE: ")
