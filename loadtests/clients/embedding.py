"""A call of the unary Embed: one text there, one vector back."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError

from loadtests.clients.grpc_call import GrpcCall
from servers.metadata import INFERENCE_SERVICE
from servers.rpc.inference_pb2 import EmbedResponse

EMBED_PATH: Final = f"/{INFERENCE_SERVICE}/Embed"


class EmbedCall(GrpcCall):
    """One Embed call. It has an end and no tokens: `first_token_ns` stays None and `token_ns` empty.

    An end with OK and no vector, or with a second one, is INTERNAL. `input_tokens` is what the server says that it
    read, 0 before the answer. The vector itself is not kept: the load does not look at it, and parity asks by itself.
    """

    __slots__ = ("input_tokens", "size")

    def __init__(self, **settings: Any) -> None:
        self.input_tokens = 0
        self.size = 0  # of the vector; 0: none came
        super().__init__(**settings)

    def on_message(self, message: bytes, at_ns: int) -> None:
        """A whole message came at `at_ns`: the answer."""
        if self.size:
            return self.fail("a second vector came, and one text has one", at_ns)
        try:
            answer = EmbedResponse.FromString(message)
        except DecodeError as problem:
            return self.fail(f"a message is not an EmbedResponse: {problem}", at_ns)
        self.size, self.input_tokens = len(answer.values), answer.tokens
        return None

    def finish(self, status: str, error: str, at_ns: int) -> None:
        """As for every call; OK without a vector is none."""
        if status == "OK" and not self.size:
            status, error = "INTERNAL", "the answer ended with OK and holds no vector"
        super().finish(status, error, at_ns)
