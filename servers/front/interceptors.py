"""What a call passes before it reaches its service: the check of its bearer token, and of its message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

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


class DecodeCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls whose message is not protobuf with INVALID_ARGUMENT, where the request is one message.

    grpcio itself answers INTERNAL with the name of a Python class, and logs a traceback for each such call.
    """

    def __init__(self) -> None:
        self._checked: dict[str, Any] = {}

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the method's handler with the check before it; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        if method not in self._checked:
            name = "unary_stream" if handler.response_streaming else "unary_unary"
            answer = _decoding(handler.request_deserializer, getattr(handler, name))
            self._checked[method] = handler._replace(request_deserializer=None, **{name: answer})
        return self._checked[method]


def _decoding(deserialize: Callable[[bytes], Any], method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """`method` of the bytes of its request."""

    async def decoding(body: bytes, context: Any) -> Any:
        try:
            request = deserialize(body)
        except (DecodeError, UnicodeDecodeError, ValueError, RecursionError):
            kind = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
            name = getattr(kind, "full_name", "request of this method")
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message of {len(body)} bytes is not a {name}: send it as protobuf, made from the same .proto",
            )
        answer = method(request, context)
        if not hasattr(answer, "__aiter__"):
            return await answer
        async for item in answer:
            await context.write(item)
        return None

    return decoding
