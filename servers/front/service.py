"""`tailgate.v1.Inference` of a replica, and the request that it sends itself before it serves. Holds no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import grpc
import grpc.aio

from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import one_line
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.messages import Submit, Timing
from tailgate.servers.engine.shapes import first_prompt
from tailgate.servers.front.front import Answer, Front
from tailgate.servers.front.requests import RefusedError, Request, check_request
from tailgate.servers.metadata import FIGURES, TIMING, trailing_key
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc

_REASONS = {"length": inference_pb2.FINISH_REASON_LENGTH, "stop": inference_pb2.FINISH_REASON_STOP}
_TIMES = attrgetter(*TIMING)
_TRAILERS = tuple(map(trailing_key, ("arm", "replica", *FIGURES)))


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, front: Front) -> None:
        self.front = front

    async def Generate(  # noqa: N802  (gRPC's name)
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        async with self._answering(request, context) as (_, answer):
            async for chunk in stream(answer):
                yield chunk

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.EmbedResponse:
        async with self._answering(request, context) as (submit, answer):
            finished = await answer.ended()
        return embed_response(finished.vector, len(submit.prompt))

    @asynccontextmanager
    async def _answering(
        self, request: Request, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[tuple[Submit, Answer]]:
        """Admit the request, and end the call as its answer ends.

        Every end, good or bad, carries the trailing metadata that inference.proto lists.
        """
        recv_ns, left_s = now_ns(), context.time_remaining()
        front, submit = self.front, None
        try:
            submit = await check_request(
                request,
                front.arm,
                front.encode,
                1 << 31 if front.ready is None else front.ready.vocab_size,
                recv_ns=recv_ns,
                deadline_ns=0 if left_s is None else recv_ns + int(left_s * 1e9),
            )
            answer = front.admit(submit)
        except RefusedError as refusal:
            self._trail(context, Answer(), 0 if submit is None else len(submit.prompt), recv_ns)
            front.metrics.count(refusal.code.name)
            await context.abort(refusal.code, one_line(refusal.message))
            raise AssertionError("abort returned") from None
        status = "CANCELLED"
        try:
            yield submit, answer
            status = "OK" if answer.finished is None else answer.finished.status
            self._trail(context, answer, len(submit.prompt), recv_ns)
            if answer.finished is not None and status != "OK":
                await context.abort(grpc.StatusCode[status], one_line(answer.finished.message))
        finally:
            front.metrics.count(status)
            front.abandon(submit.request_id)

    def _trail(
        self, context: grpc.aio.ServicerContext[Any, Any], answer: Answer, prompt_tokens: int, recv_ns: int
    ) -> None:
        timing = answer.finished.timing if answer.finished is not None else Timing()
        numbers = (*_TIMES(timing), prompt_tokens, answer.output_tokens, recv_ns, now_ns())
        values = (self.front.arm.name, self.front.replica, *map(str, numbers))
        context.set_trailing_metadata(tuple(zip(_TRAILERS, values, strict=True)))


async def stream(answer: Answer) -> AsyncIterator[inference_pb2.GenerateChunk]:
    """Yield the chunks of the answer, until it has finished."""
    finished = None
    while finished is None:
        token_ids, emit_ns = await answer.next()
        finished = answer.finished
        if token_ids:
            chunk = inference_pb2.GenerateChunk(token_ids=token_ids, emit_ns=emit_ns)
            if finished is not None and finished.status == "OK":
                chunk.finish_reason = _REASONS[finished.reason]
            yield chunk


def embed_response(vector: bytes, tokens: int) -> inference_pb2.EmbedResponse:
    """Return the answer whose values are `vector`, float32 in little-endian order as on the wire: they stay bytes."""
    response = inference_pb2.EmbedResponse.FromString(_head_of_values(len(vector) // 4) + vector)
    response.tokens = tokens
    return response


@cache
def _head_of_values(count: int) -> bytes:
    """Return the bytes that precede `count` values on the wire."""
    return inference_pb2.EmbedResponse(values=bytes(count)).SerializeToString()[: -4 * count]


def first_request(arm: ArmConfig, vocab_size: int) -> Request:
    """Return a request of a size that the warm-up has run; an answer takes a decode step too, where limits allow."""
    ids = inference_pb2.TokenIds(ids=[index % vocab_size for index in range(first_prompt(arm))])
    if arm.model.embeds:
        return inference_pb2.EmbedRequest(request_id="readiness", token_ids=ids)
    return inference_pb2.GenerateRequest(
        request_id="readiness", token_ids=ids, max_tokens=min(2, arm.engine.max_new_tokens), ignore_eos=True
    )


async def try_out(front: Front) -> str:
    """Return why the warm replica cannot answer a request, in one line; empty when it can. Raises RefusedError.

    The request takes the path of any other, and is in no count and no record.
    """
    assert front.warm is not None
    request = first_request(front.arm, vocab := front.warm.vocab_size)
    submit = await check_request(request, front.arm, front.encode, vocab, recv_ns=now_ns())
    answer, tokens = front.take(submit), 0
    if isinstance(request, inference_pb2.GenerateRequest):
        async for chunk in stream(answer):
            tokens += len(chunk.token_ids)
    finished = await answer.ended()
    if finished.status != "OK":
        what = f"a request of {len(submit.prompt)} tokens ({finished.status}: {finished.message})"
        return f"it is warm and cannot answer {what}"
    if tokens != submit.max_tokens:
        return f"it is warm and answered {tokens} of {submit.max_tokens} tokens"
    return ""
