"""Every number of rows that is asked for has its step, and nothing else of the scheduling changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from servers.config import EngineConfig
from servers.engine.border_scheduler import BorderScheduler, enough_requests
from servers.engine.scheduler import Job, Scheduler


def played(scheduler: Scheduler, requests: list[tuple[int, int]]) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """(kind, rows) of each step for requests of (prompt, tokens), and how many tokens each request got."""
    for name, (prompt, tokens) in enumerate(requests):
        scheduler.submit(Job(request_id=str(name), prompt=[1] * prompt, max_tokens=tokens, recv_ns=0))
    steps, given_tokens = [], dict.fromkeys(map(str, range(len(requests))), 0)
    while (step := scheduler.next_step()) is not None:
        steps.append((step.kind, len(step.jobs)))
        assert max(job.row for job in step.jobs) < scheduler._limits.slots
        if step.kind == "decode":
            assert [job.row for job in step.jobs] == sorted(job.row for job in step.jobs)
        for index, job in enumerate(step.jobs):
            if step.chunks and step.chunks[index][1] < len(job.prompt):
                continue
            given_tokens[job.request_id] += 1
            if scheduler.record(job, 7):
                scheduler.release(job.request_id)
    return steps, given_tokens


def test_decode_steps_of_the_given_rows_come_first_and_fewest_first() -> None:
    scheduler = BorderScheduler(EngineConfig(slots=8), decodes=(8, 1, 4, 2), prefills=(1,))
    steps, _ = played(scheduler, [(3, 9)] * 12)
    decodes = [rows for kind, rows in steps if kind == "decode"]
    assert decodes[:4] == [1, 2, 4, 8]
    # of eight rows, none is decoded before all stand there
    assert steps.index(("decode", 8)) == 8 + 3


def test_prefill_steps_of_the_given_prompts_run_as_soon_as_there_is_room() -> None:
    scheduler = BorderScheduler(EngineConfig(slots=4, prefill_batch=4), decodes=(1, 2, 3, 4), prefills=(1, 2, 3, 4))
    steps, _ = played(scheduler, [(3, 9)] * 14)
    assert {rows for kind, rows in steps if kind == "prefill"} == {1, 2, 3, 4}


def test_what_too_few_requests_cannot_fill_is_left_out_and_all_are_answered() -> None:
    scheduler = BorderScheduler(EngineConfig(slots=8, prefill_batch=4), decodes=(1, 2, 8), prefills=(1, 4))
    steps, tokens = played(scheduler, [(3, 5)] * 3)
    assert ("decode", 2) in steps
    assert ("decode", 8) not in steps
    assert ("prefill", 4) not in steps
    assert tokens == {"0": 5, "1": 5, "2": 5}


def test_with_nothing_asked_for_it_is_the_scheduler() -> None:
    limits = EngineConfig(slots=3, prefill_batch=2, prefill_chunk=4)
    requests = [(1 + number % 9, 1 + number % 5) for number in range(20)]
    assert played(BorderScheduler(limits), requests) == played(Scheduler(limits), requests)


@settings(max_examples=300)
@given(
    slots=st.integers(1, 20),
    batch=st.integers(1, 6),
    chunk=st.sampled_from([0, 1, 4]),
    steps=st.integers(1, 6),
    sizes=st.data(),
)
def test_enough_requests_have_every_number_of_rows(
    slots: int, batch: int, chunk: int, steps: int, sizes: st.DataObject
) -> None:
    batch = min(batch, slots)
    decodes = {1, *sizes.draw(st.sets(st.integers(1, slots)))} if sizes.draw(st.booleans()) else set()
    prefills = {1, *sizes.draw(st.sets(st.integers(1, batch)))}
    count = enough_requests(decodes, prefills, steps)
    answers = st.integers(steps + 1, steps + 5) if decodes else st.just(1)
    prompts = st.integers(1, 9)
    requests = sizes.draw(st.lists(st.tuples(prompts, answers), min_size=count, max_size=count + 4))
    scheduler = BorderScheduler(
        EngineConfig(slots=slots, prefill_batch=batch, prefill_chunk=chunk), decodes=decodes, prefills=prefills
    )
    ran, tokens = played(scheduler, requests)
    assert {rows for kind, rows in ran if kind == "decode"} >= decodes
    assert {rows for kind, rows in ran if kind == "prefill"} >= prefills
    assert list(tokens.values()) == [answer for _, answer in requests], "nothing is lost"
