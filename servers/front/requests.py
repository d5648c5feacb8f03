"""Requests as the engine takes them, and the refusal of any other: docs/explanation/arms.md lists the limits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import grpc

from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ArmConfig, EngineConfig
from tailgate.servers.engine.messages import Submit
from tailgate.servers.presets import BOS_ID, BYTE_OFFSET
from tailgate.servers.rpc import inference_pb2

ID_CHARACTERS = 256

# No tokenizer in use averages as much: English has some 4 bytes a token, the longest tokens (runs of spaces) 128. A
# token id takes 5 bytes on the wire at most.
BYTES_A_TOKEN = 64
# The smallest limit of a message is large, so that a long prompt is refused by a status that names its length.
_LEAST_MESSAGE_BYTES = 4 << 20
_OTHER_FIELDS_BYTES = 1 << 20
METADATA_BYTES = 16 << 10

# Longer texts are tokenized outside the event loop.
TEXT_AT_ONCE_CHARACTERS = 4 << 10

Request = inference_pb2.GenerateRequest | inference_pb2.EmbedRequest
# The token ids of a text, with the begin-of-sequence token if the model has one.
Encode = Callable[[str], list[int]]


class RefusedError(Exception):
    """A request is answered with a status instead of tokens. The message names value, limit and remedy."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def message_bytes(engine: EngineConfig) -> int:
    """Return the size of the largest message that the server reads; gRPC refuses others with RESOURCE_EXHAUSTED."""
    return max(_LEAST_MESSAGE_BYTES, engine.max_prompt_tokens * BYTES_A_TOKEN + _OTHER_FIELDS_BYTES)


def encode_bytes(text: str) -> list[int]:
    """Return one token a byte, after padding, begin and end: ids 3 … 258."""
    return [BOS_ID, *(byte + BYTE_OFFSET for byte in text.encode("utf-8"))]


def load_tokenizer(model_id: str) -> Encode:
    """Load the byte tokenizer for `random:` presets, otherwise the model's own. Raises ConfigError."""
    if model_id.startswith("random:"):
        return encode_bytes
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f'no tokenizer can be loaded for model.id "{model_id}": {first}') from None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    return encode


async def check_request(
    request: Request, arm: ArmConfig, encode: Encode, vocab: int, *, recv_ns: int, deadline_ns: int = 0
) -> Submit:
    """Return the engine's form of `request`. Raises RefusedError."""
    if isinstance(request, inference_pb2.GenerateRequest) == arm.model.embeds:
        does, call = ("embeds", "Embed") if arm.model.embeds else ("generates", "Generate")
        raise RefusedError(
            grpc.StatusCode.UNIMPLEMENTED, f"{arm.name} serves {arm.model.id}, which {does}: call {call} instead"
        )
    _check_sizes(request, arm.engine)
    submit = Submit(
        request_id="",  # the front gives it one
        name=request.request_id or uuid.uuid4().hex,
        prompt=await _tokens_of(request, arm.engine, encode, vocab),
        max_tokens=0,
        recv_ns=recv_ns,
        deadline_ns=deadline_ns,
    )
    if isinstance(request, inference_pb2.GenerateRequest):
        if not 1 <= request.max_tokens <= arm.engine.max_new_tokens:
            raise _invalid(
                f"max_tokens is {request.max_tokens}; the limit is 1 to {arm.engine.max_new_tokens}: "
                "ask for fewer or raise max_new_tokens"
            )
        submit.max_tokens, submit.ignore_eos = request.max_tokens, request.ignore_eos
    return submit


async def _tokens_of(request: Request, engine: EngineConfig, encode: Encode, vocab: int) -> list[int]:
    name, has_ids = _name(request), request.HasField("token_ids")
    if not has_ids and not request.HasField("text"):
        raise _invalid(f"the {name} is missing: give text or token_ids")
    if has_ids:
        ids = list(request.token_ids.ids)
    elif len(request.text) <= TEXT_AT_ONCE_CHARACTERS:
        ids = encode(request.text)
    else:  # other calls go on meanwhile
        ids = await asyncio.to_thread(encode, request.text)
    if not ids or not (has_ids or request.text):
        raise _invalid(f"the {name} is empty: give at least one token")
    _check_tokens(len(ids), name, engine)
    for bad in (min(ids), max(ids)):
        if not 0 <= bad < vocab:
            raise _invalid(f"token id {bad} is not in the vocabulary: ids go from 0 to {vocab - 1}")
    return ids


def _check_sizes(request: Request, engine: EngineConfig) -> None:
    """Raise RefusedError for a field that is too long, in a time that does not grow with the number of token ids."""
    for name, size in (("request_id", len(request.request_id)), ("session_id", len(request.session_id))):
        if size > ID_CHARACTERS:
            raise _invalid(f"{name} has {size} characters; the limit is {ID_CHARACTERS}: give a shorter one")
    _check_tokens(len(request.token_ids.ids), _name(request), engine)
    size, limit = len(request.text.encode()), engine.max_prompt_tokens * BYTES_A_TOKEN
    if size > limit:
        raise _invalid(
            f"text has {size} bytes; the limit is {limit}, {BYTES_A_TOKEN} for each of max_prompt_tokens = "
            f"{engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
        )


def _check_tokens(count: int, name: str, engine: EngineConfig) -> None:
    if count > engine.max_prompt_tokens:
        raise _invalid(
            f"{name} has {count} tokens; the limit is {engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
        )


def _name(request: Request) -> str:
    return "prompt" if isinstance(request, inference_pb2.GenerateRequest) else "text"


def _invalid(message: str) -> RefusedError:
    return RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)
