"""What a call passes before it reaches its service: the check of its bearer token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from servers.security import is_bearer

# A splitter's or a cluster's health checks carry no token.
OPEN_TO_ALL = "/grpc.health.v1.Health/"

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls without the bearer token with UNAUTHENTICATED, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token
        # As a stream, it refuses any kind of method, and before the first message.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the method's handler, or the refusal."""
        details: Any = handler_call_details
        if not details.method.startswith(OPEN_TO_ALL):
            given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), None)
            if not is_bearer(given, self._token):
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    given = any(key == "authorization" for key, _ in context.invocation_metadata() or ())
    what = "the bearer token is wrong" if given else "a bearer token is missing"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what}: send authorization: Bearer TOKEN")
