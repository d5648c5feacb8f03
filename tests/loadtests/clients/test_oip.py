"""The Open Inference Protocol against a server on tritonclient's own stubs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.grpc_call import EmbedCall
from tailgate.loadtests.clients.route import Endpoint, Route, external_client, external_route
from tailgate.loadtests.external.arms import ExternalArm, OipArm, OipOptions, OpenAiArm, OpenAiOptions
from tailgate.loadtests.external.asking import Asking
from tailgate.loadtests.external.oip_wire import infer_request, read_response
from tailgate.loadtests.traffic.schedule import PlannedRequest
from tailgate.servers.rpc.inference_pb2 import EmbedResponse
from tailgate.servers.rpc.oip_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tests.fakes import triton
from tests.fakes.http2 import finished, grpc_message

ENSEMBLE = OipOptions(max_tokens_tensor="max_tokens", parameters_tensor="", batched=True)


def config(kind: Any, *addresses: str, **settings: Any) -> ExternalArm:
    kinds: dict[str, Any] = {"openai": OpenAiArm, "oip": OipArm}
    known = {"name": "x", "model_name": "llama"}
    return kinds[kind](kind=kind, address=addresses, **{**known, **settings})


def ask(address: str, model: str, options: OipOptions) -> Call:
    client = external_client(config("oip", address, oip=options), address)
    done: list[Call] = []
    asking = Asking(prompt="tell me", max_tokens=5, whole_length=True, seed=1)
    body = infer_request(options, model, asking, "1-1")
    call = finished(client.start(body, timeout_s=10, on_done=done.append))
    client.close()
    assert done == [call]
    return call


def test_streamed_text_has_a_time_for_each_piece(triton_address: str) -> None:
    call = ask(triton_address, "text", OipOptions())
    assert (call.status, call.error, call.output_tokens) == ("OK", "", 5)
    assert call.first_token_ns == call.token_ns[0]
    assert call.token_ns[-1] - call.token_ns[0] > triton.TOKEN_S * 1e9  # four of them, unless they came late
    assert call.end_ns >= call.token_ns[-1]


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [("ensemble", ENSEMBLE, ("OK", "", 5)), ("broken", OipOptions(), ("INTERNAL", "CUDA error: out of memory", 1))],
)
def test_the_length_may_have_a_tensor_and_an_error_inside_the_stream_ends_the_call(
    model: str, options: OipOptions, expected: tuple[str, str, int], triton_address: str
) -> None:
    call = ask(triton_address, model, options)
    assert (call.status, call.error, call.output_tokens) == expected


def response(name: str, datatype: str) -> ModelInferResponse:
    found = ModelInferResponse(model_name="m")
    found.outputs.add(name=name, datatype=datatype, shape=[1])
    return found


@pytest.mark.parametrize(
    ("raw", "text"), [(b"\x02\0\0\0hi\x01\0\0\0!", "hi!"), (b"\0\0\0\0", ""), (b"", "")], ids=["two", "empty", "none"]
)
def test_tensors_are_read_raw_and_as_contents(raw: bytes, text: str) -> None:
    in_raw, as_contents = (response("text_output", "BYTES") for _ in "ab")
    in_raw.raw_output_contents.extend([raw] if raw else [])
    as_contents.outputs[0].contents.bytes_contents.extend([text.encode()] if text else [])
    for found in (in_raw, as_contents):
        message = ModelStreamInferResponse(infer_response=found).SerializeToString()
        assert read_response(OipOptions(), message).text == text


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Mock(SerializeToString=lambda: b"\xff\xff\xff"), "no inference response as Triton streams it"),
        (ModelStreamInferResponse(infer_response=response("answer", "BYTES")), 'no tensor "text_output" but answer'),
        (ModelStreamInferResponse(infer_response=response("text_output", "INT32")), "is INT32 and not text"),
    ],
)
def test_a_tensor_that_is_no_answer_is_an_error(message: ModelStreamInferResponse, error: str) -> None:
    assert error in read_response(OipOptions(), message.SerializeToString()).error


def embedded(payload: bytes) -> EmbedCall:
    """A call whose server sent this, and that it went well."""
    call = EmbedCall(headers=b"", body=b"", timeout_s=None, on_done=None, tag=None)
    call.on_headers({":status": "200"}, False, 10)
    call.on_data(payload, 10)
    call.on_headers({"grpc-status": "0"}, True, 20)
    return call


def vector(*values: float) -> bytes:
    return grpc_message(EmbedResponse(values=values).SerializeToString())


def test_an_answer_has_an_end_and_no_tokens() -> None:
    one = embedded(vector(0.6, 0.8))
    assert (one.status, one.end_ns) == ("OK", 20)
    assert (one.first_token_ns, one.output_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "the answer ended with OK and holds 0 vectors"),
        (grpc_message(b""), "the answer ended with OK and holds 0 vectors"),
        (vector(1.0) + vector(1.0), "the answer ended with OK and holds 2 vectors"),
        (grpc_message(b"\xff\xff"), "a message is not an EmbedResponse"),
    ],
)
def test_an_answer_that_is_no_vector_has_failed(payload: bytes, message: str) -> None:
    one = embedded(payload)
    assert one.status == "INTERNAL"
    assert one.error.startswith(message)


def plan(**change: Any) -> PlannedRequest:
    row: dict[str, Any] = {
        **{"index": 7, "offset_ns": 0, "prompt_tokens": 12, "max_tokens": 5},
        **{"prompt_seed": 11, "arm": "*", "phase": "measure"},
    }
    return PlannedRequest(**{**row, **change})


def body(external: ExternalArm, plan: PlannedRequest, *, whole: bool = True) -> tuple[Any, bytes]:
    route = external_route(external, traffic=None, ignore_eos=whole)
    return route.encode(plan, "1-7-x", "x")


def test_exact_length_is_asked_for_only_when_the_traffic_wants_it() -> None:
    external = config("openai", "http://a/v1", openai=OpenAiOptions(length_fields=("min_tokens",)))
    assert json.loads(body(external, plan())[0])["min_tokens"] == 5
    assert "min_tokens" not in json.loads(body(external, plan(), whole=False)[0])


def test_inference_request_carries_text() -> None:
    content, headers = body(config("oip", "a:1"), plan())
    sent = ModelInferRequest.FromString(content)
    assert (sent.model_name, sent.id, headers) == ("llama", "1-7-x", b"")
    assert len(sent.inputs[0].contents.bytes_contents[0].split()) == 12


def test_replica_with_the_fewest_requests_is_next_and_equals_take_turns() -> None:
    endpoints = [Endpoint(Mock(), str(number)) for number in range(3)]
    route = Route(lambda *_: (b"", b""), endpoints)
    assert Counter(route.endpoint().replica for _ in range(30)) == {"0": 10, "1": 10, "2": 10}
    endpoints[0].running, endpoints[2].running = 2, 1
    assert {route.endpoint().replica for _ in range(5)} == {"1"}
