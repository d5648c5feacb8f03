"""Whether an external arm can be judged: it answers, knows the model, and counts its tokens or not.

Before a trial every replica answers one short request, sent as the load will send them. So a wrong model name, tensor,
token or address ends the run with one line before any traffic, and the trial's facts say how tokens can be counted.
Blocking and without gevent: it runs in the orchestrator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc

from loadtests.external import openai_wire
from loadtests.external.addresses import parse_address
from loadtests.external.answers import FailedError, exchange, failures, oip_channel, requested
from loadtests.external.arms import ExternalArm, OipOptions
from loadtests.external.asking import Asking
from servers.rpc import oip_pb2, oip_pb2_grpc

TOKENS = 8  # of the short answer
_PROMPT = "Tell me a short story about the sea."
_POLL_S = 0.1
_RETRY_S = 0.5
_REQUEST_S = 120.0  # a server may load its model with its first request


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one short answer showed. `tokens` is the server's own count, None when it gave none.

    `context` is the most tokens of a prompt and its answer, where the server tells it.
    """

    asked: int
    chunks: int
    tokens: int | None
    prompt_tokens: int | None
    seconds: float
    context: int | None = None


def wait_ready(
    config: ExternalArm, address: str, *, timeout_s: float, check: Callable[[], None], not_yet: Callable[[str], None]
) -> Probe:
    """What the replica at `address` answered, once it did. `check` is called often and may raise to end the wait.

    Raises FailedError, with a remedy at once when waiting will not help, and after `timeout_s` otherwise. Before each
    further try `not_yet` is called with the reason.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = min(_REQUEST_S, max(1.0, deadline - time.monotonic()))
        # In a thread of its own, so that the user can end the run while it waits for the server.
        answer: Future[Probe] = Future()
        threading.Thread(target=_probe, args=(answer, config, address, left_s), daemon=True).start()
        while not answer.done():
            check()
            time.sleep(_POLL_S / 2)
        try:
            return answer.result()
        except FailedError as error:
            if not error.not_yet or time.monotonic() + _RETRY_S > deadline:
                raise
            not_yet(str(error))
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until:
            check()
            time.sleep(_POLL_S)


def _probe(answer: Future[Probe], config: ExternalArm, address: str, timeout_s: float) -> None:
    """Set in `answer` what the server answered, or a FailedError."""
    try:
        with failures(config, address):
            answer.set_result(_probed(config, address, timeout_s))
    except FailedError as error:
        remedy = _HTTP_REMEDIES.get(error.http or 0) if config.kind == "openai" else _GRPC_REMEDIES.get(error.status)
        if remedy and not error.not_yet:
            error.args = (f"{error}: {remedy}",)
        answer.set_exception(error)


def _probed(config: ExternalArm, address: str, timeout_s: float) -> Probe:
    prompt: str | list[int] = _PROMPT
    if config.options.prompt == "token_ids":
        prompt = [3 + index % (config.vocab_size - 3) for index in range(TOKENS)]
    context = None
    if config.kind == "openai":
        context = _openai_context(config, address)
    else:
        _check_oip_model(config, address)
    began = time.monotonic()
    asking = Asking(prompt=prompt, max_tokens=TOKENS, whole_length=True, seed=0)
    found = exchange(config, address, asking, timeout_s=timeout_s)
    if not found.pieces and isinstance(config.options, OipOptions):
        raise FailedError(
            f'it was asked for {TOKENS} tokens and nothing came in tensor "{config.options.output_tensor}": '
            "does the model stream?"
        )
    return Probe(
        asked=TOKENS,
        chunks=found.pieces,
        tokens=found.tokens,
        prompt_tokens=found.prompt_tokens,
        seconds=time.monotonic() - began,
        context=context,
    )


_HTTP_REMEDIES = {
    200: "give the address of an API that streams as OpenAI's does, and see what a proxy in between changes",
    401: "give its token by token_env",
    403: "give a token that may use the model",
    404: "give the address with its path, such as http://host:8000/v1, and the model_name that the server knows",
    422: "it does not take a field of the request: see openai.usage, length_fields, extra and prompt",
    400: "see model_name and openai.prompt, usage, length_fields and extra",
}
_GRPC_REMEDIES = {
    "UNAUTHENTICATED": "give its token by token_env",
    "NOT_FOUND": "give the model_name that the server knows",
    "UNIMPLEMENTED": "is it a server of the Open Inference Protocol that streams as Triton does?",
    "UNKNOWN": "see model_name, and what the server's own log says",
    "INTERNAL": "see the tensors of [arms.oip], and what the server's own log says",
    "INVALID_ARGUMENT": "see the tensors of [arms.oip]",
}


def _openai_context(config: ExternalArm, address: str) -> int | None:
    """Return the longest context that the list of models tells. Raises FailedError where the server is not up, as far
    as /health and that list tell; servers have both, one or none."""
    for path in ("/health", f"{parse_address(address, config.kind).path}/models"):
        with requested(config, address, "GET", path, 10.0) as answer:
            body = answer.read(openai_wire.LARGEST_EVENT)
        if answer.status in (502, 503):
            status, message = openai_wire.error_of_body(answer.status, body)
            raise FailedError(message, status=status, http=answer.status)
    return openai_wire.context_of(body, config.model_name) if answer.status == 200 else None


def _check_oip_model(config: ExternalArm, address: str) -> None:
    """Check that server and model are ready, and that the model has the tensors of the options."""
    options, name = config.options, config.model_name
    with oip_channel(config, address) as (channel, metadata):
        stub: Any = oip_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = {"timeout": 10.0, "metadata": metadata}
        if not stub.ServerReady(oip_pb2.ServerReadyRequest(), **call).ready:
            raise FailedError("the server says that it is not ready", not_yet=True)
        if not stub.ModelReady(oip_pb2.ModelReadyRequest(name=name), **call).ready:
            raise FailedError(f'the server says that model "{name}" is not ready', not_yet=True)
        try:
            model = stub.ModelMetadata(oip_pb2.ModelMetadataRequest(name=name), **call)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return
            raise
    for key in (name for name in type(options).model_fields if name.endswith("_tensor")):
        what, tensors = ("output", model.outputs) if key == "output_tensor" else ("input", model.inputs)
        name, names = getattr(options, key), [tensor.name for tensor in tensors]
        if name and names and name not in names:
            raise FailedError(f'the model has no {what} "{name}" but {", ".join(names)}: set oip.{key}')
