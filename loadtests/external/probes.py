"""Whether an external arm can be judged: it answers, knows the model, and counts its tokens or not.

Before a trial every replica answers one short request, sent as the load will send them. So a wrong model name, tensor,
token or address ends the run with one line before any traffic, and the trial's facts say how tokens can be counted.
Blocking and without gevent: it runs in the orchestrator.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import grpc

from loadtests.external import oip_wire, openai_wire
from loadtests.external.addresses import (
    Address,
    ExternalConfig,
    OipOptions,
    OpenAiOptions,
    parse_address,
    secrets_of,
)
from loadtests.external.client_security import bearer_token, explain, server_name, without_secrets
from loadtests.external.grpc_channel import open_channel
from loadtests.external.openai_http import connect, events, headers_of, post
from loadtests.external.openai_wire import shortened
from servers.rpc import oip_pb2, oip_pb2_grpc

TOKENS = 8  # of the short answer
_PROMPT = "Tell me a short story about the sea."
_POLL_S = 0.1
_RETRY_S = 0.5
_REQUEST_S = 120.0  # a server may load its model with its first request


class NotReadyError(Exception):
    """The server cannot serve yet, and may later."""


class UnusableError(Exception):
    """The server answered, and what it said will not change by waiting. One line with the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one short answer showed. `tokens` is the server's own count, None when it gave none.

    `context` is the most tokens of a prompt and its answer, where the server tells it.
    """

    asked: int
    chunks: int
    tokens: int | None
    prompt_tokens: int | None
    streams: bool
    seconds: float
    context: int | None = None


def wait_ready(
    config: ExternalConfig, address: str, *, timeout_s: float, check: Callable[[], None], not_yet: Callable[[str], None]
) -> Probe:
    """What the replica at `address` answered, once it did. `check` is called often and may raise to end the wait.

    Raises UnusableError at once when waiting will not help, and NotReadyError after `timeout_s`. Before each further
    try `not_yet` is called with the reason.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = min(_REQUEST_S, max(1.0, deadline - time.monotonic()))
        # In a thread of its own, so that the user can end the run while it waits for the server.
        answer: Future[Probe] = Future()
        where = parse_address(address, config.kind)
        threading.Thread(target=_probe, args=(answer, config, where, left_s), daemon=True).start()
        while not answer.done():
            check()
            time.sleep(_POLL_S / 2)
        try:
            return answer.result()
        except NotReadyError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise
            not_yet(str(error))
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until:
            check()
            time.sleep(_POLL_S)


def _probe(answer: Future[Probe], config: ExternalConfig, address: Address, timeout_s: float) -> None:
    """`answer` has what the server answered, or a NotReadyError or UnusableError."""
    probe = _probe_openai if config.kind == "openai" else _probe_oip
    try:
        answer.set_result(probe(config, address, timeout_s))
    except (NotReadyError, UnusableError) as error:
        answer.set_exception(error)
    except ssl.SSLError as error:
        answer.set_exception(UnusableError(explain(error, server_name(config.security, address.host))))
    except Exception as error:  # whatever it is, the run must not wait for ever
        kind = NotReadyError if isinstance(error, (OSError, http.client.HTTPException)) else UnusableError
        answer.set_exception(kind(shortened(f"{type(error).__name__}: {error}")))


def _prompt(config: ExternalConfig) -> str | Sequence[int]:
    if config.options.prompt == "token_ids":
        return [3 + index % (config.vocab_size - 3) for index in range(TOKENS)]
    return _PROMPT


def _failure(status: str, text: str, remedy: str | None) -> NotReadyError | UnusableError:
    if status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"):
        return NotReadyError(text)
    return UnusableError(f"{text}: {remedy}" if remedy else text)


# --- OpenAI -----------------------------------------------------------------------------------------------------------


_HTTP_REMEDIES = {
    200: "give the address of an API that streams as OpenAI's does, and see what a proxy in between changes",
    401: "give its token by token_env",
    403: "give a token that may use the model",
    404: "give the address with its path, such as http://host:8000/v1, and the model_name that the server knows",
    422: "it does not take a field of the request: see openai.usage, length_fields, extra and prompt",
    400: "see model_name and openai.prompt, usage, length_fields and extra",
}


def _probe_openai(config: ExternalConfig, address: Address, timeout_s: float) -> Probe:
    options = config.options
    assert isinstance(options, OpenAiOptions)
    secrets = secrets_of(config)
    context = _check_health(config, address, secrets)
    body = openai_wire.request_body(
        options, model=config.model_name, prompt=_prompt(config), max_tokens=TOKENS, whole_length=True, seed=0
    )
    connection = connect(config, address, timeout_s)
    try:
        began = time.monotonic()
        answer = post(connection, config, address, body)
        kind = answer.getheader("content-type") or ""
        if answer.status != 200 or not openai_wire.is_event_stream(kind):
            status, error = openai_wire.error_of_body(
                answer.status, answer.read(openai_wire.LARGEST_ERROR), answer.getheader("location") or "", kind
            )
            raise _failure(status, without_secrets(error, secrets), _HTTP_REMEDIES.get(answer.status))
        if encoded := openai_wire.encoding_problem(answer.getheader("content-encoding") or ""):
            raise UnusableError(encoded)
        return replace(_read_openai(answer, began, secrets), context=context)
    finally:
        connection.close()


def _check_health(config: ExternalConfig, address: Address, secrets: Sequence[str]) -> int | None:
    """The server is up, as far as /health and the list of models tell; servers have both, one or none.

    The longest context that the list tells.
    """
    for path in ("/health", f"{address.path}/models"):
        connection = connect(config, address, 10.0)
        try:
            connection.request("GET", openai_wire.with_query(address, path), headers=headers_of(config))
            answer = connection.getresponse()
            body = answer.read(openai_wire.LARGEST_EVENT)
        finally:
            connection.close()
        if answer.status in (502, 503):
            raise NotReadyError(without_secrets(openai_wire.error_of_body(answer.status, body)[1], secrets))
    return openai_wire.context_of(body, config.model_name) if answer.status == 200 else None


def _read_openai(answer: http.client.HTTPResponse, began: float, secrets: Sequence[str]) -> Probe:
    chunks, tokens, prompt_tokens, ended = 0, None, None, False
    for data in events(answer):
        if data.strip() == openai_wire.DONE:
            ended = True
            break
        chunk = openai_wire.read_event(data)
        if chunk.failed is not None:
            raise UnusableError(f"{chunk.failed[0]}: {without_secrets(chunk.failed[1], secrets)}")
        chunks += chunk.text
        ended = ended or chunk.ended
        tokens = chunk.completion_tokens if chunk.completion_tokens is not None else tokens
        prompt_tokens = chunk.prompt_tokens if chunk.prompt_tokens is not None else prompt_tokens
    if not ended:
        raise UnusableError("its stream ended without a finish_reason and without [DONE]")
    seconds = time.monotonic() - began
    return Probe(asked=TOKENS, chunks=chunks, tokens=tokens, prompt_tokens=prompt_tokens, streams=True, seconds=seconds)


# --- Open Inference Protocol ------------------------------------------------------------------------------------------


_GRPC_REMEDIES = {
    "UNAUTHENTICATED": "give its token by token_env",
    "NOT_FOUND": "give the model_name that the server knows",
    "UNIMPLEMENTED": "is it an Open Inference Protocol server, and is oip.stream right?",
    # MLServer 1.7.1 does not name a model that it does not have, nor a tensor that its model misses.
    "UNKNOWN": "see model_name, and what the server's own log says",
    "INTERNAL": "see the tensors of [arms.oip], and what the server's own log says",
    "INVALID_ARGUMENT": "see the tensors of [arms.oip]",
}


def _probe_oip(config: ExternalConfig, address: Address, timeout_s: float) -> Probe:
    options = config.options
    assert isinstance(options, OipOptions)
    token = bearer_token(config.security)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with open_channel(address, config.security, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            _check_model(channel, config, options, metadata)
            return _infer(channel, config, options, metadata, timeout_s)
        except grpc.RpcError as error:
            status = error.code().name
            text = shortened(without_secrets(f"{status}: {error.details()}", (token,) if token else ()))
            raise _failure(status, text, _GRPC_REMEDIES.get(status)) from None


def _check_model(channel: grpc.Channel, config: ExternalConfig, options: OipOptions, metadata: Any) -> None:
    stub: Any = oip_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    if not stub.ServerReady(oip_pb2.ServerReadyRequest(), timeout=10.0, metadata=metadata).ready:
        raise NotReadyError("the server says that it is not ready")
    ready = stub.ModelReady(oip_pb2.ModelReadyRequest(name=config.model_name), timeout=10.0, metadata=metadata)
    if not ready.ready:
        raise NotReadyError(f'the server says that model "{config.model_name}" is not ready')
    request = oip_pb2.ModelMetadataRequest(name=config.model_name)
    try:
        model = stub.ModelMetadata(request, timeout=10.0, metadata=metadata)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return
        raise
    for key in (item.name for item in fields(options) if item.name.endswith("_tensor")):
        what, tensors = ("output", model.outputs) if key == "output_tensor" else ("input", model.inputs)
        name, names = getattr(options, key), [tensor.name for tensor in tensors]
        if name and names and name not in names:
            raise UnusableError(f'the model has no {what} "{name}" but {", ".join(names)}: set oip.{key}')


def _infer(
    channel: grpc.Channel, config: ExternalConfig, options: OipOptions, metadata: Any, timeout_s: float
) -> Probe:
    body = oip_wire.infer_request(
        options,
        model=config.model_name,
        prompt=_prompt(config),
        max_tokens=TOKENS,
        whole_length=True,
        seed=0,
        request_id="probe",
    )
    path = oip_wire.method_path(options)
    began = time.monotonic()
    messages: Iterator[bytes]
    if options.stream == "off":
        messages = iter([channel.unary_unary(path)(body, timeout=timeout_s, metadata=metadata)])
    else:
        messages = iter(channel.stream_stream(path)(iter([body]), timeout=timeout_s, metadata=metadata))
    chunks, tokens, counted = 0, 0, True
    for message in messages:
        piece = oip_wire.read_response(options, message)
        if piece.error == config.model_name and options.stream == "triton":
            # A bare inference response read as Triton's: its first field is the model's name.
            raise UnusableError(
                'its stream holds bare inference responses, as MLServer\'s does: set oip.stream = "plain"'
            )
        if piece.error:
            raise UnusableError(piece.error)
        chunks += piece.tokens > 0
        tokens += piece.tokens
        counted = counted and (piece.counted or not piece.tokens)
    if not chunks:
        raise UnusableError(
            f'it was asked for {TOKENS} tokens and nothing came in tensor "{options.output_tensor}": '
            "is oip.stream right?"
        )
    return Probe(
        asked=TOKENS,
        chunks=chunks,
        tokens=tokens if counted and tokens else None,
        prompt_tokens=None,
        streams=options.stream != "off",
        seconds=time.monotonic() - began,
    )
