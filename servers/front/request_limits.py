"""How much one request may hold. A server that reads what nobody bounded stands still for everybody else.

What depends on the arm follows from `max_prompt_tokens`; the rest is fixed. docs/arms.md states all of it.
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

# Longer texts are tokenized beside the event loop.
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


def text_bytes(engine: EngineConfig) -> int:
    """The longest prompt text, in bytes of UTF-8."""
    return engine.max_prompt_tokens * BYTES_A_TOKEN


def message_bytes(engine: EngineConfig) -> int:
    """The largest message that the server reads; gRPC itself answers a larger one with RESOURCE_EXHAUSTED."""
    return max(_LEAST_MESSAGE_BYTES, engine.max_prompt_tokens * max(BYTES_A_TOKEN, _ID_BYTES) + _OTHER_FIELDS_BYTES)


def check_sizes(request: inference_pb2.GenerateRequest, engine: EngineConfig) -> None:
    """Nothing in `request` is longer than it may be. Otherwise RefusedError. Takes no time that grows with the prompt
    but for counting the bytes of its text."""
    for name, value in (("request_id", request.request_id), ("session_id", request.session_id)):
        if len(value) > ID_CHARACTERS:
            raise invalid(f"{name} has {len(value)} characters; the limit is {ID_CHARACTERS}: give a shorter one")
    if len(request.stop) > STOP_STRINGS:
        raise invalid(f"stop has {len(request.stop)} strings; the limit is {STOP_STRINGS}: give fewer")
    longest = max(map(len, request.stop), default=0)
    if longest > STOP_CHARACTERS:
        raise invalid(f"a stop string has {longest} characters; the limit is {STOP_CHARACTERS}: give a shorter one")
    if len(request.stop_token_ids) > STOP_TOKEN_IDS:
        raise invalid(
            f"stop_token_ids has {len(request.stop_token_ids)} ids; the limit is {STOP_TOKEN_IDS}: give fewer"
        )
    if len(request.token_ids.ids) > engine.max_prompt_tokens:
        raise too_many_tokens(len(request.token_ids.ids), engine)
    size, limit = len(request.text.encode()), text_bytes(engine)
    if size > limit:
        raise invalid(
            f"prompt text has {size} bytes; the limit is {limit}, {BYTES_A_TOKEN} for each of max_prompt_tokens = "
            f"{engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
        )


def too_many_tokens(count: int, engine: EngineConfig) -> RefusedError:
    """The refusal of a prompt of `count` tokens."""
    return invalid(
        f"prompt has {count} tokens; the limit is {engine.max_prompt_tokens}: shorten it or raise max_prompt_tokens"
    )
