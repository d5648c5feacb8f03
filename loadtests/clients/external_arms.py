"""Planned requests as external arms take them, by OpenAI-compatible HTTP or the Open Inference Protocol."""

from __future__ import annotations

from functools import partial
from typing import Any

from tailgate.loadtests.clients.grpc_call import GrpcCall
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.clients.openai import OpenAiClient
from tailgate.loadtests.clients.route import Client, Endpoint, Route
from tailgate.loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions
from tailgate.loadtests.external.asking import Asking, prompt_text
from tailgate.loadtests.external.oip_wire import METHOD, infer_request, read_response
from tailgate.loadtests.external.openai_wire import request_body
from tailgate.loadtests.traffic.prompts import PromptText
from tailgate.loadtests.traffic.schedule import PlannedRequest


def external_route(arm: str, config: ExternalArm, *, traffic: PromptText | None, ignore_eos: bool) -> Route:
    """Return the way to an external arm, with an endpoint for each of its addresses.

    `traffic` makes the prompts of managed arms, if they are text. Raises ConfigError for what cannot work.
    """
    text, options, model = prompt_text(config, traffic), config.options, config.model_name

    def encode(plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        asking = Asking(
            prompt=text.prompt(plan),
            max_tokens=plan.max_tokens,
            whole_length=ignore_eos,
            seed=plan.prompt_seed,
        )
        if isinstance(options, OpenAiOptions):
            return request_body(options, model, asking), f"X-Request-Id: {request_id}\r\n".encode("ascii")
        return infer_request(options, model, asking, request_id), b""

    replicas = ["" if arm == "*" else f"{arm}-{number}" for number in range(len(config.address))]
    addresses = zip(config.address, replicas, strict=True)
    return Route(encode, [Endpoint(external_client(config, address), replica) for address, replica in addresses])


class OipCall(GrpcCall):
    """One inference. Each piece of text has the time at which it came."""

    def __init__(self, *, options: OipOptions, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = options

    def on_message(self, message: bytes, at_ns: int) -> None:
        piece = read_response(self._options, message)
        if piece.error:
            self.cancel("INTERNAL", piece.error)
        elif piece.text:
            self.add_tokens(1, at_ns)


def external_client(config: ExternalArm, address: str) -> Client:
    """Return a client for one replica of an external arm. Its requests are JSON or serialised ModelInferRequests."""
    if isinstance(config.options, OpenAiOptions):
        return OpenAiClient(config, address)
    return InferenceClient(address, path=METHOD, security=config, call=partial(OipCall, options=config.options))
