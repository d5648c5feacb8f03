"""Planned requests as tailgate's own arms take them."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from loadtests.clients.metadata import encode_metadata
from loadtests.traffic.schedule import PlannedRequest
from servers.config import Task
from servers.metadata import ARM_HEADER, SESSION_HEADER
from servers.rpc.inference_pb2 import EmbedRequest, GenerateRequest, Sampling


class OwnEncoder:
    """Writes tailgate.v1 GenerateRequests or EmbedRequests. The copies of one plan share the long part, which is
    encoded once.

    Both have their id, session, text and token ids in fields of the same numbers.
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
            self._session = encode_metadata([(SESSION_HEADER, session)]) if session else b""
        headers = self._session
        if arm is not None:
            pin = self._pins.get(arm)
            if pin is None:
                pin = self._pins[arm] = encode_metadata([(ARM_HEADER, arm)])
            headers += pin
        return _string_field(1, request_id) + self._body, headers

    def _request(self, plan: PlannedRequest) -> GenerateRequest | EmbedRequest:
        """The request, without its id and its prompt."""
        if self._task == "embed":
            return EmbedRequest(session_id=plan.session_id)
        return GenerateRequest(
            session_id=plan.session_id,
            max_tokens=plan.max_tokens,
            ignore_eos=self._ignore_eos,
            sampling=Sampling(seed=plan.prompt_seed),
        )


def _string_field(number: int, text: str) -> bytes:
    # Protobuf messages may be concatenated: the long part, the prompt, is encoded once for all arms.
    raw = text.encode("utf-8")
    out, size = bytearray((number << 3 | 2,)), len(raw)
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + raw
