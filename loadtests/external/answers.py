"""Ask an external server for one short answer, blocking and without gevent, outside the load processes.

`wait_ready` says whether an arm can be judged: it answers, knows the model, and counts its tokens or not. Before a
trial every replica answers one short request, sent as the load will send them. So a wrong model name, tensor, token or
address ends the run with one line before any traffic, and the trial's facts say how tokens can be counted.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from tailgate.loadtests.external import oip_wire, openai_wire
from tailgate.loadtests.external.addresses import parse_address
from tailgate.loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions
from tailgate.loadtests.external.asking import Asking
from tailgate.loadtests.external.client_security import bearer_token, client_context, explain, without_token
from tailgate.loadtests.external.grpc_channel import open_channel
from tailgate.servers.complaint import ConfigError, one_line
from tailgate.servers.rpc import oip_pb2, oip_pb2_grpc

_POLL_S = 0.05

T = TypeVar("T")


class FailedError(Exception):
    """The server gave no answer that can be used, with the gRPC `status` where it gave one. `not_yet` says that it may
    give one later."""

    def __init__(self, message: str, *, status: str = "", not_yet: bool = False) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status
        self.not_yet = not_yet or status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


@dataclass(slots=True, kw_only=True)
class Answer:
    """The text, in how many `pieces` it came, and the server's own count of tokens (None where it gives none)."""

    text: str
    pieces: int
    tokens: int | None = None


def in_threads(tasks: Sequence[Callable[[], T]], *, at_once: int, wait: Callable[[int], None]) -> list[T]:
    """Return what each task returns, `at_once` of them under way at a time. Raises what a task raises.

    `wait` is called often with how many are done, and may raise to end it: no other task begins then. A task that hangs
    does not keep the process, as those of an executor would.
    """
    futures: list[Future[T]] = [Future() for _ in tasks]
    pending = set(futures)
    left = iter([*zip(futures, tasks, strict=True)])  # shared by the threads

    def work() -> None:
        for future, task in left:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except Exception as error:
                    future.set_exception(error)

    for _ in range(at_once):
        threading.Thread(target=work, daemon=True).start()
    try:
        while pending:
            wait(len(futures) - len(pending))
            pending = wait_for(futures, _POLL_S).not_done
    finally:
        for future in futures:
            future.cancel()
    return [future.result() for future in futures]


def ask(config: ExternalArm, address: str, asking: Asking, *, timeout_s: float) -> Answer:
    """Return the answer of the replica at `address`, within `timeout_s`. Raises FailedError."""
    exchange = _openai if config.kind == "openai" else _oip
    with _failures(config, address, timeout_s) as token:
        answer = exchange(config, address, asking, timeout_s)
        answer.text = without_token(answer.text, token)
        return answer


@contextmanager
def _failures(config: ExternalArm, address: str, timeout_s: float) -> Iterator[str]:
    """Give the arm's token, and raise whatever goes wrong inside as a FailedError of one line without it."""
    token = ""
    try:
        token = bearer_token(config)
        yield token
    except FailedError as error:
        error.args = (one_line(without_token(str(error), token)),)
        raise
    except ConfigError as error:
        raise FailedError(str(error)) from None
    except grpc.RpcError as error:
        raise FailedError(one_line(without_token(str(error.details()), token)), status=error.code().name) from None
    except ssl.SSLError as error:
        host = parse_address(address, config.kind).host
        raise FailedError(explain(error, config.tls_server_name or host)) from None
    except TimeoutError:
        raise FailedError(f"no answer within {timeout_s:g} s", not_yet=True) from None
    except Exception as error:  # whatever a server does costs its own answer alone
        text = f"{type(error).__name__}: {error}"
        transport = isinstance(error, OSError | http.client.HTTPException)
        raise FailedError(one_line(without_token(text, token)), not_yet=transport) from None


def _openai(config: ExternalArm, address: str, asking: Asking, timeout_s: float) -> Answer:
    options, deadline = config.options, time.monotonic() + timeout_s
    assert isinstance(options, OpenAiOptions)
    where = parse_address(address, config.kind)
    body = openai_wire.request_body(options, config.model_name, asking)
    with _requested(config, address, "POST", openai_wire.request_path(options, where), timeout_s, body) as reply:
        if (failed := openai_wire.error_of_answer(reply)) is not None:
            raise FailedError(failed[1], status=failed[0])
        return _streamed(reply, deadline)


@contextmanager
def _requested(
    config: ExternalArm, address: str, method: str, path: str, timeout_s: float, body: bytes | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Give the reply to one HTTP request, on a connection of its own; `timeout_s` is for each wait."""
    where, token = parse_address(address, config.kind), bearer_token(config)
    connection = http.client.HTTPConnection(where.host, where.port, timeout=timeout_s)
    headers = {"User-Agent": "tailgate", "Accept-Encoding": "identity", "Host": where.host_header}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Content-Type": "application/json", "Accept": "text/event-stream"} if body is not None else {}
    try:
        if where.tls:
            connection.connect()
            context = client_context(config, protocols=("http/1.1",))
            connection.sock = context.wrap_socket(connection.sock, server_hostname=config.tls_server_name or where.host)
        connection.request(method, path, body, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def _streamed(reply: http.client.HTTPResponse, deadline: float) -> Answer:
    parts: list[str] = []
    tokens, ended, done, stream = None, False, False, openai_wire.EventStream()
    while not done and (piece := reply.read1(65_536)):
        if time.monotonic() > deadline:  # here, as some servers send comments until they have an event
            raise TimeoutError
        for data in stream.feed(piece):
            if done := data.strip() == openai_wire.DONE:
                break
            chunk = openai_wire.read_event(data)
            if chunk.failed is not None:
                raise FailedError(chunk.failed[1], status=chunk.failed[0])
            parts += [chunk.text] if chunk.text else []
            ended = ended or chunk.ended
            tokens = chunk.completion_tokens if chunk.completion_tokens is not None else tokens
    if not (ended or done):
        raise FailedError("its stream ended without a finish_reason and without [DONE]")
    return Answer(text="".join(parts), pieces=len(parts), tokens=tokens)


def _oip(config: ExternalArm, address: str, asking: Asking, timeout_s: float) -> Answer:
    options = config.options
    assert isinstance(options, OipOptions)
    body = oip_wire.infer_request(options, config.model_name, asking, f"asked-{asking.seed}")
    parts: list[str] = []
    with open_channel(address, config) as channel:
        for message in channel.stream_stream(oip_wire.METHOD)(iter([body]), timeout=timeout_s):
            piece = oip_wire.read_response(options, message)
            if piece.error:
                raise FailedError(piece.error, status="INTERNAL")
            parts += [piece.text] if piece.text else []
    return Answer(text="".join(parts), pieces=len(parts))


# --- Readiness --------------------------------------------------------------------------------------------------------

TOKENS = 8  # of the short answer
_PROMPT = "Tell me a short story about the sea."
_RETRY_S = 0.5
_MODELS_S = 10.0
_REQUEST_S = 120.0  # a server may load its model with its first request


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one short answer to a request for `TOKENS` showed. `tokens` is the server's own count, None when it gave
    none; `context` the most tokens of a prompt and its answer, where the server tells it."""

    tokens: int | None
    context: int | None = None


def wait_ready(
    config: ExternalArm, address: str, *, timeout_s: float, check: Callable[[], None], not_yet: Callable[[str], None]
) -> Probe:
    """Wait until the replica at `address` answers, and return its answer. `check` is called often and may raise.

    Raises FailedError, with a remedy at once when waiting will not help, and after `timeout_s` otherwise. Before each
    further try `not_yet` is called with the reason.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = min(_REQUEST_S, max(1.0, deadline - time.monotonic()))
        probing = partial(_probe, config, address, left_s)
        try:
            # In a thread of its own, so that the user can end the run while it waits for the server.
            return in_threads([probing], at_once=1, wait=lambda _: check())[0]
        except FailedError as error:
            if not error.not_yet or time.monotonic() + _RETRY_S > deadline:
                raise
            not_yet(str(error))
        retry = time.monotonic() + _RETRY_S
        while time.monotonic() < retry:
            check()
            time.sleep(_POLL_S)


def _probe(config: ExternalArm, address: str, timeout_s: float) -> Probe:
    """Return what the server answered. Raises FailedError, with a remedy where one is known."""
    asking = Asking(prompt=_PROMPT, max_tokens=TOKENS, whole_length=True, seed=0)
    context = None
    try:
        if config.kind == "oip":
            _check_oip_model(config, address)
        found = ask(config, address, asking, timeout_s=timeout_s)
        if config.kind == "openai":
            models = _models(config, address)
            # A server of one model may know it by other names than it lists.
            context = models.get(config.model_name, *(models.values() if len(models) == 1 else ()))
    except FailedError as error:
        if remedy := _REMEDIES[config.kind].get(error.status):
            if config.kind == "openai" and error.status == "NOT_FOUND":
                with suppress(FailedError):
                    remedy += f", which lists {', '.join(_models(config, address)) or 'none'}"
            error.args = (f"{error}: {remedy.replace('model_name', f'arms.{config.name}.model_name')}",)
        raise
    if not found.pieces and isinstance(config.options, OipOptions):
        raise FailedError(
            f'it was asked for {TOKENS} tokens and nothing came in tensor "{config.options.output_tensor}": '
            "does the model stream?"
        )
    return Probe(tokens=found.tokens, context=context)


def _models(config: ExternalArm, address: str) -> dict[str, int | None]:
    """Return the server's list of models, with the most tokens of a prompt and its answer."""
    path = f"{parse_address(address, 'openai').path}/models"
    try:
        with _failures(config, address, _MODELS_S), _requested(config, address, "GET", path, _MODELS_S) as reply:
            return openai_wire.models_of(reply.read(openai_wire.LARGEST_EVENT))
    except FailedError as error:
        raise FailedError(f"no answer to GET {path}: {error}", not_yet=error.not_yet) from None


# By kind of arm and status of the failure.
_REMEDIES: dict[str, dict[str, str]] = {
    "openai": {
        "UNAUTHENTICATED": "give its token by token_env",
        "PERMISSION_DENIED": "give a token that may use the model",
        "NOT_FOUND": "give the address with its path, such as http://host:8000/v1, and the model_name of the server",
        "INVALID_ARGUMENT": (
            "it does not take a field of the request: see model_name and openai.usage, length_fields and extra"
        ),
    },
    "oip": {
        "UNAUTHENTICATED": "give its token by token_env",
        "NOT_FOUND": "give the model_name that the server knows",
        "UNIMPLEMENTED": "is it a server of the Open Inference Protocol that streams as Triton does?",
        **dict.fromkeys(
            ("UNKNOWN", "INTERNAL", "INVALID_ARGUMENT"),
            "see model_name, the tensors of [arms.oip], and what the server's own log says",
        ),
    },
}


def _check_oip_model(config: ExternalArm, address: str) -> None:
    """Check that the model is ready, which Triton does not say in a stream."""
    with _failures(config, address, _MODELS_S), open_channel(address, config) as channel:
        stub: Any = oip_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        if not stub.ModelReady(oip_pb2.ModelReadyRequest(name=config.model_name), timeout=_MODELS_S).ready:
            raise FailedError(f'the server says that model "{config.model_name}" is not ready', not_yet=True)
