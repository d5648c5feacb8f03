"""The way to an arm: how a planned request is written for it, and which of its replicas gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from tailgate.loadtests.clients.frames import literal
from tailgate.loadtests.clients.grpc_call import GrpcCall
from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.clients.openai import OpenAiClient
from tailgate.loadtests.external.arms import ExternalArm, OipOptions, OpenAiOptions
from tailgate.loadtests.external.asking import Asking, prompt_text
from tailgate.loadtests.external.oip_wire import METHOD, infer_request, read_response
from tailgate.loadtests.external.openai_wire import request_body
from tailgate.loadtests.traffic.prompts import PromptText, prompt_ids
from tailgate.loadtests.traffic.schedule import PlannedRequest
from tailgate.servers.clock import now_ns
from tailgate.servers.config import Task
from tailgate.servers.metadata import ARM_HEADER, SESSION_HEADER
from tailgate.servers.rpc.inference_pb2 import EmbedRequest, GenerateRequest

Client = InferenceClient | OpenAiClient

_AVOIDED_NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class Endpoint:
    """One replica of an arm, or the splitter before all of them. `replica` is empty where the answer tells its name."""

    client: Client
    replica: str = ""
    running: int = 0
    refused_ns: int = 0  # when it was UNAVAILABLE last


# (plan, request id, arm that it is pinned to or None) -> (body, header bytes)
Encode = Callable[[PlannedRequest, str, "str | None"], tuple[bytes, bytes]]


class Route:
    """How requests for one arm are written, and where they go."""

    def __init__(self, encode: Encode, endpoints: Sequence[Endpoint]) -> None:
        self.encode = encode
        self.endpoints = tuple(endpoints)
        self._turn = 0

    def endpoint(self) -> Endpoint:
        """Return the replica with the fewest requests in flight; take turns among equals.

        One that was unavailable within the last second comes after all others: a replica that fails at once has
        nothing under way, and would draw the whole load.
        """
        endpoints = self.endpoints
        if len(endpoints) == 1:
            return endpoints[0]
        self._turn = (self._turn + 1) % len(endpoints)
        since_ns = now_ns() - _AVOIDED_NS
        in_turn = endpoints[self._turn :] + endpoints[: self._turn]
        return min(in_turn, key=lambda endpoint: (endpoint.refused_ns > since_ns, endpoint.running))


def own_encoder(text: PromptText | None, *, vocab_size: int, ignore_eos: bool, task: Task) -> Encode:
    """Return what writes tailgate.v1 GenerateRequests or EmbedRequests for arms that tailgate starts: with prompts of
    `text`, or of random ids below `vocab_size`.

    Both messages have their id, session, text and token ids in fields of the same numbers.
    """
    pin = lru_cache(literal)
    shared: tuple[PlannedRequest | None, bytes, bytes] = (None, b"", b"")  # by the copies of a plan

    def encode(plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        nonlocal shared
        if plan is not shared[0]:
            session = request_id if arm is None else request_id.removesuffix(f"-{arm}")  # one for all copies
            request: GenerateRequest | EmbedRequest = EmbedRequest(session_id=session)
            if task == "generate":
                request = GenerateRequest(session_id=session, max_tokens=plan.max_tokens, ignore_eos=ignore_eos)
            if text is None:
                request.token_ids.ids.extend(prompt_ids(plan, vocab_size))
            else:
                request.text = text.prompt(plan)
            shared = plan, request.SerializeToString(), literal(SESSION_HEADER, session)
        _, body, headers = shared
        if arm is not None:
            headers += pin(ARM_HEADER, arm)
        # Protobuf messages may be concatenated: the long part, the prompt, is encoded once for all arms.
        return GenerateRequest(request_id=request_id).SerializeToString() + body, headers

    return encode


def external_route(config: ExternalArm, *, traffic: PromptText | None, ignore_eos: bool) -> Route:
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

    addresses = zip(config.address, config.replica_names, strict=True)
    return Route(encode, [Endpoint(external_client(config, address), replica) for address, replica in addresses])


def external_client(config: ExternalArm, address: str) -> Client:
    """Return a client for one replica of an external arm. Its requests are JSON or serialised ModelInferRequests."""
    if isinstance(config.options, OpenAiOptions):
        return OpenAiClient(config, address)
    return InferenceClient(address, path=METHOD, security=config, call=partial(OipCall, options=config.options))


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
