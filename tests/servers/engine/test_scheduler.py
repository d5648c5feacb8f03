from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from servers.config import EngineConfig
from servers.engine.scheduler import Job, Move, Scheduler


def job(name: str, *, prompt: int = 3, max_tokens: int = 4, deadline_ns: int = 0, stop: int | None = None) -> Job:
    stops = frozenset() if stop is None else frozenset([stop])
    return Job(
        request_id=name, prompt=[1] * prompt, max_tokens=max_tokens, recv_ns=0, deadline_ns=deadline_ns, stop_ids=stops
    )


def test_equal_requests_are_two_jobs() -> None:
    assert job("a") != job("a")
    assert len({job("a"), job("a")}) == 2


def active(scheduler: Scheduler) -> list[Job]:
    """Jobs that hold a row, in row order."""
    return sorted((item for item in scheduler if item.row >= 0), key=lambda item: item.row)


def run_step(scheduler: Scheduler) -> tuple[str, list[str]]:
    step = scheduler.next_step()
    assert step is not None
    for item in step.jobs:
        if scheduler.record(item, 7):
            scheduler.release(item.request_id)
    return step.kind, [item.request_id for item in step.jobs]


def test_prefill_and_decode_alternate_while_prompts_wait() -> None:
    scheduler = Scheduler(EngineConfig(slots=4, max_queue=4))
    for name in "abc":
        scheduler.submit(job(name, max_tokens=9))
    kinds = [run_step(scheduler) for _ in range(6)]
    assert kinds == [
        ("prefill", ["a"]),
        ("decode", ["a"]),
        ("prefill", ["b"]),
        ("decode", ["a", "b"]),
        ("prefill", ["c"]),
        ("decode", ["a", "b", "c"]),
    ]


def test_a_prefill_batch_takes_up_to_its_size_and_the_free_rows() -> None:
    scheduler = Scheduler(EngineConfig(slots=3, max_queue=9, prefill_batch=2))
    for name in "abcde":
        scheduler.submit(job(name, max_tokens=9))
    assert run_step(scheduler) == ("prefill", ["a", "b"])
    assert run_step(scheduler) == ("decode", ["a", "b"])
    assert run_step(scheduler) == ("prefill", ["c"])
    assert run_step(scheduler)[0] == "decode"
    assert run_step(scheduler)[0] == "decode"
    assert len([item for item in scheduler if item.row < 0]) == 2


def test_the_last_row_moves_into_a_freed_one() -> None:
    scheduler = Scheduler(EngineConfig(slots=3, max_queue=0, prefill_batch=3))
    for name in "abc":
        scheduler.submit(job(name))
    scheduler.next_step()
    assert scheduler.release("a") == Move(source=2, target=0, positions=4)
    assert [(item.request_id, item.row) for item in active(scheduler)] == [("c", 0), ("b", 1)]
    assert scheduler.release("b") is None


def test_a_cancelled_request_is_gone_before_the_next_step() -> None:
    scheduler = Scheduler(EngineConfig(slots=2, max_queue=2))
    scheduler.submit(job("a"))
    scheduler.submit(job("b"))
    run_step(scheduler)
    scheduler.release("a")
    scheduler.release("nobody")
    assert run_step(scheduler) == ("prefill", ["b"])


def test_deadlines_cover_queued_and_active_requests() -> None:
    scheduler = Scheduler(EngineConfig(slots=1, max_queue=2))
    scheduler.submit(job("active", deadline_ns=50))
    scheduler.submit(job("queued", deadline_ns=40))
    scheduler.submit(job("patient"))
    scheduler.next_step()
    assert scheduler.expired(39) == []
    assert [item.request_id for item in scheduler.expired(50)] == ["active", "queued"]


def test_a_stop_token_ends_a_request_before_its_length() -> None:
    scheduler = Scheduler(EngineConfig(slots=1, max_queue=0))
    item = job("a", max_tokens=2, stop=9)
    scheduler.submit(item)
    scheduler.next_step()
    assert scheduler.record(item, 5) is None
    assert scheduler.record(item, 9) == "stop"


@settings(max_examples=60)
@given(
    slots=st.integers(1, 5),
    prefill_batch=st.integers(1, 3),
    chunk=st.integers(0, 3),
    actions=st.lists(st.one_of(st.integers(1, 6), st.just("step"), st.just("cancel")), max_size=60),
)
def test_rows_stay_dense_and_every_request_gets_exactly_what_it_asked_for(
    slots: int, prefill_batch: int, chunk: int, actions: list[object]
) -> None:
    scheduler = Scheduler(
        EngineConfig(
            slots=slots,
            max_queue=100,
            prefill_batch=min(prefill_batch, slots),
            prefill_chunk=chunk,
            decode_per_prefill=2,
        )
    )
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
            got.pop(victim, None)
    while step():
        pass
    assert got == requested
    assert len(scheduler) == 0


def test_chunks_of_a_prompt_follow_each_other_before_the_next_prompt_begins() -> None:
    scheduler = Scheduler(EngineConfig(slots=3, max_queue=3, prefill_chunk=4))
    scheduler.submit(job("long", prompt=10))
    scheduler.submit(job("short", prompt=2))
    steps = [scheduler.next_step() for _ in range(4)]
    assert [(step.kind, step.chunks) for step in steps if step] == [
        ("prefill", ((0, 4),)),
        ("extend", ((4, 8),)),
        ("extend", ((8, 10),)),
        ("decode", ()),
    ]


def test_several_decode_steps_run_between_two_prefills_when_asked() -> None:
    scheduler = Scheduler(EngineConfig(slots=4, max_queue=4, decode_per_prefill=3))
    for name in "abc":
        scheduler.submit(job(name, max_tokens=9))
    kinds = [run_step(scheduler)[0] for _ in range(8)]
    assert kinds == ["prefill", "decode", "decode", "decode", "prefill", "decode", "decode", "decode"]


def test_a_job_is_not_launched_beyond_its_length_while_its_tokens_are_on_their_way() -> None:
    scheduler = Scheduler(EngineConfig(slots=1, max_queue=0))
    item = job("a", max_tokens=2)
    scheduler.submit(item)
    assert [step.kind for _ in range(4) if (step := scheduler.next_step())] == ["prefill", "decode"]
    assert (item.launched, item.output) == (2, [])
