"""The gRPC front of an arm replica: checks requests, streams tokens and telemetry. Holds no model and no torch.

Errors become status codes in one place, `RefusedError` and the calls of `InferenceService`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import grpc
import grpc.aio

from servers.clock import now_ns
from servers.compiler.events import CompileEvent, CompilerFacts, CompileUnderWay
from servers.complaint import one_line
from servers.config import ArmConfig, EngineConfig, Task
from servers.engine.messages import MemoryReading, Progress, StepRecord, Submit, Timing, startup_groups
from servers.front.front import Answer, Front, TelemetryEvent
from servers.front.request_limits import (
    TEXT_AT_ONCE_CHARACTERS,
    RefusedError,
    check_sizes,
    check_text_sizes,
    invalid,
    too_many_tokens,
)
from servers.front.tokenizer import StopStrings, TextStream, Tokenizer
from servers.front.watcher import MOST_WAITING
from servers.metadata import trailing_key
from servers.rpc import inference_pb2, inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from servers.security import is_bearer


async def check_request(
    request: inference_pb2.GenerateRequest, arm: ArmConfig, tokenizer: Tokenizer, vocab: int
) -> Submit:
    """The engine's form of `request`. Raises RefusedError(INVALID_ARGUMENT) naming value, limit and remedy."""
    limits = arm.engine
    check_task(arm, "generate")
    check_sizes(request, limits)
    prompt = await _tokens_of(request, request.WhichOneof("prompt"), "prompt", limits, tokenizer, vocab)
    if not 1 <= request.max_tokens <= limits.max_new_tokens:
        raise invalid(
            f"max_tokens is {request.max_tokens}; the limit is 1 to {limits.max_new_tokens}: "
            "ask for fewer or raise max_new_tokens"
        )
    sampling = request.sampling
    if not 0.0 <= sampling.temperature <= 100.0:
        raise invalid(f"temperature is {sampling.temperature:g}: give a value from 0 to 100")
    if sampling.top_k < 0:
        raise invalid(f"top_k is {sampling.top_k}: give 0 (off) or a positive number")
    if not 0.0 <= sampling.top_p <= 1.0:
        raise invalid(f"top_p is {sampling.top_p:g}: give a value from 0 to 1")
    return Submit(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=prompt,
        max_tokens=request.max_tokens,
        recv_ns=now_ns(),
        stop_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )


async def check_text(request: inference_pb2.EmbedRequest, arm: ArmConfig, tokenizer: Tokenizer, vocab: int) -> Submit:
    """The engine's form of `request`. Raises RefusedError, as `check_request`."""
    check_task(arm, "embed")
    check_text_sizes(request, arm.engine)
    prompt = await _tokens_of(request, request.WhichOneof("input"), "text", arm.engine, tokenizer, vocab)
    return Submit(request_id=request.request_id or uuid.uuid4().hex, prompt=prompt, max_tokens=0, recv_ns=now_ns())


def check_task(arm: ArmConfig, task: Task) -> None:
    """The arm's model does the task that is asked for. Otherwise RefusedError(UNIMPLEMENTED)."""
    if arm.model.task != task:
        does, call = ("embeds", "Embed") if arm.model.embeds else ("generates", "Generate")
        raise RefusedError(
            grpc.StatusCode.UNIMPLEMENTED, f"{arm.name} serves {arm.model.id}, which {does}: call {call} instead"
        )


async def _tokens_of(
    request: Any, kind: str | None, name: str, limits: EngineConfig, tokenizer: Tokenizer, vocab: int
) -> list[int]:
    """The token ids of a request's text, which it calls `name`, or those that it gives. Raises RefusedError."""
    if kind is None:
        raise invalid(f"the {name} is missing: give text or token_ids")
    if kind == "token_ids":
        ids = list(request.token_ids.ids)
    elif len(request.text) <= TEXT_AT_ONCE_CHARACTERS:
        ids = tokenizer.encode(request.text)
    else:  # other calls go on meanwhile
        ids = await asyncio.to_thread(tokenizer.encode, request.text)
    if not ids or (kind == "text" and not request.text):
        raise invalid(f"the {name} is empty: give at least one token")
    if len(ids) > limits.max_prompt_tokens:
        raise too_many_tokens(len(ids), limits, name)
    if min(ids) < 0 or max(ids) >= vocab:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise invalid(f"token id {bad} is not in the vocabulary: ids go from 0 to {vocab - 1}")
    return ids


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`tailgate.v1.Inference` over a Front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def Generate(  # noqa: N802  (gRPC's name)
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        """Stream the answer; every end, good or bad, carries the trailing metadata that inference.proto lists."""
        recv_ns = now_ns()
        front = self.front
        submit, answer = await self._admit(
            context, recv_ns, partial(check_request, request, front.arm, front.tokenizer)
        )
        status = "CANCELLED"
        try:
            async for chunk in self.stream(request, submit, answer):
                yield chunk
            finished = answer.finished
            status = finished.status if finished is not None else "OK"
            self._trail(context, answer, len(submit.prompt), recv_ns)
            if finished is not None and finished.status != "OK":
                await context.abort(grpc.StatusCode[finished.status], one_line(finished.message))
        finally:
            front.metrics.requests(status=status).inc()
            front.abandon(submit.request_id, answer)

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.EmbedResponse:
        """The vector of one text; every end, good or bad, carries the trailing metadata that inference.proto lists."""
        recv_ns = now_ns()
        front = self.front
        submit, answer = await self._admit(context, recv_ns, partial(check_text, request, front.arm, front.tokenizer))
        status = "CANCELLED"
        try:
            while answer.finished is None:
                await answer.next()
            finished = answer.finished
            status = finished.status
            self._trail(context, answer, len(submit.prompt), recv_ns)
            if finished.status != "OK":
                await context.abort(grpc.StatusCode[finished.status], one_line(finished.message))
            return embed_response(finished.vector, len(submit.prompt))
        finally:
            front.metrics.requests(status=status).inc()
            front.abandon(submit.request_id, answer)

    async def _admit(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        recv_ns: int,
        check: Callable[[int], Awaitable[Submit]],
    ) -> tuple[Submit, Answer]:
        """The request that `check` finds to be good, for the given size of vocabulary, and its answer to come. Any
        other one ends the call."""
        front = self.front
        submit: Submit | None = None
        try:
            vocab = front.ready.vocab_size if front.ready else 1 << 31
            left_s = context.time_remaining()
            submit = await check(vocab)
            deadline_ns = 0 if left_s is None else recv_ns + int(left_s * 1e9)
            submit = dataclasses.replace(submit, recv_ns=recv_ns, deadline_ns=deadline_ns)
            return submit, front.admit(submit)
        except RefusedError as refusal:
            self._trail(context, Answer(), 0 if submit is None else len(submit.prompt), recv_ns)
            front.metrics.requests(status=refusal.code.name).inc()
            await context.abort(refusal.code, one_line(refusal.message))
            raise AssertionError("abort returned") from None

    async def stream(
        self, request: inference_pb2.GenerateRequest, submit: Submit, answer: Answer
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        """The chunks of the answer, until it has finished or a stop string has ended it."""
        wants_text = request.WhichOneof("prompt") == "text" or bool(request.stop)
        text_stream: TextStream | None = self.front.tokenizer.stream() if wants_text else None
        stops = StopStrings(request.stop)
        while True:
            token_ids, emit_ns = await answer.next()
            finished = answer.finished
            if token_ids:
                chunk = inference_pb2.GenerateChunk(token_ids=token_ids, emit_ns=emit_ns)
                stopped = False
                if text_stream is not None:
                    chunk.text, stopped = stops.push(text_stream.push(token_ids))
                if stopped:
                    chunk.finish_reason = inference_pb2.FINISH_REASON_STOP
                elif finished is not None and finished.status == "OK":
                    chunk.text += stops.rest()
                    chunk.finish_reason = _REASONS[finished.reason]
                yield chunk
                if stopped:
                    return
            if finished is not None:
                return

    def _trail(
        self, context: grpc.aio.ServicerContext[Any, Any], answer: Answer, prompt_tokens: int, recv_ns: int
    ) -> None:
        timing = answer.finished.timing if answer.finished is not None else Timing()
        front = self.front
        numbers = (*_TIMES(timing), prompt_tokens, answer.output_tokens, recv_ns, now_ns())
        values = (front.arm.name, front.replica, *map(str, numbers))
        context.set_trailing_metadata(tuple(zip(_TRAILERS, values, strict=True)))


_TIMING = tuple(item.name for item in dataclasses.fields(Timing))
_TIMES = attrgetter(*_TIMING)
_TRAILERS = tuple(
    map(trailing_key, ("arm", "replica", *_TIMING, "prompt_tokens", "output_tokens", "recv_ns", "end_ns"))
)


def embed_response(vector: bytes, tokens: int) -> inference_pb2.EmbedResponse:
    """The answer whose values are `vector`, float32 in this machine's order.

    A little-endian machine holds them as the wire does. So they stay bytes, and no number becomes a Python object.
    """
    if sys.byteorder == "big":
        return inference_pb2.EmbedResponse(values=array("f", vector), tokens=tokens)
    response = inference_pb2.EmbedResponse.FromString(_head_of_values(len(vector) // 4) + vector)
    response.tokens = tokens
    return response


@cache
def _head_of_values(count: int) -> bytes:
    """What stands before `count` values on the wire."""
    return inference_pb2.EmbedResponse(values=bytes(count)).SerializeToString()[: -4 * count]


# Open to all: a splitter's or a cluster's health checks carry no token.
OPEN_TO_ALL = "/grpc.health.v1.Health/"


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Calls without the bearer token end with UNAUTHENTICATED before they reach a service, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token
        # As a stream, it refuses any kind of method, and before the first message.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse_stranger)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler for those who may, a refusal for others."""
        details: Any = handler_call_details
        if not details.method.startswith(OPEN_TO_ALL):
            given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), None)
            if not is_bearer(given, self._token):
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse_stranger(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    given = any(key == "authorization" for key, _ in context.invocation_metadata() or ())
    what = "the bearer token is wrong" if given else "a bearer token is missing"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what}: send authorization: Bearer TOKEN")


_REASONS = {"length": inference_pb2.FINISH_REASON_LENGTH, "stop": inference_pb2.FINISH_REASON_STOP}


# How steps gather into one message: for how long, and how many at most.
STEPS_GATHER_S = 0.05
STEPS_A_MESSAGE = 200
REPLAY_REST_S = 0.01


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    """`tailgate.v1.Telemetry` over a Front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[telemetry_pb2.TelemetryEvent]:
        """Replay what is retained, then follow until the server stops, or until the client no longer reads."""
        requested = {
            CompileEvent: request.compile_events,
            StepRecord: request.steps,
            Progress: request.progress,
            CompilerFacts: request.facts,
            MemoryReading: request.memory,
            CompileUnderWay: request.under_way,
        }
        kinds = tuple(kind for kind, is_requested in requested.items() if is_requested)
        if not kinds:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "nothing to watch is named: set compile_events, under_way, steps, progress, facts or memory",
            )
        steps: list[StepRecord] = []
        with self.front.watch(*kinds) as watcher:
            while (event := await watcher.get()) is not None:
                if isinstance(event, StepRecord):
                    steps.append(event)
                    if watcher.empty():
                        # a message costs as much as fifty records, and those who stream tokens here pay for it
                        await asyncio.sleep(STEPS_GATHER_S)
                    elif len(steps) == STEPS_A_MESSAGE:
                        # a replay of what is retained must not hold up the tokens that are streamed meanwhile
                        await asyncio.sleep(REPLAY_REST_S)
                if steps and (watcher.empty() or len(steps) == STEPS_A_MESSAGE or not isinstance(event, StepRecord)):
                    yield step_records(steps)
                    steps = []
                if not isinstance(event, StepRecord):
                    yield telemetry_event(event)
            if steps:
                yield step_records(steps)
            if watcher.fell_behind:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MOST_WAITING} events wait to be read: watch again and read faster; what is retained comes again",
                )

    async def Snapshot(  # noqa: N802
        self, request: telemetry_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> telemetry_pb2.SnapshotResponse:
        """The arm as it runs: configuration, versions, counters, memory, start-up cost."""
        front = self.front
        answer = telemetry_pb2.SnapshotResponse(
            arm=front.arm.name, replica=front.replica, config_json=json.dumps(front.arm.to_dict())
        )
        answer.counters.update({**front.counters, "in_flight": front.in_flight})
        answer.graph_breaks.update(front.facts.graph_breaks)
        answer.cudagraph_skips.update(front.facts.cudagraph_skips)
        answer.blind_spots.extend(front.facts.blind_spots)
        answer.eager_fallback_share = front.counters["eager_fallback_steps"] / max(1, front.counters["steps"])
        if front.ready is not None:
            answer.versions.update(front.ready.versions)
            answer.memory_bytes.update(front.ready.memory_bytes)
            answer.startup_ns.update(front.ready.startup_ns)
            answer.startup_groups_ns.update(startup_groups(front.ready.startup_ns))
            answer.device = front.ready.device
            answer.dtype = front.ready.dtype
            answer.vocab_size = front.ready.vocab_size
        return answer


def step_records(steps: Sequence[StepRecord]) -> telemetry_pb2.TelemetryEvent:
    """The wire form of engine steps."""
    return telemetry_pb2.TelemetryEvent(steps={"records": [_fields(step) for step in steps]})


def telemetry_event(
    event: CompileEvent | CompileUnderWay | CompilerFacts | Progress | MemoryReading,
) -> telemetry_pb2.TelemetryEvent:
    """The wire form of an event; field names are the same on both sides."""
    names = {
        CompileEvent: "compile",
        CompileUnderWay: "under_way",
        CompilerFacts: "facts",
        Progress: "progress",
        MemoryReading: "memory",
    }
    name = names[type(event)]
    return telemetry_pb2.TelemetryEvent(**{name: _fields(event)})


def _fields(event: TelemetryEvent) -> dict[str, Any]:
    return {item.name: getattr(event, item.name) for item in dataclasses.fields(event)}
