"""Planned requests as external arms take them, by OpenAI-compatible HTTP or the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from loadtests.clients.oip import oip_client
from loadtests.clients.openai import OpenAiClient
from loadtests.clients.route import Client, Endpoint, Route
from loadtests.external.arms import ExternalArm, OpenAiOptions
from loadtests.external.oip_wire import infer_request
from loadtests.external.openai_wire import request_body
from loadtests.external.planned_prompts import prompt_of, prompt_source
from loadtests.traffic.prompts import PromptSource
from loadtests.traffic.schedule import PlannedRequest


def external_route(arm: str, config: ExternalArm, *, traffic: PromptSource, ignore_eos: bool) -> Route:
    """Return the way to an external arm, with an endpoint for each of its addresses.

    `traffic` makes the prompts of tailgate's own arms. Raises ConfigError for what cannot work.
    """
    source, options = prompt_source(config, traffic), config.options

    def encode(plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        asked: dict[str, Any] = {
            "model": config.model_name,
            "prompt": prompt_of(config, source, plan),
            "max_tokens": plan.max_tokens,
            "whole_length": ignore_eos,
            "seed": plan.prompt_seed,
        }
        if isinstance(options, OpenAiOptions):
            return request_body(options, **asked), f"X-Request-Id: {quote(request_id)}\r\n".encode("ascii")
        return infer_request(options, request_id=request_id, **asked), b""

    client: Callable[[ExternalArm, str], Client] = OpenAiClient if config.kind == "openai" else oip_client
    replicas = ["" if arm == "*" else f"{arm}-{number}" for number in range(len(config.address))]
    addresses = zip(config.address, replicas, strict=True)
    return Route(encode, [Endpoint(client(config, address), replica) for address, replica in addresses])
