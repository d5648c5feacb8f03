"""Which requests and texts a step takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tailgate.servers.config import EngineConfig
from tailgate.servers.engine.scheduler import Batcher, Job, Scheduler

MS = 1_000_000


def job(name: str, *, prompt: int = 3, max_tokens: int = 4, deadline_ns: int = 0) -> Job:
    return Job(request_id=name, prompt=[1] * prompt, max_tokens=max_tokens, recv_ns=0, deadline_ns=deadline_ns)


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


def test_prefill_and_decode_alternate_while_prompts_wait() -> None:
    jobs = [job(name, max_tokens=9) for name in "abc"]
    scheduler = scheduler_with(*jobs, slots=4)
    kinds = [run_step(scheduler) for _ in range(5)]
    assert kinds == [("prefill", "a"), ("decode", "a"), ("prefill", "b"), ("decode", "ab"), ("prefill", "c")]


def test_a_prefill_batch_takes_up_to_its_size_and_the_free_rows() -> None:
    scheduler = scheduler_with(*(job(name, max_tokens=9) for name in "abcde"), slots=3, prefill_batch=2)
    steps = [run_step(scheduler) for _ in range(5)]
    assert steps == [("prefill", "ab"), ("decode", "ab"), ("prefill", "c"), ("decode", "abc"), ("decode", "abc")]
    assert len([item for item in scheduler if item.row < 0]) == 2


def test_deadlines_cover_queued_and_active_requests() -> None:
    jobs = (job("active", deadline_ns=50), job("queued", deadline_ns=40), job("without"))
    scheduler = scheduler_with(*jobs, slots=1)
    scheduler.next_step()
    assert scheduler.expired(39) == []
    assert [item.request_id for item in scheduler.expired(50)] == ["active", "queued"]


def test_chunks_of_a_prompt_come_before_the_next_prompt_and_no_token_beyond_its_length() -> None:
    long, short = job("long", prompt=10), job("short", prompt=2, max_tokens=2)
    scheduler = scheduler_with(long, short, slots=3, prefill_chunk=4)
    steps = [scheduler.next_step() for _ in range(4)]
    assert [(step.kind, step.chunks) for step in steps if step] == [
        ("prefill", ((0, 4),)),
        ("extend", ((4, 8),)),
        ("extend", ((8, 10),)),
        ("decode", ()),
    ]
    scheduler.release("long")
    # before its tokens arrive
    assert [step.kind for _ in range(4) if (step := scheduler.next_step())] == ["prefill", "decode"]
    assert (short.launched, short.output) == (2, [])


@settings(max_examples=60)
@given(
    slots=st.integers(1, 5),
    prefill_batch=st.integers(1, 3),
    chunk=st.integers(0, 3),
    actions=st.lists(st.one_of(st.integers(1, 6), st.just("step"), st.just("cancel")), max_size=60),
)
def test_rows_stay_dense_and_requests_get_their_tokens(
    slots: int, prefill_batch: int, chunk: int, actions: list[object]
) -> None:
    batch = min(prefill_batch, slots)
    scheduler = scheduler_with(slots=slots, max_queue=100, prefill_batch=batch, prefill_chunk=chunk)
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
            if work.kind == "prefill":
                cache[item.row] = item.request_id
            assert cache[item.row] == item.request_id
        for item in work.jobs:
            if work.kind != "decode" and item.prefilled < len(item.prompt):
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
