"""Which requests and texts a step takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.servers.config import MOST_PROMPTS, EngineConfig
from tailgate.servers.engine.scheduler import Batcher, Job, Scheduler

MS = 1_000_000


def job(name: str, *, prompt: int = 3, max_tokens: int = 4) -> Job:
    return Job(request_id=name, prompt=[1] * prompt, max_tokens=max_tokens, recv_ns=0)


def scheduler_with(*jobs: Job, **limits: int) -> Scheduler:
    scheduler = Scheduler(EngineConfig(**{"max_queue": 9, **limits}))
    for item in jobs:
        scheduler.submit(item)
    return scheduler


def active(scheduler: Scheduler) -> list[Job]:
    return sorted((item for item in scheduler if item.row >= 0), key=lambda item: item.row)


def run_step(scheduler: Scheduler) -> tuple[str, str]:
    step = scheduler.next_step()
    assert step is not None
    for item in step.jobs:
        if scheduler.record(item, 7):
            scheduler.release(item.request_id)
    return step.kind, "".join(item.request_id for item in step.jobs)


def test_prompts_share_a_step_with_every_running_answer() -> None:
    scheduler = scheduler_with(*(job(name, max_tokens=9) for name in "abcde"), slots=4, step_tokens=8)
    steps = [run_step(scheduler) for _ in range(3)]
    assert steps == [("prefill", "abc"), ("prefill", "abcd"), ("decode", "abcd")]
    assert [item.request_id for item in scheduler if item.row < 0] == ["e"]


def test_a_step_holds_its_limit_of_tokens_and_of_prompts() -> None:
    scheduler = scheduler_with(*(job(str(number), prompt=1, max_tokens=2) for number in range(90)), slots=90)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert first is not None
    assert second is not None
    assert (len(first.prompts), len(second.prompts), len(second.decoding)) == (MOST_PROMPTS, MOST_PROMPTS, MOST_PROMPTS)
    crowded = scheduler_with(*(job(name, prompt=9, max_tokens=9) for name in "abcd"), slots=4, step_tokens=5)
    while (step := crowded.next_step()) is not None:
        assert step.decoding_rows + sum(stop - start for start, stop in step.chunks) <= 5
        assert {item.row for item in step.decoding} <= set(range(step.decoding_rows))


def test_chunks_of_a_prompt_come_before_the_next_prompt_and_no_token_beyond_its_length() -> None:
    long, short = job("long", prompt=10), job("short", prompt=2, max_tokens=2)
    scheduler = scheduler_with(long, short, slots=3, step_tokens=4)
    steps = [step for _ in range(5) if (step := scheduler.next_step())]
    assert [(step.kind, [item.request_id for item in step.jobs], step.chunks) for step in steps] == [
        ("prefill", ["long"], ((0, 4),)),
        ("prefill", ["long"], ((4, 8),)),
        ("prefill", ["long", "short"], ((8, 10), (0, 2))),  # before its tokens arrive
        ("decode", ["long", "short"], ()),
        ("decode", ["long"], ()),
    ]
    assert (short.launched, short.output) == (2, [])


@settings(max_examples=60)
@given(
    slots=st.integers(1, 5),
    most=st.integers(1, 5),
    actions=st.lists(st.one_of(st.integers(1, 6), st.just("step"), st.just("cancel")), max_size=60),
)
def test_rows_stay_dense_and_requests_get_their_tokens(slots: int, most: int, actions: list[object]) -> None:
    scheduler = scheduler_with(slots=slots, max_queue=100, step_tokens=slots + most)
    requested: dict[str, int] = {}
    got: dict[str, int] = {}
    cache: dict[int, str] = {}

    def release(name: str) -> None:
        move = scheduler.release(name)
        if move is not None:
            cache[move.target] = cache[move.source]

    def step() -> bool:
        work = scheduler.next_step()
        if work is None:
            return False
        assert [item.row for item in active(scheduler)] == list(range(len(active(scheduler))))
        for item in work.jobs:
            if item in work.prompts:
                cache[item.row] = item.request_id
            assert cache[item.row] == item.request_id
        for item in work.jobs:
            if item.prefilled < len(item.prompt):
                continue
            got[item.request_id] = got.get(item.request_id, 0) + 1
            if scheduler.record(item, 1):
                release(item.request_id)
        return True

    for number, action in enumerate(actions):
        if isinstance(action, int):
            requested[str(number)] = action
            scheduler.submit(job(str(number), max_tokens=action))
        elif action == "step":
            step()
        elif len(scheduler):
            victim = next(iter(scheduler)).request_id
            del requested[victim]
            release(victim)
            assert scheduler.release(victim) is None, "a cancellation may come after the end"
            got.pop(victim, None)
    while step():
        pass
    assert got == requested
    assert len(scheduler) == 0


def text(name: str, *, at_ms: float = 0, tokens: int = 3) -> Job:
    return Job(request_id=name, prompt=list(range(tokens)), max_tokens=0, recv_ns=int(at_ms * MS))


def batcher(*texts: Job, most: int = 4, wait_ms: float = 10) -> Batcher:
    waiting = Batcher(EngineConfig(slots=most, max_wait_ms=wait_ms))
    for item in texts:
        waiting.submit(item)
    return waiting


def names(batch: Batcher, at_ms: float) -> list[str] | None:
    step = batch.next_step(int(at_ms * MS))
    return None if step is None else [item.request_id for item in step.jobs]


def test_a_batch_waits_for_its_oldest_text_and_reads_texts_whole() -> None:
    waiting = batcher()
    assert waiting.rest_ns(0) is None
    for item in (text("a", at_ms=1), text("b", at_ms=9)):
        waiting.submit(item)
    assert names(waiting, 10.9) is None
    assert waiting.rest_ns(8 * MS) == 3 * MS
    assert names(waiting, 11) == ["a", "b"]
    assert waiting.rest_ns(11 * MS) is None
    assert len(waiting) == 2, "both run"
    step = batcher(text("a", tokens=7), text("b", tokens=2), wait_ms=0).next_step(0)
    assert step is not None
    assert (step.kind, step.chunks) == ("encode", ((0, 7), (0, 2)))
    assert [item.row for item in step.jobs] == [0, 1]


def test_a_full_batch_leaves_at_once_and_the_next_waits_from_its_own_arrival() -> None:
    waiting = batcher(text("a"), text("b", at_ms=1), text("c", at_ms=2), most=2)
    assert names(waiting, 3) == ["a", "b"]
    assert waiting.rest_ns(3 * MS) == 9 * MS
    waiting.submit(text("d", at_ms=4))
    assert names(waiting, 4) == ["c", "d"]


def test_a_cancelled_text_leaves_its_batch_and_a_running_one_is_forgotten() -> None:
    waiting = batcher(text("a"), text("b", at_ms=6), text("c", at_ms=6))
    waiting.release("a")
    waiting.release("unknown")
    assert names(waiting, 10) is None, "the next oldest decides"
    step = waiting.next_step(16 * MS)
    assert step is not None
    assert [item.request_id for item in step.jobs] == ["b", "c"]
    waiting.release("b")
    assert waiting.find("b") is None
    assert step.jobs[0].row == -1
    assert waiting.find("c") is step.jobs[1]
