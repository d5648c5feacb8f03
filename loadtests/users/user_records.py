"""The record of a user's request, from the line of its end in the request log. Pure."""

from __future__ import annotations

from loadtests.generator.record import SERVED_COLUMNS, RequestRecord
from servers.splitter.request_log import LoggedRequest

# The figures of a replica whose columns have other names, or that are no columns.
_NAMES = {"recv_ns": "server_recv_ns", "end_ns": "server_end_ns"}


def request_id(log: int, offset: int) -> str:
    """Return the id of the request whose end lies there."""
    return f"user-{log}-{offset}"


def user_record(logged: LoggedRequest, identity: str, *, replica: str) -> RequestRecord:
    """The row. Latencies count from the instant at which the splitter took the request: when its user meant to send it
    nobody knows. The first token came with the first byte of the answer; of the other tokens no times are known."""
    figures = {_NAMES.get(name, name): value for name, value in logged.figures.items()}
    output_tokens, first_ns = figures.get("output_tokens"), logged.first_ns
    return RequestRecord(
        request_id=identity,
        session_id=logged.session_id or identity,
        trial=1,
        arm=logged.arm,
        replica=replica,
        pair_id=identity,
        scheduled_ns=logged.start_ns,
        sent_ns=logged.start_ns,
        first_token_ns=logged.start_ns + first_ns if first_ns is not None and output_tokens else None,
        end_ns=logged.start_ns + logged.end_ns,
        status=logged.status,
        error=logged.error or None,
        prompt_tokens=figures.get("prompt_tokens", 0),
        max_tokens=None,
        output_tokens=output_tokens,
        token_ns=None,
        phase="measure",
        served=[figures.get(name) for name in SERVED_COLUMNS],
    )
