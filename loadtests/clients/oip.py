"""The Open Inference Protocol over the load generator's own HTTP/2 client: the same connections and times."""

from __future__ import annotations

from functools import partial
from typing import Any

from loadtests.clients.grpc_call import GrpcCall
from loadtests.clients.inference import InferenceClient
from loadtests.external.arms import ExternalArm, OipOptions
from loadtests.external.oip_wire import METHOD, read_response


class OipCall(GrpcCall):
    """One inference. Each token of a tensor of ids, or each piece of text, has the time at which it came."""

    __slots__ = ("_options",)

    def __init__(self, *, options: OipOptions, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = options

    def on_message(self, message: bytes, at_ns: int) -> None:
        piece = read_response(self._options, message)
        if piece.error:
            self.fail(piece.error[:500], at_ns)
        elif piece.tokens:
            self.add_tokens(piece.tokens, at_ns)


def oip_client(config: ExternalArm, address: str) -> InferenceClient:
    """A client for one replica of an external arm. Its requests are serialised ModelInferRequests."""
    options = config.options
    assert isinstance(options, OipOptions)
    return InferenceClient(
        address,
        path=METHOD,
        security=config,
        call=partial(OipCall, options=options),
    )
