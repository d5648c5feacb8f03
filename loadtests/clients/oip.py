"""The Open Inference Protocol over the load generator's own HTTP/2 client: same connections, same honest times."""

from __future__ import annotations

from functools import partial
from typing import Any

from loadtests.clients.connection import Call, InferenceClient
from loadtests.external.addresses import ExternalConfig, OipOptions, parse_address
from loadtests.external.oip_wire import method_path, read_response


class OipCall(Call):
    """One inference. Each token of a tensor of ids, or each piece of text, has the time at which it came.

    A ModelInfer that does not stream has its first token with its last.
    """

    __slots__ = ("_options",)

    def __init__(self, *, options: OipOptions, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = options

    def _on_message(self, message: bytes, at_ns: int) -> None:
        piece = read_response(self._options, message)
        if piece.error:
            self._broken(piece.error[:500], at_ns)
            return
        if piece.tokens:
            if self.first_token_ns is None:
                self.first_token_ns = at_ns
            self.token_ns.extend([at_ns] * piece.tokens)


def oip_client(config: ExternalConfig, address: str) -> InferenceClient:
    """A client for one replica of an external arm. Its requests are serialised ModelInferRequests."""
    options = config.options
    assert isinstance(options, OipOptions)
    found = parse_address(address, "oip")
    return InferenceClient(
        f"grpcs://{found.target}" if found.tls else found.target,
        path=method_path(options),
        security=config.security,
        call=partial(OipCall, options=options),
    )
