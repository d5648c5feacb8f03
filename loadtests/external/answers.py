"""Ask an external server for one greedy answer.

Blocking and without gevent: the orchestrator asks beside the load. What goes wrong is a line of the answer and no
exception, because one answer that is missing is no reason to end a run.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from loadtests.external import oip_wire, openai_wire
from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions, parse_address, secrets_of
from loadtests.external.client_security import bearer_token, explain, server_name, without_secrets
from loadtests.external.grpc_channel import open_channel
from loadtests.external.openai_http import connect, events, post
from loadtests.external.openai_wire import shortened
from loadtests.traffic.prompts import Message
from servers.fields import ConfigError

LARGEST: Final = 1_000_000  # characters of an answer, each of which goes into a record


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came: the text, in how many `pieces` it came, and in `error` why there is none."""

    text: str = ""
    pieces: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """One prompt as the arm takes it, and how it is asked."""

    prompt: str | Sequence[int] | Sequence[Message]
    max_tokens: int
    whole_length: bool
    seed: int


def ask(config: ExternalConfig, address: str, asking: Asking, *, timeout_s: float) -> Answer:
    """Return the answer of the replica at `address`, within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    asked = _ask_openai if config.kind == "openai" else _ask_oip
    host = parse_address(address, config.kind).host
    try:
        secrets = secrets_of(config)
    except ConfigError as error:
        return Answer(error=str(error))
    try:
        answer = asked(config, address, asking, deadline)
    except ssl.SSLError as error:
        answer = Answer(error=explain(error, server_name(config.security, host)))
    except TimeoutError:
        answer = Answer(error=f"no answer within {timeout_s:g} s")
    except Exception as error:  # whatever a server does costs its own answer alone
        answer = Answer(error=f"{type(error).__name__}: {error}")
    answer.error = shortened(without_secrets(answer.error, secrets))
    answer.text = without_secrets(answer.text, secrets)
    return answer


def _ask_openai(config: ExternalConfig, address: str, asking: Asking, deadline: float) -> Answer:
    options = config.options
    assert isinstance(options, OpenAiOptions)
    where = parse_address(address, config.kind)
    body = openai_wire.request_body(
        options,
        model=config.model_name,
        prompt=asking.prompt,
        max_tokens=asking.max_tokens,
        whole_length=asking.whole_length,
        seed=asking.seed,
        greedy=True,
    )
    connection = connect(config, where, _left_s(deadline))
    try:
        reply = post(connection, config, where, body)
        kind = reply.getheader("content-type") or ""
        if reply.status == 200 and openai_wire.is_event_stream(kind):
            if encoded := openai_wire.encoding_problem(reply.getheader("content-encoding") or ""):
                return Answer(error=encoded)
            return _read(_until(events(reply), deadline))
        said = reply.read(openai_wire.LARGEST_ERROR)
        location = reply.getheader("location") or ""
        return Answer(error=openai_wire.error_of_body(reply.status, said, location, kind)[1])
    except http.client.HTTPException as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _read(stream: Iterator[bytes]) -> Answer:
    answer, parts, ended, size = Answer(), [], False, 0
    for data in stream:
        if data.strip() == openai_wire.DONE:
            ended = True
            break
        chunk = openai_wire.read_event(data)
        if chunk.failed is not None:
            return Answer(error=f"{chunk.failed[0]}: {chunk.failed[1]}")
        text = openai_wire.text_in(data)
        parts += [text] if text else []
        size += len(data)
        if size > LARGEST:
            return Answer(error=f"its answer has more than {LARGEST} characters")
        ended = ended or chunk.ended
    answer.text, answer.pieces = "".join(parts), len(parts)
    if not ended:
        answer.error = "its stream ended without a finish_reason and without [DONE]"
    return answer


def _ask_oip(config: ExternalConfig, address: str, asking: Asking, deadline: float) -> Answer:
    options = config.options
    assert isinstance(options, OipOptions)
    assert isinstance(asking.prompt, str) or not any(isinstance(item, Message) for item in asking.prompt)
    prompt: Any = asking.prompt
    body = oip_wire.infer_request(
        options,
        model=config.model_name,
        prompt=prompt,
        max_tokens=asking.max_tokens,
        whole_length=asking.whole_length,
        seed=asking.seed,
        request_id=f"parity-{asking.seed}",
        greedy=True,
    )
    token = bearer_token(config.security)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    path, left_s = oip_wire.method_path(options), _left_s(deadline)
    where = parse_address(address, config.kind)
    with open_channel(where, config.security, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            if options.stream == "off":
                messages: Iterator[bytes] = iter([channel.unary_unary(path)(body, timeout=left_s, metadata=metadata)])
            else:
                call = channel.stream_stream(path)(iter([body]), timeout=left_s, metadata=metadata)
                messages = iter(call)
            values: list[str | int] = []
            size = 0
            for message in messages:
                if problem := oip_wire.read_response(options, message).error:
                    return Answer(error=problem)
                size += len(message)
                if size > LARGEST:
                    return Answer(error=f"its answer has more than {LARGEST} characters")
                values += [value for value in oip_wire.said_in(options, message) if value != ""]
        except grpc.RpcError as error:
            return Answer(error=f"{error.code().name}: {error.details()}")
    # Token ids stand as words, so that answers of ids are compared as those of text are.
    text = "".join(value if isinstance(value, str) else f" {value}" for value in values)
    return Answer(text=text, pieces=len(values))


def _until(stream: Iterator[bytes], deadline: float) -> Iterator[bytes]:
    for data in stream:
        _left_s(deadline)
        yield data


def _left_s(deadline: float) -> float:
    """Seconds until the deadline; TimeoutError past it."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
