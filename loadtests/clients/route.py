"""The way to an arm: how a planned request is written for it, and which of its replicas gets it.

A client is whatever starts a request without waiting and hands back a call with the times of its tokens. All calls end
with a gRPC status name, so that records do not depend on the kind of client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.frames import literal
from tailgate.loadtests.traffic.schedule import PlannedRequest
from tailgate.servers.clock import now_ns
from tailgate.servers.config import Task
from tailgate.servers.metadata import ARM_HEADER, SESSION_HEADER
from tailgate.servers.rpc.inference_pb2 import EmbedRequest, GenerateRequest

_AVOIDED_NS = 1_000_000_000


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


class Endpoint:
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

    __slots__ = ("_turn", "encode", "endpoints")

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


class OwnEncoder:
    """Writes tailgate.v1 GenerateRequests or EmbedRequests for arms that tailgate starts. The copies of one plan share
    the long part.

    Both messages have their id, session, text and token ids in fields of the same numbers.
    """

    def __init__(
        self,
        prompt_ids: Callable[[PlannedRequest], list[int]],
        *,
        ignore_eos: bool,
        text: Callable[[PlannedRequest], str | None] | None = None,
        task: Task = "generate",
    ) -> None:
        self._prompt_ids = prompt_ids
        self._text = text  # the prompt as text, where that is what is to be sent
        self._ignore_eos = ignore_eos
        self._task = task
        self._plan: PlannedRequest | None = None
        self._body = b""
        self._session = b""
        self._pins: dict[str, bytes] = {}

    def __call__(self, plan: PlannedRequest, request_id: str, arm: str | None) -> tuple[bytes, bytes]:
        if plan is not self._plan:
            request = self._request(plan)
            text = None if self._text is None else self._text(plan)
            if text is None:
                request.token_ids.ids.extend(self._prompt_ids(plan))
            else:
                request.text = text
            self._plan, self._body = plan, request.SerializeToString()
            session = plan.session_id
            if not session.isascii() or not session.isprintable():
                session = quote(session)
            self._session = literal(SESSION_HEADER, session) if session else b""
        headers = self._session
        if arm is not None:
            pin = self._pins.get(arm)
            if pin is None:
                pin = self._pins[arm] = literal(ARM_HEADER, arm)
            headers += pin
        # Protobuf messages may be concatenated: the long part, the prompt, is encoded once for all arms.
        return GenerateRequest(request_id=request_id).SerializeToString() + self._body, headers

    def _request(self, plan: PlannedRequest) -> GenerateRequest | EmbedRequest:
        """Return the request without its id and its prompt."""
        if self._task == "embed":
            return EmbedRequest(session_id=plan.session_id)
        return GenerateRequest(
            session_id=plan.session_id,
            max_tokens=plan.max_tokens,
            ignore_eos=self._ignore_eos,
        )
