"""The Open Inference Protocol against a server on tritonclient's own stubs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from gevent import sleep
from hypothesis import given
from hypothesis import strategies as st

from loadtests.clients.call import Call
from loadtests.clients.oip import oip_client
from loadtests.external.addresses import ExternalConfig, OipOptions
from loadtests.external.oip_wire import infer_request, read_response
from servers.rpc.oip_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tests.fakes import triton

MS = 1_000_000
IDS = OipOptions(
    prompt="token_ids",
    prompt_tensor="input_ids",
    prompt_length_tensor="input_lengths",
    max_tokens_tensor="request_output_len",
    stream_tensor="",
    parameters_tensor="",
    output_tensor="output_ids",
    batched=True,
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if find_spec("tritonclient") is None:  # importing it here would register its protobuf names beside ours
        pytest.skip("tritonclient is not installed")
    with triton.served() as address:
        yield address


def config_of(address: str, model: str, options: OipOptions) -> ExternalConfig:
    return ExternalConfig(kind="oip", addresses=(address,), model_name=model, vocab_size=100, oip=options)


def ask(address: str, model: str, options: OipOptions, tokens: int = 5) -> Call:
    config = config_of(address, model, options)
    client = oip_client(config, address)
    prompt: Any = [5, 6, 7] if options.prompt == "token_ids" else "tell me"
    done: list[Call] = []
    body = infer_request(
        options, model=model, prompt=prompt, max_tokens=tokens, whole_length=True, seed=1, request_id="1-1"
    )
    call = client.start(body, timeout_s=10, on_done=done.append)
    for _ in range(1000):
        if call.done:
            break
        sleep(0.01)
    client.close()
    assert done == [call]
    return call


def test_streamed_text_has_a_time_for_each_piece(address: str) -> None:
    call = ask(address, "text", OipOptions())
    assert (call.status, call.error, call.output_tokens) == ("OK", "", 5)
    assert call.first_token_ns == call.token_ns[0]
    assert call.token_ns[-1] - call.token_ns[0] > triton.TOKEN_S * 1e9  # four of them, unless they came late
    assert call.end_ns >= call.token_ns[-1]


def test_streamed_token_ids_are_counted(address: str) -> None:
    call = ask(address, "ids", IDS, tokens=7)
    assert (call.status, call.error, call.output_tokens) == ("OK", "", 7)


def test_unary_inference_has_its_first_token_with_its_last(address: str) -> None:
    call = ask(address, "text", OipOptions(stream="off"))
    assert (call.status, call.output_tokens) == ("OK", 1)
    assert call.first_token_ns is not None
    assert call.end_ns - call.first_token_ns < 50 * MS


def test_error_inside_the_stream_ends_the_call(address: str) -> None:
    call = ask(address, "broken", OipOptions())
    assert (call.status, call.error, call.output_tokens) == ("INTERNAL", "CUDA error: out of memory", 1)


def test_other_tensor_than_named_is_said(address: str) -> None:
    text = ModelInferResponse(model_name="m")
    text.outputs.add(name="answer", datatype="BYTES", shape=[1])
    streamed = ModelStreamInferResponse(infer_response=text).SerializeToString()
    assert 'no tensor "text_output" but answer' in read_response(OipOptions(), streamed).error


def test_request_without_a_streaming_server_is_unimplemented(address: str) -> None:
    # ModelStreamInfer of the stubs is there; a service that is not answers UNIMPLEMENTED through the trailers.
    config = config_of(address, "text", OipOptions())
    client = oip_client(config, address)
    client.header_prefix = client.header_prefix.replace(b"ModelStreamInfer", b"ModelStreamOther")
    call = client.start(b"", timeout_s=10)
    while not call.done:
        sleep(0.01)
    client.close()
    assert call.status == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("datatype", "values", "raw", "tokens"),
    [
        ("INT32", "int_contents", b"\x01\x00\x00\x00\x02\x00\x00\x00", 2),
        ("INT64", "int64_contents", b"\x01" + b"\x00" * 7, 1),
        ("UINT32", "uint_contents", b"", 0),
        ("BYTES", "bytes_contents", b"\x02\x00\x00\x00hi", 1),
        ("BYTES", "bytes_contents", b"\x00\x00\x00\x00", 0),
    ],
)
def test_tensors_are_read_raw_and_as_contents(datatype: str, values: str, raw: bytes, tokens: int) -> None:
    options = OipOptions(stream="plain", output_tensor="out")
    in_raw = ModelInferResponse(raw_output_contents=[raw] if raw else [])
    in_raw.outputs.add(name="out", datatype=datatype, shape=[tokens])
    assert read_response(options, in_raw.SerializeToString()).tokens == tokens
    as_contents = ModelInferResponse()
    output = as_contents.outputs.add(name="out", datatype=datatype, shape=[tokens])
    getattr(output.contents, values).extend([b"x" if datatype == "BYTES" else 3] * tokens)
    assert read_response(options, as_contents.SerializeToString()).tokens == tokens


def test_floats_are_no_answer() -> None:
    response = ModelInferResponse()
    response.outputs.add(name="out", datatype="FP32", shape=[1])
    piece = read_response(OipOptions(stream="plain", output_tensor="out"), response.SerializeToString())
    assert "neither text nor token ids" in piece.error


def test_bytes_that_are_no_message_are_an_error_and_empty_ones_say_nothing() -> None:
    assert "is oip.stream right" in read_response(OipOptions(), b"\xff\xff\xff").error
    assert read_response(OipOptions(), b"") == (0, "", False)


@given(st.binary(max_size=80), st.sampled_from(["triton", "plain"]))
def test_any_bytes_are_a_piece_or_an_error(message: bytes, stream: Any) -> None:
    piece = read_response(OipOptions(stream=stream), message)
    assert piece.tokens >= 0
    assert not (piece.error and piece.tokens)


def test_exact_length_travels_in_the_parameters() -> None:
    options = OipOptions(length_fields=("min_tokens", "ignore_eos"), extra={"top_k": 1})
    body = infer_request(options, model="m", prompt="x", max_tokens=6, whole_length=True, seed=0, request_id="r")
    sent = ModelInferRequest.FromString(body)
    tensors = {tensor.name: tensor for tensor in sent.inputs}
    assert list(tensors) == ["text_input", "stream", "sampling_parameters"]
    parameters = tensors["sampling_parameters"].contents.bytes_contents[0]
    for part in (b'"max_tokens": 6', b'"min_tokens": 6', b'"ignore_eos": true', b'"top_k": 1'):
        assert part in parameters
    assert (sent.model_name, sent.id, sent.outputs[0].name) == ("m", "r", "text_output")


def test_an_error_of_many_lines_is_one_of_a_few() -> None:
    call = Call()
    call.finish("INTERNAL", "no\nmore\x1b[2J" + "x" * 100_000, 1)
    assert call.error.isprintable()
    assert call.error.startswith("no more\\x1b[2J")
    assert len(call.error) < 1100
