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


class _Undecodable:
    """Stands for a message that could not be read."""

    def __init__(self, size: int) -> None:
        self.size = size


class DecodeCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reads every method's requests in place of grpcio."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler behind the check; None where there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        message = getattr(handler.request_deserializer, "__self__", None)
        name = handler_call_details.method.rpartition("/")[2]  # type: ignore[attr-defined]
        what = getattr(getattr(message, "DESCRIPTOR", None), "full_name", f"request of {name}")
        shape = _SHAPES[handler.request_streaming, handler.response_streaming]
        return handler._replace(  # type: ignore[no-any-return]
            request_deserializer=partial(_read, handler.request_deserializer),
            **{shape: _WRAPPERS[shape](getattr(handler, shape), what)},
        )


def _read(deserialize: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return deserialize(body)
    except (DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return _Undecodable(len(body))


async def _refuse(what: str, request: _Undecodable, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"the message of {request.size} bytes is no {what}: send it as protobuf, made from the same .proto",
    )


def _one_answer(answer: Callable[..., Awaitable[Any]], what: str) -> Callable[..., Awaitable[Any]]:
    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, _Undecodable):
            await _refuse(what, request, context)
        return await answer(request, context)

    return checked


def _many_answers(answers: Callable[..., AsyncIterator[Any]], what: str) -> Callable[..., AsyncIterator[Any]]:
    async def checked(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, _Undecodable):
            await _refuse(what, request, context)
        async for item in answers(request, context):
            yield item

    return checked


async def _each_checked(requests: AsyncIterator[Any], what: str, context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Undecodable):
            await _refuse(what, request, context)
        yield request


def _many_requests(answers: Callable[..., AsyncIterator[Any]], what: str) -> Callable[..., AsyncIterator[Any]]:
    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for item in answers(_each_checked(requests, what, context), context):
            yield item

    return checked


_SHAPES = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, True): "stream_stream",
}
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "unary_unary": _one_answer,
    "unary_stream": _many_answers,
    "stream_stream": _many_requests,
}
