"""What became of one call: what this process measured of it, and what the server said of it, as a record."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tailgate.loadtests.clients.call import Call
from tailgate.loadtests.clients.grpc_call import EmbedCall
from tailgate.loadtests.generator.preparer import RequestCopy
from tailgate.loadtests.generator.record import SERVED_COLUMNS, RequestRecord
from tailgate.servers.metadata import ARM_HEADER, trailing_key, whole_number

_TRAILERS = tuple(
    trailing_key(column.removeprefix("server_")) for column in (*SERVED_COLUMNS, "prompt_tokens", "output_tokens")
)
_ARM, _REPLICA = trailing_key("arm"), trailing_key("replica")
_NO_FIGURES: list[int | None] = [None] * len(_TRAILERS)
_NO_TOKENS = np.zeros(0, dtype=np.int64)


def record_of(call: Call, trial: int) -> RequestRecord:
    """Return the row of an ended call. An embedding is not held to tokens, which were never to come."""
    copy: RequestCopy = call.tag
    plan, trailing = copy.plan, call.trailing_metadata
    embeds = isinstance(call, EmbedCall)
    status, error, sent_ns, output_tokens = call.status, call.error, call.sent_ns, call.output_tokens
    token_ns = np.frombuffer(call.token_ns, dtype=np.int64) - sent_ns if call.token_ns else _NO_TOKENS
    routed = call.initial_metadata.get(ARM_HEADER) or trailing.get(ARM_HEADER) or None
    answered = trailing.get(_ARM) or routed
    # The splitter knows where it sent the request, whatever the server calls itself.
    expected = copy.arm or routed or answered
    if answered != expected and answered is not None and status == "OK":
        # A record under the wrong arm would poison both sides of the comparison; a failed one cannot.
        how = "routed" if copy.arm is None else "pinned"
        status, error = "INTERNAL", f'{how} to arm "{expected}" but arm "{answered}" answered: check the routes'
    *served, prompt_tokens, counted = _figures(trailing)
    if status == "OK" and (fault := _fault(error, embeds, output_tokens, counted)):
        status, error = "INTERNAL", fault
    return RequestRecord(
        request_id=copy.request_id,
        session_id=copy.pair_id,
        trial=trial,
        arm=expected,
        replica=trailing.get(_REPLICA) or (copy.endpoint.replica if copy.endpoint is not None else "") or None,
        pair_id=copy.pair_id,
        scheduled_ns=copy.scheduled_ns,
        sent_ns=sent_ns,
        first_token_ns=call.first_token_ns,
        end_ns=call.end_ns,
        status=status,
        error=error or None,
        prompt_tokens=plan.prompt_tokens if prompt_tokens is None else prompt_tokens,
        max_tokens=None if embeds else plan.max_tokens,
        output_tokens=None if embeds else output_tokens,
        token_ns=None if embeds else token_ns,
        phase=plan.phase,
        served=served,
    )


def _figures(metadata: Mapping[str, str]) -> list[int | None]:
    """Return the numbers of `_TRAILERS`, None for one that is missing or no number."""
    if not metadata:
        return _NO_FIGURES
    try:
        return [int(metadata[key]) for key in _TRAILERS]
    except (KeyError, ValueError):
        return [whole_number(metadata.get(key)) for key in _TRAILERS]


def _fault(error: str, embeds: bool, output_tokens: int, counted: int | None) -> str:
    """Return why an answer that ended with OK failed nevertheless, "" if it did not. `counted` is by the
    server."""
    if error:
        return f"the answer ended with OK and an error: {error}"
    if not output_tokens and not embeds:
        return "the answer ended with OK and holds no token"
    if counted is not None and counted != output_tokens and not embeds:
        return f"the server counts {counted} tokens in its answer, and {output_tokens} came"
    return ""
