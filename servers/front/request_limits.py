"""How much one request may hold, so that reading one request never holds up the others.

Limits that depend on the arm follow from `max_prompt_tokens`; the rest are fixed. docs/arms.md lists all of them.
"""

from __future__ import annotations

import grpc

from servers.config import EngineConfig
from servers.rpc import inference_pb2

STOP_STRINGS = 16
STOP_CHARACTERS = 256
STOP_TOKEN_IDS = 1024
ID_CHARACTERS = 256

# No tokenizer in use averages as much: English has some 4 bytes a token, the longest tokens (runs of spaces) 128.
BYTES_A_TOKEN = 64
# A token id takes 1 to 5 bytes on the wire.
_ID_BYTES = 5
# The smallest limit of a message is large, so that a long prompt is refused by a status that names its length.
_LEAST_MESSAGE_BYTES = 4 << 20
_OTHER_FIELDS_BYTES = 1 << 20
METADATA_BYTES = 16 << 10

# Longer texts are tokenized outside the event loop.
TEXT_AT_ONCE_CHARACTERS = 4 << 10


class RefusedError(Exception):
    """A request is answered with a status instead of tokens. The message names value, limit and remedy."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> RefusedError:
    """INVALID_ARGUMENT for the reason in `message`."""
    return RefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


def message_bytes(engine: EngineConfig) -> int:
    """The largest message that the server reads; gRPC itself answers a larger one with RESOURCE_EXHAUSTED."""
    return max(_LEAST_MESSAGE_BYTES, engine.max_prompt_tokens * max(BYTES_A_TOKEN, _ID_BYTES) + _OTHER_FIELDS_BYTES)


def check_sizes(request: inference_pb2.GenerateRequest, engine: EngineConfig) -> None:
    """Nothing in `request` is longer than it may be. Otherwise RefusedError. Takes no time that grows with the prompt
    but for counting the bytes of its text."""
    check_text_sizes(request, engine)
    for name, size, unit, limit, remedy in (
        ("stop", len(request.stop), "strings", STOP_STRINGS, "fewer"),
        ("a stop string", max(map(len, request.stop), default=0), "characters", STOP_CHARACTERS, "a shorter one"),
        ("stop_token_ids", len(request.stop_token_ids), "ids", STOP_TOKEN_IDS, "fewer"),
    ):
        if size > limit:
            raise invalid(f"{name} has {size} {unit}; the limit is {limit}: give {remedy}")


def check_text_sizes(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, engine: EngineConfig) -> None:
    """As `check_sizes`, of the text or token ids and of the names that every request may have."""
    name = "text" if isinstance(request, inference_pb2.EmbedRequest) else "prompt"
    for key, size in (("request_id", len(request.request_id)), ("session_id", len(request.session_id))):
        if size > ID_CHARACTERS:
            raise invalid(f"{key} has {size} characters; the limit is {ID_CHARACTERS}: give a shorter one")
    if len(request.token_ids.ids) > engine.max_prompt_tokens:
        raise too_many_tokens(len(request.token_ids.ids), engine, name)
    size, limit = len(request.text.encode()), engine.max_prompt_tokens * BYTES_A_TOKEN
    if size > limit:
        raise invalid(
            f"{'prompt ' if name == 'prompt' else ''}text has {size} bytes; the limit is {limit}, {BYTES_A_TOKEN} for "
            f"each of max_prompt_tokens = {engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
        )


def too_many_tokens(count: int, engine: EngineConfig, name: str = "prompt") -> RefusedError:
    """The refusal of a prompt, or of a text, of `count` tokens."""
    return invalid(
        f"{name} has {count} tokens; the limit is {engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
    )
