from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from servers.compiler.events import CompileEvent
from servers.config import ArmConfig, EngineConfig
from servers.engine.engine import Arrivals, Engine
from servers.engine.messages import Cancel, StepOutput, Submit
from servers.engine.scheduler import LaunchedStep, Move, Step
from servers.engine.shapes import StepShape


@dataclass(frozen=True, kw_only=True)
class ScriptedStep(LaunchedStep):
    tokens: list[int]


class ScriptedRunner:
    """Counts tokens up; `during` runs inside a launch, as messages arrive while the device is busy."""

    def __init__(self, *, overlaps: bool = False) -> None:
        self.overlaps = overlaps
        self.ready = True
        self.moves: list[Move] = []
        self.log: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.collecting: Callable[[], None] = lambda: None

    def is_ready(self, step: Step) -> bool:
        return self.ready

    def launch(self, step: Step, batch_id: int) -> ScriptedStep:
        self.log.append(f"launch {batch_id}")
        self.during()
        return ScriptedStep(
            step=step,
            batch_id=batch_id,
            shape=StepShape(step.kind, 4, 8 if step.kind == "prefill" else 1, 8),
            tokens=[9 + job.launched for job in step.jobs],
            answers=tuple(job.prefilled == len(job.prompt) for job in step.jobs),
            real_tokens=sum(stop - start for start, stop in step.chunks) or len(step.jobs),
            start_ns=0,
            compiled=True,
        )

    def collect(self, launched: ScriptedStep) -> list[int]:
        self.log.append(f"collect {launched.batch_id}")
        self.collecting()
        return launched.tokens

    def move(self, move: Move) -> None:
        self.moves.append(move)


class ScriptedEvents:
    def __init__(self) -> None:
        self.pending: list[CompileEvent] = []

    def drain(self) -> list[CompileEvent]:
        events, self.pending = self.pending, []
        return events


def build(
    *, slots: int = 2, prefill_batch: int = 2, prefill_chunk: int = 0, overlaps: bool = False
) -> tuple[Engine, ScriptedRunner, ScriptedEvents, Arrivals]:
    arm = ArmConfig(engine=EngineConfig(slots=slots, prefill_batch=prefill_batch, prefill_chunk=prefill_chunk))
    runner, events = ScriptedRunner(overlaps=overlaps), ScriptedEvents()
    return Engine(arm, runner, events.drain), runner, events, Arrivals()


def submit(
    name: str, *, recv_ns: int = 0, max_tokens: int = 2, deadline_ns: int = 0, ignore_eos: bool = True
) -> Submit:
    return Submit(
        request_id=name,
        prompt=[1, 2, 3],
        max_tokens=max_tokens,
        recv_ns=recv_ns,
        deadline_ns=deadline_ns,
        ignore_eos=ignore_eos,
    )


def advance(engine: Engine, arrivals: Arrivals) -> StepOutput:
    outputs, _ = engine.advance(arrivals)
    assert len(outputs) == 1
    return outputs[0]


def test_tokens_and_endings_come_out_in_order() -> None:
    engine, _, _, arrivals = build()
    engine.submit(submit("a"))
    engine.submit(submit("b", max_tokens=1))
    first = advance(engine, arrivals)
    assert first.tokens == [("a", 10), ("b", 10)]
    assert [(item.request_id, item.status, item.reason) for item in first.finished] == [("b", "OK", "length")]
    assert first.step is not None
    assert (
        first.step.kind,
        first.step.batch,
        first.step.padded_batch,
        first.step.tokens,
        first.step.padded_tokens,
    ) == ("prefill", 2, 4, 6, 32)
    second = advance(engine, arrivals)
    assert second.tokens == [("a", 11)]
    timing = second.finished[0].timing
    assert (timing.batch_id, timing.batch_size, timing.padded_batch, timing.padded_length) == (0, 2, 4, 8)
    assert engine.advance(arrivals) == ([], [])
    assert engine.idle


def test_a_compile_is_charged_to_the_batch_the_queue_and_those_who_came_meanwhile() -> None:
    engine, runner, events, arrivals = build(slots=1, prefill_batch=1)
    engine.submit(submit("trigger", recv_ns=100))
    engine.submit(submit("queued", recv_ns=500))

    def compile_now() -> None:
        events.pending.append(
            CompileEvent(event_id="0", kind="recompile", start_ns=200, end_ns=1200, batch_id=0, phase="serving")
        )
        arrivals.put(submit("late", recv_ns=1000))

    runner.during = compile_now
    _, settled = engine.advance(arrivals)
    assert settled[0].request_ids == ("trigger", "queued", "late")
    stalls = {job.request_id: job.timing.compile_stall_ns for job in engine.scheduler}
    assert stalls == {"trigger": 1000, "queued": 700, "late": 200}
    engine.submit(submit("still in the pipe", recv_ns=1150))
    engine.submit(submit("afterwards", recv_ns=1300))
    stalls = {job.request_id: job.timing.compile_stall_ns for job in engine.scheduler}
    assert stalls["still in the pipe"] == 50
    assert stalls["afterwards"] == 0


def test_nobody_is_charged_twice_for_compiles_that_lie_in_each_other() -> None:
    engine, runner, events, arrivals = build()
    engine.submit(submit("a", recv_ns=100))
    spans = (("autotune", 200, 1200), ("jit", 900, 1400), ("jit", 2000, 2100))
    runner.during = lambda: events.pending.extend(
        CompileEvent(event_id=f"{number}", kind=kind, start_ns=start, end_ns=end)
        for number, (kind, start, end) in enumerate(spans)
    )
    _, settled = engine.advance(arrivals)
    assert len(settled) == 3
    assert next(iter(engine.scheduler)).timing.compile_stall_ns == 1300
    engine.submit(submit("still in the pipe", recv_ns=1000))
    assert [job.timing.compile_stall_ns for job in engine.scheduler] == [1300, 500]


def test_a_background_compile_is_told_while_nothing_runs_and_charged_to_nobody() -> None:
    engine, _, events, arrivals = build()
    events.pending.append(CompileEvent(event_id="0", kind="background_compile", start_ns=0, end_ns=99))
    outputs, settled = engine.advance(arrivals)
    assert (outputs, [event.kind for event in settled]) == ([], ["background_compile"])
    engine.submit(submit("a", recv_ns=50))
    assert next(iter(engine.scheduler)).timing.compile_stall_ns == 0


def test_an_eager_fallback_is_told_but_charged_to_nobody() -> None:
    engine, runner, events, arrivals = build()
    engine.submit(submit("a"))
    runner.during = lambda: events.pending.append(
        CompileEvent(event_id="0", kind="eager_fallback", start_ns=0, end_ns=99)
    )
    _, settled = engine.advance(arrivals)
    assert settled[0].kind == "eager_fallback"
    assert next(iter(engine.scheduler)).timing.compile_stall_ns == 0


def test_a_cancel_during_a_step_swallows_its_token_and_frees_the_slot() -> None:
    engine, runner, _, arrivals = build(slots=1, prefill_batch=1)
    engine.submit(submit("a", max_tokens=50))
    advance(engine, arrivals)
    engine.submit(submit("b"))
    runner.during = lambda: arrivals.put(Cancel(request_id="a"))
    assert advance(engine, arrivals).tokens == []
    runner.during = lambda: None
    assert advance(engine, arrivals).tokens == [("b", 10)]


def test_an_expired_request_frees_its_slot_before_the_next_step() -> None:
    engine, _, _, arrivals = build(slots=1, prefill_batch=1)
    engine.submit(submit("a", max_tokens=50, deadline_ns=1000))
    advance(engine, arrivals)
    assert engine.expire(999) == []
    ended = engine.expire(1000)
    assert [(item.request_id, item.status) for item in ended] == [("a", "DEADLINE_EXCEEDED")]
    assert len(engine.scheduler) == 0


class OutOfMemoryError(RuntimeError):
    pass


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on() -> None:
    engine, runner, _, arrivals = build(slots=2, prefill_batch=1)
    engine.submit(submit("a"))
    engine.submit(submit("b"))

    def fail() -> None:
        raise OutOfMemoryError("device is full\nlong story")

    runner.during = fail
    output = advance(engine, arrivals)
    assert [(item.request_id, item.status, item.message) for item in output.finished] == [
        ("a", "RESOURCE_EXHAUSTED", "OutOfMemoryError: device is full")
    ]
    runner.during = lambda: None
    assert advance(engine, arrivals).tokens == [("b", 10)]


class UnforeseenShapeError(RuntimeError):
    pass


def test_a_refused_step_ends_its_requests_with_a_status_of_its_own_and_the_reason() -> None:
    engine, runner, _, arrivals = build(slots=2, prefill_batch=1)
    engine.submit(submit("a"))
    engine.submit(submit("b"))

    def refuse() -> None:
        raise UnforeseenShapeError("no graph fits prefill batch 1 (a guard)")

    runner.during = refuse
    (ended,) = advance(engine, arrivals).finished
    assert (ended.request_id, ended.status) == ("a", "FAILED_PRECONDITION")
    assert ended.message == "UnforeseenShapeError: no graph fits prefill batch 1 (a guard)"
    runner.during = lambda: None
    assert advance(engine, arrivals).tokens == [("b", 10)]


def test_the_end_of_sequence_token_stops_a_request_unless_it_is_ignored() -> None:
    engine, _, _, arrivals = build()
    engine.eos_ids = frozenset([10])
    engine.submit(submit("stops", ignore_eos=False))
    engine.submit(submit("goes on"))
    finished = advance(engine, arrivals).finished
    assert [(item.request_id, item.reason) for item in finished] == [("stops", "stop")]


def test_a_row_move_is_carried_out_by_the_runner() -> None:
    engine, runner, _, arrivals = build(slots=2)
    engine.submit(submit("a", max_tokens=1))
    engine.submit(submit("b", max_tokens=5))
    advance(engine, arrivals)
    assert runner.moves == [Move(source=1, target=0, positions=4)]


def run_until_idle(engine: Engine, arrivals: Arrivals) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while not engine.idle:
        outputs += engine.advance(arrivals)[0]
    return outputs


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_handed_out() -> None:
    engine, runner, _, arrivals = build(overlaps=True)
    engine.submit(submit("a", max_tokens=3))
    outputs = run_until_idle(engine, arrivals)
    assert runner.log == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]
    assert [output.tokens for output in outputs] == [[("a", 10)], [("a", 11)], [("a", 12)]]


def test_a_step_that_may_compile_waits_until_finished_tokens_are_out() -> None:
    engine, runner, _, arrivals = build(overlaps=True)
    runner.ready = False
    engine.submit(submit("a", max_tokens=2))
    run_until_idle(engine, arrivals)
    assert runner.log == ["launch 0", "collect 0", "launch 1", "collect 1"]


def test_what_a_step_computed_beyond_the_end_of_an_answer_is_dropped() -> None:
    engine, runner, _, arrivals = build(slots=2, overlaps=True)
    engine.eos_ids = frozenset([11])
    engine.submit(submit("stops", max_tokens=50, ignore_eos=False))
    engine.submit(submit("goes on", max_tokens=4))
    outputs = run_until_idle(engine, arrivals)
    tokens = [token for output in outputs for token in output.tokens]
    assert [token for name, token in tokens if name == "stops"] == [10, 11]
    assert [token for name, token in tokens if name == "goes on"] == [10, 11, 12, 13]
    assert runner.moves == [Move(source=1, target=0, positions=3 + 3)]
    endings = {item.request_id: item.reason for output in outputs for item in output.finished}
    assert endings == {"stops": "stop", "goes on": "length"}


def test_a_step_planned_for_an_answer_that_has_just_ended_leaves_it_out() -> None:
    engine, runner, _, arrivals = build(slots=2, overlaps=True)
    engine.eos_ids = frozenset([10])
    runner.ready = False
    engine.submit(submit("stops", max_tokens=9, ignore_eos=False))
    engine.submit(submit("goes on", max_tokens=2))
    outputs = run_until_idle(engine, arrivals)
    assert [output.tokens for output in outputs] == [[("stops", 10), ("goes on", 10)], [("goes on", 11)]]


def test_a_step_that_fails_on_its_way_ends_its_requests_and_the_engine_lives_on() -> None:
    engine, runner, _, arrivals = build(slots=1, prefill_batch=1, overlaps=True)
    engine.submit(submit("a"))
    engine.submit(submit("b"))

    def fail() -> None:
        runner.collecting = lambda: None
        raise OutOfMemoryError("device is full")

    runner.collecting = fail
    finished = [item for output in run_until_idle(engine, arrivals) for item in output.finished]
    assert [(item.request_id, item.status) for item in finished] == [("a", "RESOURCE_EXHAUSTED"), ("b", "OK")]


class AcceleratorError(RuntimeError):
    pass


def test_a_lost_device_ends_the_engine() -> None:
    engine, runner, _, arrivals = build()
    engine.submit(submit("a"))

    def fail() -> None:
        raise AcceleratorError("an illegal memory access was encountered")

    runner.during = fail
    with pytest.raises(AcceleratorError):
        engine.advance(arrivals)


def test_a_long_prompt_is_prefilled_in_chunks_with_tokens_of_others_in_between() -> None:
    engine, _, _, arrivals = build(slots=2, prefill_batch=1, prefill_chunk=2)
    engine.submit(submit("running", max_tokens=9))
    while not advance(engine, arrivals).tokens:
        pass
    engine.submit(submit("long"))
    steps = [advance(engine, arrivals) for _ in range(4)]
    assert [step.step.kind for step in steps if step.step] == ["decode", "prefill", "decode", "extend"]
    assert [name for name, _ in steps[3].tokens] == ["long"]
    assert [step.step.tokens for step in steps if step.step] == [1, 2, 1, 1]


def test_a_failing_step_does_not_end_an_answer_twice() -> None:
    engine, runner, _, arrivals = build(slots=2, overlaps=True)
    engine.eos_ids = frozenset([10])
    engine.submit(submit("stops", max_tokens=9, ignore_eos=False))
    engine.submit(submit("fails", max_tokens=9))

    def fail() -> None:
        if runner.log[-1] == "launch 1":
            raise OutOfMemoryError("device is full")

    runner.during = fail
    finished = [item for output in run_until_idle(engine, arrivals) for item in output.finished]
    assert [(item.request_id, item.status) for item in finished] == [("stops", "OK"), ("fails", "RESOURCE_EXHAUSTED")]


def test_a_compile_is_not_charged_to_an_answer_that_ended_before_it() -> None:
    engine, runner, events, arrivals = build(slots=2, overlaps=True)
    engine.eos_ids = frozenset([10])
    runner.ready = False
    engine.submit(submit("stops", max_tokens=9, ignore_eos=False))
    engine.submit(submit("goes on", max_tokens=2))

    def compile_now() -> None:
        if runner.log[-1] == "launch 1":
            events.pending.append(CompileEvent(event_id="0", kind="recompile", start_ns=1, end_ns=9, phase="serving"))

    runner.during = compile_now
    settled = []
    while not engine.idle:
        settled += engine.advance(arrivals)[1]
    assert [event.request_ids for event in settled] == [("goes on",)]
