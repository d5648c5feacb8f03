"""A message that is no protobuf ends its call with INVALID_ARGUMENT, whatever the method, and leaves no traceback.

grpcio's own answer is INTERNAL with the name of a Python class, and a traceback in the log for each such call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class _Undecodable(int):
    """The size in bytes of a message that could not be read."""


class DecodeCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reads every method's requests in place of grpcio."""

    def __init__(self) -> None:
        self._checked: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler behind the check; None where there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        if method not in self._checked:
            self._checked[method] = _behind_check(handler, method.rpartition("/")[2])
        return self._checked[method]  # type: ignore[no-any-return]


def _behind_check(handler: Any, name: str) -> Any:
    message = getattr(handler.request_deserializer, "__self__", None)
    what = getattr(getattr(message, "DESCRIPTOR", None), "full_name", f"request of {name}")
    method = "_".join("stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming))
    return handler._replace(
        request_deserializer=partial(_read, handler.request_deserializer),
        **{method: _checked(getattr(handler, method), what)},
    )


def _read(deserialize: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return deserialize(body)
    except (DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return _Undecodable(len(body))


def _checked(method: Callable[..., Any], what: str) -> Callable[..., Awaitable[Any]]:
    """`method`, one answer or a stream of them, behind a check of its request or of each of its requests."""

    async def checked(request: Any, context: Any) -> Any:
        if hasattr(request, "__aiter__"):
            answer = method(_each_checked(request, what, context), context)
        else:
            answer = method(await _decoded(request, what, context), context)
        if not hasattr(answer, "__aiter__"):
            return await answer
        async for item in answer:
            await context.write(item)
        return None

    return checked


async def _each_checked(requests: AsyncIterator[Any], what: str, context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield await _decoded(request, what, context)


async def _decoded(request: Any, what: str, context: Any) -> Any:
    if isinstance(request, _Undecodable):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message of {request} bytes is no {what}: send it as protobuf, made from the same .proto",
        )
    return request
