from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servers.config import EngineConfig
from servers.engine.batcher import Batcher
from servers.engine.scheduler import Job

MS = 1_000_000


def text(name: str, *, at_ms: float = 0, deadline_ms: int = 0, tokens: int = 3) -> Job:
    prompt = list(range(tokens))
    return Job(request_id=name, prompt=prompt, max_tokens=0, recv_ns=int(at_ms * MS), deadline_ns=deadline_ms * MS)


def batcher(*, most: int = 4, wait_ms: float = 10) -> Batcher:
    return Batcher(EngineConfig(slots=most, max_wait_ms=wait_ms))


def names(batch: Batcher, at_ms: float) -> list[str] | None:
    step = batch.next_step(int(at_ms * MS))
    return None if step is None else [job.request_id for job in step.jobs]


def test_full_batch_is_released_before_timeout() -> None:
    waiting = batcher(most=3)
    for name in "abc":
        waiting.submit(text(name))
    assert names(waiting, 0) == ["a", "b", "c"]


def test_a_batch_that_is_not_full_waits_for_its_oldest_text_and_no_longer() -> None:
    waiting = batcher()
    waiting.submit(text("a", at_ms=1))
    waiting.submit(text("b", at_ms=9))
    assert names(waiting, 10.9) is None
    assert waiting.rest_ns(8 * MS) == 3 * MS
    assert names(waiting, 11) == ["a", "b"]


def test_without_a_wait_whatever_is_there_leaves_at_once() -> None:
    waiting = batcher(wait_ms=0)
    waiting.submit(text("a", at_ms=5))
    assert names(waiting, 5) == ["a"]


def test_a_text_that_waited_behind_a_full_batch_waits_from_its_own_arrival() -> None:
    waiting = batcher(most=2)
    for name, at_ms in (("a", 0), ("b", 1), ("c", 2)):
        waiting.submit(text(name, at_ms=at_ms))
    assert names(waiting, 3) == ["a", "b"]
    assert waiting.rest_ns(3 * MS) == 9 * MS
    assert names(waiting, 12) == ["c"]


def test_nothing_to_do_is_no_moment_to_wait_for() -> None:
    waiting = batcher()
    assert waiting.rest_ns(0) is None
    waiting.submit(text("a"))
    assert names(waiting, 10) == ["a"]
    assert waiting.rest_ns(10 * MS) is None, "it runs, and the device says when it is done"
    assert len(waiting) == 1


def test_a_cancelled_text_leaves_its_batch_and_one_that_runs_is_forgotten() -> None:
    waiting = batcher()
    for name in "abc":
        waiting.submit(text(name))
    waiting.release("b")
    step = waiting.next_step(10 * MS)
    assert step is not None
    assert [job.request_id for job in step.jobs] == ["a", "c"]
    waiting.release("a")
    assert waiting.find("a") is None
    assert step.jobs[0].row == -1
    assert waiting.find("c") is step.jobs[1]
    waiting.release("nobody")


def test_the_next_oldest_text_decides_once_the_oldest_is_cancelled() -> None:
    waiting = batcher()
    waiting.submit(text("a", at_ms=0))
    waiting.submit(text("b", at_ms=6))
    waiting.release("a")
    assert names(waiting, 10) is None
    assert names(waiting, 16) == ["b"]


def test_deadlines_pass_for_texts_that_wait_and_for_texts_that_run() -> None:
    waiting = batcher(most=1)
    waiting.submit(text("runs", deadline_ms=20))
    waiting.submit(text("waits", at_ms=1, deadline_ms=15))
    waiting.submit(text("patient", at_ms=2))
    assert names(waiting, 2) == ["runs"]
    assert [job.request_id for job in waiting.expired(14 * MS)] == []
    assert [job.request_id for job in waiting.expired(20 * MS)] == ["runs", "waits"]


def test_whatever_waits_when_no_more_comes_leaves_within_the_wait() -> None:
    """A server that drains takes nothing new, and waits until nothing is in flight."""
    waiting = batcher(most=8)
    for number in range(5):
        waiting.submit(text(str(number), at_ms=number))
    at_ns = 4 * MS
    step = waiting.next_step(at_ns)
    while step is None:
        rest_ns = waiting.rest_ns(at_ns)
        assert rest_ns is not None
        assert 0 < rest_ns <= 10 * MS
        at_ns += rest_ns
        step = waiting.next_step(at_ns)
    assert at_ns <= 10 * MS
    assert len(step.jobs) == 5


def test_a_step_reads_every_text_whole() -> None:
    waiting = batcher(wait_ms=0)
    waiting.submit(text("a", tokens=7))
    waiting.submit(text("b", tokens=2))
    step = waiting.next_step(0)
    assert step is not None
    assert (step.kind, step.chunks) == ("encode", ((0, 7), (0, 2)))
    assert [job.row for job in step.jobs] == [0, 1]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40),
    most=st.integers(1, 5),
    wait_ms=st.integers(0, 12),
)
def test_every_text_runs_once_in_order_in_time_and_in_no_larger_batch(
    arrivals: list[tuple[int, bool]], most: int, wait_ms: int
) -> None:
    """Time goes on in ms. A step takes none, so that a batch may leave at every moment when one is due."""
    waiting, left, at_ms = batcher(most=most, wait_ms=wait_ms), [], 0
    came: dict[str, int] = {}
    for number, (gap_ms, cancels) in enumerate(arrivals):
        for moment in range(at_ms, at_ms + gap_ms):
            while (batch := names(waiting, moment)) is not None:
                assert len(batch) <= most
                assert all(moment - came[name] <= wait_ms for name in batch)
                left += batch
        at_ms += gap_ms
        name = str(number)
        waiting.submit(text(name, at_ms=at_ms))
        came[name] = at_ms
        if cancels:
            waiting.release(name)
            del came[name]
    while (batch := names(waiting, at_ms + wait_ms)) is not None:
        left += batch
    assert left == list(came)
