"""A request id that is used again gets its own answer, whatever is left of the earlier request."""

from __future__ import annotations

import asyncio
import logging

import pytest

from servers.config import ArmConfig
from servers.engine.messages import Cancel, Finished, Progress, Ready, StepOutput, Submit
from servers.front.front import Front
from servers.front.metrics import FrontMetrics
from servers.front.tokenizer import load_tokenizer


def submit(request_id: str = "same") -> Submit:
    return Submit(request_id=request_id, prompt=[1], max_tokens=2, recv_ns=0)


def output(*tokens: int, ends: bool = False, cancelled: int = 0) -> StepOutput:
    return StepOutput(
        emit_ns=1,
        tokens=[("same", token) for token in tokens],
        finished=[Finished(request_id="same", status="OK", reason="length")] if ends else [],
        cancelled=["same"] * cancelled,
    )


@pytest.fixture
def front() -> Front:
    sent: list[Submit | Cancel] = []
    arm = ArmConfig(name="arm")
    front = Front(arm, "arm-0", sent.append, load_tokenizer(arm.model.id), FrontMetrics("arm", "arm-0"))
    ready = Ready(vocab_size=9, device="cpu", dtype="float32", versions={}, memory_bytes={}, startup_ns={})
    front.warm = front.ready = ready
    front.sent = sent  # type: ignore[attr-defined]
    return front


def test_the_cleanup_of_a_slow_reader_leaves_a_retry_alone(front: Front) -> None:
    first = front.admit(submit())
    front.receive([output(7, 8, ends=True)])  # ended, and its reader has not read it yet
    retry = front.admit(submit())
    front.abandon("same", first)
    front.receive([output(5, 6, ends=True)])
    assert (retry.token_ids, retry.finished is not None) == ([5, 6], True)
    assert not [message for message in front.sent if isinstance(message, Cancel)]  # type: ignore[attr-defined]


def test_what_is_left_of_a_cancelled_request_is_not_the_retrys(front: Front) -> None:
    first = front.admit(submit())
    front.receive([output(7)])
    front.abandon("same", first)
    retry = front.admit(submit())
    front.receive([output(8), output(9, ends=True)])  # on their way when the engine was told
    assert (retry.token_ids, retry.finished) == ([], None)
    front.receive([output(cancelled=1), output(5), output(6, ends=True)])
    assert (retry.token_ids, retry.finished is not None) == ([5, 6], True)
    assert front.in_flight == 0


def test_two_cancels_are_both_awaited(front: Front) -> None:
    for _ in range(2):
        front.abandon("same", front.admit(submit()))
    last = front.admit(submit())
    front.receive([output(8, cancelled=1)])
    assert last.token_ids == []
    front.receive([output(cancelled=1), output(5)])
    assert last.token_ids == [5]


def test_a_message_that_cannot_be_taken_costs_no_other(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = front.admit(submit())

    def fail(event: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(front, "publish", fail)
    with caplog.at_level(logging.ERROR):
        front.receive([Progress(at_ns=1, stage="load"), output(5, ends=True)])
    assert answer.token_ids == [5]
    assert asyncio.run(answer.next())[0] == [5]
    assert "Progress" in caplog.text
