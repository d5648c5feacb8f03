"""An external arm is there, knows its model and answers, or the reason why not is one line with the remedy."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.external.client_security import SecurityConfig
from loadtests.external.probes import NotReadyError, Probe, UnusableError, wait_ready
from tests.fakes import triton
from tests.fakes.certificates import make_certificates
from tests.fakes.http1 import DONE, HttpPeer, Request, answer, event, plain, said, usage

GOOD = answer(said("a"), said(" b"), said("", finish="length"), usage(8, 9), DONE)
HEALTHY = plain("200 OK")


def openai(address: str, **settings: Any) -> ExternalConfig:
    return ExternalConfig(kind="openai", addresses=(address,), model_name="llama", **settings)


def server(post: bytes, get: bytes = HEALTHY) -> Callable[[Request], None]:
    return lambda request: request.send(post if request.line.startswith("POST") else get)


def probe(config: ExternalConfig, timeout_s: float = 5.0, check: Callable[[], None] = lambda: None) -> Probe:
    return wait_ready(config, config.addresses[0], timeout_s=timeout_s, check=check, not_yet=lambda why: None)


def test_a_good_answer_tells_how_tokens_are_counted() -> None:
    with HttpPeer(server(GOOD)) as peer:
        found = probe(openai(peer.address))
    assert (found.asked, found.chunks, found.tokens, found.prompt_tokens, found.streams) == (8, 2, 8, 9, True)
    sent = peer.requests[-1].json
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("llama", 8, True)


def test_server_without_usage_counts_nothing() -> None:
    with HttpPeer(server(answer(said("a"), said("", finish="stop")))) as peer:
        found = probe(openai(peer.address, openai=OpenAiOptions(usage="off")))
    assert (found.chunks, found.tokens) == (1, None)


def test_token_ids_are_sent_where_the_arm_takes_them() -> None:
    with HttpPeer(server(GOOD)) as peer:
        probe(openai(peer.address, vocab_size=6, openai=OpenAiOptions(prompt="token_ids")))
    assert peer.requests[-1].json["prompt"] == [3, 4, 5, 3, 4, 5, 3, 4]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (plain("404 No", b'{"error": {"message": "The model `llama` does not exist."}}'), "does not exist.*model_name"),
        (plain("401 No", b"{}"), "HTTP 401.*token_env"),
        (plain("422 No", b'{"detail": "Unexpected fields: ignore_eos"}'), "ignore_eos: it does not take a field"),
        (plain("400 No", b'{"detail": "prompt must be a string."}'), "must be a string.*openai.prompt"),
        (plain("308 Moved", b"", "Location: http://b/v1"), "redirects to http://b/v1"),
        (plain("200 OK", b'{"choices": []}', "Content-Type: application/json"), "no event stream"),
        (answer(event({"error": {"message": "out of memory"}})), "out of memory"),
        (answer(said("a")), "without a finish_reason"),
    ],
)
def test_answer_that_waiting_will_not_change_ends_the_wait(reply: bytes, says: str) -> None:
    with HttpPeer(server(reply)) as peer, pytest.raises(UnusableError, match=says):
        probe(openai(peer.address))


def test_server_that_loads_its_model_is_waited_for() -> None:
    reasons: list[str] = []
    began = time.monotonic()

    def script(request: Request) -> None:
        ready = time.monotonic() - began > 0.3
        request.send(GOOD if ready and request.line.startswith("POST") else plain("503 Busy", b"loading"))
        if ready and not request.line.startswith("POST"):
            return

    def get_ready(request: Request) -> None:
        if time.monotonic() - began > 0.3:
            request.send(GOOD if request.line.startswith("POST") else HEALTHY)
        else:
            script(request)

    with HttpPeer(get_ready) as peer:
        config = openai(peer.address)
        found = wait_ready(config, peer.address, timeout_s=10, check=lambda: None, not_yet=reasons.append)
    assert found.tokens == 8
    assert reasons
    assert "loading" in reasons[0]


def test_nobody_there_is_said_after_the_time_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with pytest.raises(NotReadyError, match="refused"):
        probe(openai(address), timeout_s=0.2)


def test_user_can_end_the_wait_for_a_server_that_is_silent() -> None:
    class EnoughError(Exception):
        pass

    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.2:
            raise EnoughError

    with HttpPeer(lambda request: time.sleep(20)) as peer, pytest.raises(EnoughError):
        probe(openai(peer.address), check=check)
    assert time.monotonic() - began < 15


def test_token_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-token")
    refusal = plain("401 No", b'{"error": {"message": "bad key s3cret-token"}}')
    with HttpPeer(server(refusal)) as peer, pytest.raises(UnusableError) as caught:
        probe(openai(peer.address, security=SecurityConfig(token_env="MY_TOKEN")))
    assert "bad key ***" in str(caught.value)
    assert peer.requests[0].headers["authorization"] == "Bearer s3cret-token"


def test_certificate_is_checked(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, "model.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with HttpPeer(server(GOOD), tls=context) as peer:
        named = SecurityConfig(tls_ca=files.ca, tls_server_name="model.example")
        assert probe(openai(peer.address, security=named)).tokens == 8
        for security, says in (
            (SecurityConfig(), "not trusted.*tls_ca"),
            (SecurityConfig(tls_ca=files.ca), "is for another name.*tls_server_name"),
        ):
            with pytest.raises(UnusableError, match=says):
                probe(openai(peer.address, security=security))


# --- Open Inference Protocol ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed")
    with triton.served() as address:
        yield address


def oip(address: str, model: str, **options: Any) -> ExternalConfig:
    return ExternalConfig(kind="oip", addresses=(address,), model_name=model, vocab_size=100, oip=OipOptions(**options))


IDS: dict[str, Any] = {
    **{"prompt": "token_ids", "prompt_tensor": "input_ids", "prompt_length_tensor": "input_lengths", "batched": True},
    **{"max_tokens_tensor": "request_output_len", "stream_tensor": "", "parameters_tensor": ""},
}


def test_inference_server_answers_as_the_load_will_ask(address: str) -> None:
    text = probe(oip(address, "text"))
    assert (text.chunks, text.tokens, text.streams) == (8, None, True)
    ids = probe(oip(address, "ids", output_tensor="output_ids", **IDS))
    assert (ids.chunks, ids.tokens) == (8, 8)
    assert not probe(oip(address, "text", stream="off")).streams


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("nobody", {}, "NOT_FOUND.*'nobody' is not found: give the model_name"),
        ("raises", {}, "UNKNOWN.*Model raises not found: see model_name"),
        ("text", {"prompt_tensor": "prompt"}, 'no input "prompt" but text_input, stream.*set oip.prompt_tensor'),
        ("text", {"output_tensor": "answer"}, 'no output "answer" but text_output: set oip.output_tensor'),
        ("broken", {}, "CUDA error: out of memory"),
        ("text", {"stream": "plain"}, "oip.stream"),
    ],
)
def test_inference_server_that_cannot_be_used_says_why(
    address: str, model: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnusableError, match=says):
        probe(oip(address, model, **options))


def test_model_that_loads_is_waited_for(address: str) -> None:
    with pytest.raises(NotReadyError, match='model "loading" is not ready'):
        probe(oip(address, "loading"), timeout_s=0.2)
    with pytest.raises(NotReadyError, match="UNAVAILABLE"):
        probe(oip("grpc://127.0.0.1:1", "text"), timeout_s=0.2)
