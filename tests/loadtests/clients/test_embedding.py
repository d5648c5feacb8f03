"""What an Embed call makes of its answer. No socket: frames are fed by hand."""

from __future__ import annotations

import struct

import pytest

from loadtests.clients.embedding import EmbedCall
from loadtests.clients.own_arms import OwnEncoder
from loadtests.traffic.schedule import PlannedRequest
from servers.rpc.inference_pb2 import EmbedRequest, EmbedResponse

PLAN = PlannedRequest(
    index=0,
    offset_ns=0,
    session_id="1-0",
    turn=0,
    prompt_tokens=3,
    max_tokens=0,
    prompt_seed=7,
    arm="eager",
    phase="measure",
    prefix_seed=7,
)


def call() -> EmbedCall:
    return EmbedCall(headers=b"", body=b"", timeout_s=None, on_done=None, tag=None)


def framed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


def vector(*values: float) -> bytes:
    return framed(EmbedResponse(values=values, tokens=5).SerializeToString())


def test_an_answer_has_an_end_and_no_tokens() -> None:
    one = call()
    one.on_data(vector(0.6, 0.8), 10)
    one.on_headers({":status": "200"}, False, 10)
    one.on_headers({"grpc-status": "0"}, True, 20)
    assert (one.status, one.end_ns, one.size, one.input_tokens) == ("OK", 20, 2, 5)
    assert one.first_token_ns is None
    assert one.output_tokens == 0


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "the answer ended with OK and holds no vector"),
        (framed(b""), "the answer ended with OK and holds no vector"),
        (vector(1.0) + vector(1.0), "a second vector came, and one text has one"),
        (framed(b"\xff\xff"), "a message is not an EmbedResponse"),
    ],
)
def test_an_answer_that_is_no_vector_has_failed(payload: bytes, message: str) -> None:
    one = call()
    one.on_headers({":status": "200"}, False, 10)
    one.on_data(payload, 10)
    one.on_headers({"grpc-status": "0"}, True, 20)
    assert one.status == "INTERNAL"
    assert one.error.startswith(message)


def test_a_refusal_keeps_its_status_and_words() -> None:
    one = call()
    one.on_headers({":status": "200", "grpc-status": "3", "grpc-message": "too long"}, True, 20)
    assert (one.status, one.error) == ("INVALID_ARGUMENT", "too long")


def test_a_plan_is_written_as_the_request_of_its_task() -> None:
    ids = OwnEncoder(lambda plan: [4, 5, 6], ignore_eos=True, task="embed")
    body, headers = ids(PLAN, "1-0-eager", "eager")
    request = EmbedRequest.FromString(body)
    assert (request.request_id, request.session_id, list(request.token_ids.ids)) == ("1-0-eager", "1-0", [4, 5, 6])
    assert b"x-tailgate-arm" in headers
    text = OwnEncoder(lambda plan: [], ignore_eos=True, text=lambda plan: "two words", task="embed")
    assert EmbedRequest.FromString(text(PLAN, "a", None)[0]).text == "two words"
