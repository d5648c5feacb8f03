"""Ask an external server for one short answer, blocking and without gevent: the orchestrator asks beside the load.

`exchange` raises what goes wrong, which the readiness check (`probes`) tells apart. `ask` makes it a line of the
answer, because one answer that is missing is no reason to end a run.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from loadtests.external import oip_wire, openai_wire
from loadtests.external.addresses import parse_address
from loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions
from loadtests.external.asking import Asking
from loadtests.external.client_security import bearer_token, client_context, explain, server_name, without_token
from loadtests.external.grpc_channel import open_channel
from loadtests.external.openai_wire import shortened
from servers.complaint import ConfigError

LARGEST: Final = 1_000_000  # characters of an answer, each of which goes into a record


class FailedError(Exception):
    """The server gave no answer that can be used. `not_yet` says that it may give one later.

    `status` is the gRPC status of the failure and `http` its HTTP status, where the server gave one.
    """

    def __init__(self, message: str, *, status: str = "", http: int | None = None, not_yet: bool = False) -> None:
        super().__init__(f"{status}: {message}" if status and http is None else message)
        self.status, self.http = status, http
        self.not_yet = not_yet or status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came: the text, in how many `pieces` it came, the server's own counts of tokens (None where it gives none),
    and in `error` why there is no answer."""

    text: str = ""
    pieces: int = 0
    tokens: int | None = None
    prompt_tokens: int | None = None
    error: str = ""


def ask(config: ExternalArm, address: str, asking: Asking, *, timeout_s: float) -> Answer:
    """Return the answer of the replica at `address`, within `timeout_s`, or why there is none."""
    try:
        with failures(config, address):
            answer = exchange(config, address, asking, timeout_s=timeout_s)
            answer.text = without_token(answer.text, bearer_token(config))
            return answer
    except FailedError as error:
        return Answer(error=str(error))


@contextmanager
def failures(config: ExternalArm, address: str) -> Iterator[None]:
    """Raise whatever goes wrong inside as a FailedError of one line, without the arm's token."""
    try:
        token = bearer_token(config)
    except ConfigError as error:
        raise FailedError(str(error)) from None
    try:
        yield
    except FailedError as error:
        error.args = (shortened(without_token(str(error), token)),)
        raise
    except ssl.SSLError as error:
        host = parse_address(address, config.kind).host
        raise FailedError(explain(error, server_name(config, host))) from None
    except Exception as error:  # whatever a server does costs its own answer alone
        text = str(error) if type(error) is TimeoutError else f"{type(error).__name__}: {error}"
        transport = isinstance(error, OSError | http.client.HTTPException)
        raise FailedError(shortened(without_token(text, token)), not_yet=transport) from None


def exchange(config: ExternalArm, address: str, asking: Asking, *, timeout_s: float) -> Answer:
    """Return the answer of the replica at `address`. Raises FailedError for what the server refuses or says wrongly,
    TimeoutError, and what the transport raises."""
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    try:
        return (_openai if config.kind == "openai" else _oip)(config, address, asking, left_s)
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None


def _openai(config: ExternalArm, address: str, asking: Asking, left_s: Callable[[], float]) -> Answer:
    options = config.options
    assert isinstance(options, OpenAiOptions)
    where = parse_address(address, config.kind)
    body = openai_wire.request_body(options, config.model_name, asking)
    with requested(config, address, "POST", openai_wire.request_path(options, where), left_s(), body) as reply:
        kind = reply.getheader("content-type") or ""
        if reply.status != 200 or not openai_wire.is_event_stream(kind):
            said, location = reply.read(openai_wire.LARGEST_ERROR), reply.getheader("location") or ""
            status, message = openai_wire.error_of_body(reply.status, said, location, kind)
            raise FailedError(message, status=status, http=reply.status)
        if encoded := openai_wire.encoding_problem(reply.getheader("content-encoding") or ""):
            raise FailedError(encoded)
        return _streamed(reply, left_s)


@contextmanager
def requested(
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
            connection.sock = context.wrap_socket(connection.sock, server_hostname=server_name(config, where.host))
        connection.request(method, path, body, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    stream = openai_wire.EventStream()
    while piece := answer.read1(65_536):
        yield from stream.feed(piece)
    if (tail := stream.close()) is not None:
        yield tail


def _streamed(reply: http.client.HTTPResponse, left_s: Callable[[], float]) -> Answer:
    answer, parts, ended, size = Answer(), [], False, 0
    for data in _events(reply):
        left_s()
        if data.strip() == openai_wire.DONE:
            ended = True
            break
        chunk = openai_wire.read_event(data)
        if chunk.failed is not None:
            status, message = chunk.failed
            raise FailedError(message, status=status)
        text = openai_wire.text_in(data)
        parts += [text] if text else []
        size = _bounded(size + len(data))
        ended = ended or chunk.ended
        answer.tokens = chunk.completion_tokens if chunk.completion_tokens is not None else answer.tokens
        answer.prompt_tokens = chunk.prompt_tokens if chunk.prompt_tokens is not None else answer.prompt_tokens
    if not ended:
        raise FailedError("its stream ended without a finish_reason and without [DONE]")
    answer.text, answer.pieces = "".join(parts), len(parts)
    return answer


def _oip(config: ExternalArm, address: str, asking: Asking, left_s: Callable[[], float]) -> Answer:
    options = config.options
    assert isinstance(options, OipOptions)
    body = oip_wire.infer_request(options, config.model_name, asking, f"asked-{asking.seed}")
    size, counted = 0, True
    values: list[str | int] = []
    with oip_channel(config, address) as (channel, metadata):
        stream = channel.stream_stream(oip_wire.METHOD)
        for message in stream(iter([body]), timeout=left_s(), metadata=metadata):
            piece = oip_wire.read_response(options, message)
            if piece.error:
                raise FailedError(piece.error)
            size = _bounded(size + len(message))
            values += [value for value in piece.values if value != ""]
            counted = counted and (piece.counted or not piece.tokens)
    # Token ids stand as words, so that answers of ids are compared as those of text are.
    text = "".join(value if isinstance(value, str) else f" {value}" for value in values)
    return Answer(text=text, pieces=len(values), tokens=len(values) if counted and values else None)


@contextmanager
def oip_channel(config: ExternalArm, address: str) -> Iterator[tuple[grpc.Channel, list[tuple[str, str]]]]:
    """Give a channel to the address and the metadata of every call. A call that fails raises FailedError."""
    token = bearer_token(config)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with open_channel(parse_address(address, config.kind), config) as channel:
        try:
            yield channel, metadata
        except grpc.RpcError as error:
            raise FailedError(str(error.details()), status=error.code().name) from None


def _bounded(size: int) -> int:
    if size > LARGEST:
        raise FailedError(f"its answer has more than {LARGEST} characters")
    return size
