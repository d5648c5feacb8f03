"""The request that a replica sends itself before it serves: a warm engine may still fail every answer.

It passes the same checks and takes the same path as any other, at sizes that the warm-up has run. It is in no count and
no record.
"""

from __future__ import annotations

from servers.config import ArmConfig
from servers.engine.warmup import first_prompt
from servers.front.front import Front
from servers.front.request_limits import RefusedError
from servers.front.service import InferenceService, check_request, check_text
from servers.rpc import inference_pb2

REQUEST_ID = "readiness"


def first_request(arm: ArmConfig, vocab_size: int) -> inference_pb2.GenerateRequest:
    """A prompt of a length that the warm-up has run; the answer takes a decode step too, where limits allow."""
    return inference_pb2.GenerateRequest(
        request_id=REQUEST_ID,
        token_ids=_token_ids(arm, vocab_size),
        max_tokens=min(2, arm.engine.max_new_tokens),
        ignore_eos=True,
    )


def first_text(arm: ArmConfig, vocab_size: int) -> inference_pb2.EmbedRequest:
    """A text of a length that the warm-up has run."""
    return inference_pb2.EmbedRequest(request_id=REQUEST_ID, token_ids=_token_ids(arm, vocab_size))


def _token_ids(arm: ArmConfig, vocab_size: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=[index % vocab_size for index in range(first_prompt(arm))])


async def try_out(front: Front) -> str:
    """Why the warm replica of `front` cannot answer a request, in one line; empty when it can."""
    return await (_try_text(front) if front.arm.model.embeds else _try_prompt(front))


async def _try_text(front: Front) -> str:
    assert front.warm is not None
    vocab = front.warm.vocab_size
    try:
        submit = await check_text(first_text(front.arm, vocab), front.arm, front.tokenizer, vocab)
    except RefusedError as refusal:
        return f"its own first request is refused: {refusal.message}"
    answer = front.take(submit)
    while answer.finished is None:
        await answer.next()
    if answer.finished.status != "OK":
        why = f"{answer.finished.status}: {answer.finished.message}"
        return f"it is warm and cannot embed a text of {len(submit.prompt)} tokens ({why})"
    return ""


async def _try_prompt(front: Front) -> str:
    assert front.warm is not None
    vocab = front.warm.vocab_size
    request = first_request(front.arm, vocab)
    try:
        submit = await check_request(request, front.arm, front.tokenizer, vocab)
    except RefusedError as refusal:
        return f"its own first request is refused: {refusal.message}"
    answer = front.take(submit)
    tokens = 0
    async for chunk in InferenceService(front).stream(request, submit, answer):
        tokens += len(chunk.token_ids)
    finished = answer.finished
    assert finished is not None  # no stop string can have ended the stream
    if finished.status != "OK":
        why = f"{finished.status}: {finished.message}"
        return f"it is warm and cannot answer a request of {len(submit.prompt)} tokens ({why})"
    if tokens != request.max_tokens:
        return f"it is warm and answered {tokens} of {request.max_tokens} tokens"
    return ""
