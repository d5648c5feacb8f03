"""The ways to an arm: what a planned request looks like on its wire, and the client that starts it.

A client is whatever starts a request without waiting and hands back a call with the times of its tokens: the client
that works on HTTP/2 frames, stock grpcio, OpenAI-compatible HTTP, the Open Inference Protocol. All calls end with a
gRPC status name, so that whoever records them need not know which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from loadtests.clients.call import Call
from loadtests.clients.metadata import encode_metadata
from loadtests.clients.oip import oip_client
from loadtests.clients.openai import OpenAiClient
from loadtests.external.addresses import ExternalConfig, OipOptions, OpenAiOptions
from loadtests.external.oip_wire import infer_request
from loadtests.external.openai_wire import request_body
from loadtests.traffic.prompts import Message, Pieces, PromptSource, PromptText, load_prompt_text
from loadtests.traffic.schedule import PlannedRequest
from servers.clock import now_ns
from servers.config import ConfigError
from servers.rpc.inference_pb2 import GenerateRequest

ARM_HEADER = "x-tailgate-arm"
SESSION_HEADER = "x-tailgate-session"
_REQUEST_ID_HEADER = "X-Request-Id"
_SHUNNED_NS = 1_000_000_000


class Client(Protocol):
    """Starts requests to one address. `on_done` runs once, in the reader: it must neither block nor raise."""

    def start(
        self,
        body: bytes,
        *,
        headers: bytes = ...,
        timeout_s: float | None = ...,
        on_done: Callable[[Any], None] | None = ...,
        tag: Any = ...,
    ) -> Call: ...
    def connect(self, timeout_s: float | None = ...) -> str: ...
    def close(self) -> None: ...


class Lane:
    """One replica of an arm, or the splitter before all of them. `replica` is empty where the answer tells its name."""

    __slots__ = ("client", "refused_ns", "replica", "running")

    def __init__(self, client: Client, replica: str = "") -> None:
        self.client = client
        self.replica = replica
        self.running = 0
        self.refused_ns = 0  # when it was UNAVAILABLE last


# (plan, request id, arm that it is pinned to or None) -> (body, header bytes)
Encode = Callable[[PlannedRequest, str, "str | None"], tuple[bytes, bytes]]


class Route:
    """How requests for one arm are written, and where they go."""

    __slots__ = ("_turn", "encode", "lanes")

    def __init__(self, encode: Encode, lanes: Sequence[Lane]) -> None:
        self.encode = encode
        self.lanes = tuple(lanes)
        self._turn = 0

    def lane(self) -> Lane:
        """The replica with the fewest requests on their way; in turn where several have as few.

        One that was unavailable within the last second comes after all others: who fails at once has nothing under
        way, and would draw the whole load.
        """
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0]
        self._turn = (self._turn + 1) % len(lanes)
        since_ns = now_ns() - _SHUNNED_NS
        return min(
            lanes[self._turn :] + lanes[: self._turn], key=lambda lane: (lane.refused_ns > since_ns, lane.running)
        )


# --- tailgate's own arms ----------------------------------------------------------------------------------------------


class OwnEncoder:
    """Writes tailgate.v1 GenerateRequests. The copies of one plan share the long part, which is encoded once."""

    def __init__(
        self,
        prompt_ids: Callable[[PlannedRequest], list[int]],
        *,
        ignore_eos: bool,
        text: Callable[[PlannedRequest], str | None] | None = None,
    ) -> None:
        self._prompt_ids = prompt_ids
        self._text = text  # the prompt as text, where that is what is to be sent
        self._ignore_eos = ignore_eos
        self._plan: PlannedRequest | None = None
        self._body = b""
        self._session = b""
        self._pins: dict[str, bytes] = {}

    def __call__(self, plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        if plan is not self._plan:
            request = GenerateRequest(
                session_id=plan.session_id, max_tokens=plan.max_tokens, ignore_eos=self._ignore_eos
            )
            text = None if self._text is None else self._text(plan)
            if text is None:
                request.token_ids.ids.extend(self._prompt_ids(plan))
            else:
                request.text = text
            request.sampling.seed = plan.prompt_seed
            self._plan, self._body = plan, request.SerializeToString()
            session = plan.session_id
            if not session.isascii() or not session.isprintable():
                session = quote(session)
            self._session = encode_metadata([(SESSION_HEADER, session)]) if session else b""
        headers = self._session
        if arm is not None:
            pin = self._pins.get(arm)
            if pin is None:
                pin = self._pins[arm] = encode_metadata([(ARM_HEADER, arm)])
            headers += pin
        return _string_field(1, request_id) + self._body, headers


def _string_field(number: int, text: str) -> bytes:
    # Protobuf messages may be concatenated: the long part, the prompt, is encoded once for all arms.
    raw = text.encode("utf-8")
    out, size = bytearray((number << 3 | 2,)), len(raw)
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + raw


# --- External arms ----------------------------------------------------------------------------------------------------

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
    options = config.options
    source = _source(config, traffic)
    encode: Encode
    make: Callable[[str], Client]
    if isinstance(options, OpenAiOptions):
        encode, make = _OpenAiEncoder(config, options, source, ignore_eos), lambda where: OpenAiClient(config, where)
    else:
        encode, make = _OipEncoder(config, options, source, ignore_eos), lambda where: oip_client(config, where)
    names = ["" if arm == "*" else f"{arm}-{number}" for number in range(len(config.addresses))]
    return Route(encode, [Lane(make(where), name) for where, name in zip(config.addresses, names, strict=True)])


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
        before=(),
        after=(),
        render=None,
    )


def _text(source: PromptSource, plan: PlannedRequest) -> str:
    text = source.plain(plan)
    if text is None:
        raise ConfigError(
            "the traffic brings prompts that are exact as token ids alone, and the external arm takes text: "
            'set prompt = "token_ids" where the server takes them, or use another workload'
        )
    return text


class _OpenAiEncoder:
    def __init__(self, config: ExternalConfig, options: OpenAiOptions, source: PromptSource, whole: bool) -> None:
        self._config, self._options, self._source, self._whole = config, options, source, whole

    def __call__(self, plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        source = self._source
        prompt: str | Sequence[int] | Sequence[Message]
        if self._options.prompt == "token_ids":
            prompt = source.ids(plan)
        elif source.kind == "chat" and self._options.endpoint == "chat":
            prompt = source.messages(plan) or _text(source, plan)
        else:
            prompt = _text(source, plan)
        body = request_body(
            self._options,
            model=self._config.model_name,
            prompt=prompt,
            max_tokens=plan.max_tokens,
            whole_length=self._whole,
            seed=plan.prompt_seed,
        )
        return body, f"{_REQUEST_ID_HEADER}: {quote(request_id)}\r\n".encode("ascii")


class _OipEncoder:
    def __init__(self, config: ExternalConfig, options: OipOptions, source: PromptSource, whole: bool) -> None:
        self._config, self._options, self._source, self._whole = config, options, source, whole

    def __call__(self, plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        source = self._source
        body = infer_request(
            self._options,
            model=self._config.model_name,
            prompt=source.ids(plan) if self._options.prompt == "token_ids" else _text(source, plan),
            max_tokens=plan.max_tokens,
            whole_length=self._whole,
            seed=plan.prompt_seed,
            request_id=request_id,
        )
        return body, b""
