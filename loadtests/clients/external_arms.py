"""Planned requests as external arms take them, by OpenAI-compatible HTTP or the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import quote

import numpy as np

from loadtests.clients.oip import oip_client
from loadtests.clients.openai import OpenAiClient
from loadtests.clients.route import Client, Lane, Route
from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.external.oip_wire import infer_request
from loadtests.external.openai_wire import request_body
from loadtests.traffic.prompts import Message, Pieces, PromptSource, PromptText, load_prompt_text
from loadtests.traffic.schedule import PlannedRequest
from servers.fields import ConfigError

_REQUEST_ID_HEADER = "X-Request-Id"

# One token each in the common byte-pair vocabularies, with a space before and mostly without; where the server's
# tokenizer is not at hand, prompts made of them have about the planned length.
_COMMON_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
    *("issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end"),
)


def external_route(arm: str, config: ExternalConfig, *, traffic: PromptSource, ignore_eos: bool) -> Route:
    """The way to an external arm, a lane for each of its addresses. `traffic` makes the prompts of tailgate's own arms.

    Raises ConfigError for what cannot work.
    """
    over_http = config.kind == "openai"
    encode = partial(_encode_openai if over_http else _encode_oip, config, _source(config, traffic), ignore_eos)
    client: Callable[[ExternalConfig, str], Client] = OpenAiClient if over_http else oip_client
    return Route(
        encode,
        [
            Lane(client(config, address), "" if arm == "*" else f"{arm}-{number}")
            for number, address in enumerate(config.addresses)
        ],
    )


def _source(config: ExternalConfig, traffic: PromptSource) -> PromptSource:
    options = config.options
    if options.prompt == "token_ids":
        return traffic
    chat = isinstance(options, OpenAiOptions) and options.endpoint == "chat"
    if options.tokenizer:
        return PromptSource(kind="chat" if chat else "text", text=load_prompt_text(options.tokenizer))
    if traffic.kind == "chat" and not chat:
        raise ConfigError(
            'traffic.prompts is "chat" and an external arm takes plain text: use endpoint = "chat" (kind = "openai"), '
            'prompt = "token_ids" where the server takes them, or traffic.prompts = "text"'
        )
    return traffic if traffic.kind != "ids" else PromptSource(kind="text", text=_common_words())


def _common_words() -> PromptText:
    nothing = np.zeros(len(_COMMON_WORDS), dtype=np.int64)
    follows = tuple(f" {word}" for word in _COMMON_WORDS)
    pieces = Pieces(starts=_COMMON_WORDS, start_ids=nothing, follows=follows, follow_ids=nothing)
    return PromptText(
        name="common words",
        encode=lambda text: [0] * len(text.split()),
        encode_bare=lambda text: [0] * len(text.split()),
        pieces=pieces,
    )


def _text(source: PromptSource, plan: PlannedRequest) -> str:
    text = source.plain(plan)
    if text is None:
        raise ConfigError(
            "the traffic brings prompts that are exact as token ids alone, and the external arm takes text: "
            'set prompt = "token_ids" where the server takes them, or use another workload'
        )
    return text


def _encode_openai(
    config: ExternalConfig, source: PromptSource, whole: bool, plan: PlannedRequest, request_id: str, arm: str | None
) -> tuple[bytes, bytes]:
    options = config.options
    assert isinstance(options, OpenAiOptions)
    prompt: str | Sequence[int] | Sequence[Message]
    if options.prompt == "token_ids":
        prompt = source.ids(plan)
    elif source.kind == "chat" and options.endpoint == "chat":
        prompt = source.messages(plan) or _text(source, plan)
    else:
        prompt = _text(source, plan)
    body = request_body(
        options,
        model=config.model_name,
        prompt=prompt,
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
        prompt=source.ids(plan) if options.prompt == "token_ids" else _text(source, plan),
        max_tokens=plan.max_tokens,
        whole_length=whole,
        seed=plan.prompt_seed,
        request_id=request_id,
    )
    return body, b""
