"""Planned requests as external arms take them, by OpenAI-compatible HTTP or the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from urllib.parse import quote

from loadtests.clients.oip import oip_client
from loadtests.clients.openai import OpenAiClient
from loadtests.clients.route import Client, Lane, Route
from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.external.oip_wire import infer_request
from loadtests.external.openai_wire import request_body
from loadtests.external.planned_prompts import plain_prompt_of, prompt_of, prompt_source
from loadtests.traffic.prompts import PromptSource
from loadtests.traffic.schedule import PlannedRequest

_REQUEST_ID_HEADER = "X-Request-Id"


def external_route(arm: str, config: ExternalConfig, *, traffic: PromptSource, ignore_eos: bool) -> Route:
    """The way to an external arm, a lane for each of its addresses. `traffic` makes the prompts of tailgate's own arms.

    Raises ConfigError for what cannot work.
    """
    over_http = config.kind == "openai"
    encode = partial(_encode_openai if over_http else _encode_oip, config, prompt_source(config, traffic), ignore_eos)
    client: Callable[[ExternalConfig, str], Client] = OpenAiClient if over_http else oip_client
    return Route(
        encode,
        [
            Lane(client(config, address), "" if arm == "*" else f"{arm}-{number}")
            for number, address in enumerate(config.addresses)
        ],
    )


def _encode_openai(
    config: ExternalConfig, source: PromptSource, whole: bool, plan: PlannedRequest, request_id: str, arm: str | None
) -> tuple[bytes, bytes]:
    options = config.options
    assert isinstance(options, OpenAiOptions)
    body = request_body(
        options,
        model=config.model_name,
        prompt=prompt_of(config, source, plan),
        max_tokens=plan.max_tokens,
        whole_length=whole,
        seed=plan.prompt_seed,
    )
    return body, f"{_REQUEST_ID_HEADER}: {quote(request_id)}\r\n".encode("ascii")


def _encode_oip(
    config: ExternalConfig, source: PromptSource, whole: bool, plan: PlannedRequest, request_id: str, arm: str | None
) -> tuple[bytes, bytes]:
    options = config.options
    assert isinstance(options, OipOptions)
    body = infer_request(
        options,
        model=config.model_name,
        prompt=plain_prompt_of(config, source, plan),
        max_tokens=plan.max_tokens,
        whole_length=whole,
        seed=plan.prompt_seed,
        request_id=request_id,
    )
    return body, b""
