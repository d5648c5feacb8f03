from __future__ import annotations

from collections.abc import Callable, Sequence

from servers.config import ArmConfig, EngineConfig
from servers.engine import Arrivals, Engine
from servers.messages import Cancel, CompileEvent, StepOutput, Submit
from servers.scheduler import Job, Move
from servers.shapes import StepShape


class ScriptedRunner:
    """Counts tokens up; `during` runs inside a step, as messages arrive while the device is busy."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.forgotten: list[str] = []
        self.during: Callable[[], None] = lambda: None

    def step(self, kind: str, jobs: Sequence[Job], batch_id: int) -> tuple[list[int], StepShape, bool]:
        self.during()
        return [10 + len(job.output) for job in jobs], StepShape(4, 8 if kind == "prefill" else 1, 8), True

    def move(self, move: Move) -> None:
        self.moves.append(move)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class ScriptedEvents:
    def __init__(self) -> None:
        self.pending: list[CompileEvent] = []

    def drain(self) -> list[CompileEvent]:
        events, self.pending = self.pending, []
        return events


def build(
    *, slots: int = 2, max_queue: int = 8, prefill_batch: int = 2
) -> tuple[Engine, ScriptedRunner, ScriptedEvents, Arrivals]:
    arm = ArmConfig(engine=EngineConfig(slots=slots, max_queue=max_queue, prefill_batch=prefill_batch))
    runner, events = ScriptedRunner(), ScriptedEvents()
    return Engine(arm, runner, events), runner, events, Arrivals()


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
    output, _ = engine.advance(arrivals)
    assert output is not None
    return output


def test_tokens_and_endings_come_out_in_order() -> None:
    engine, runner, _, arrivals = build()
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
    assert engine.advance(arrivals) == (None, [])
    assert runner.forgotten == ["b", "a"]


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
    _, told = engine.advance(arrivals)
    assert told[0].request_ids == ("trigger", "queued", "late")
    stalls = {job.request_id: job.compile_stall_ns for job in engine.scheduler}
    assert stalls == {"trigger": 1000, "queued": 700, "late": 200}
    engine.submit(submit("still in the pipe", recv_ns=1150))
    engine.submit(submit("afterwards", recv_ns=1300))
    stalls = {job.request_id: job.compile_stall_ns for job in engine.scheduler}
    assert stalls["still in the pipe"] == 50
    assert stalls["afterwards"] == 0


def test_an_eager_fallback_is_told_but_charged_to_nobody() -> None:
    engine, runner, events, arrivals = build()
    engine.submit(submit("a"))
    runner.during = lambda: events.pending.append(
        CompileEvent(event_id="0", kind="eager_fallback", start_ns=0, end_ns=99)
    )
    _, told = engine.advance(arrivals)
    assert told[0].kind == "eager_fallback"
    assert next(iter(engine.scheduler)).compile_stall_ns == 0


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


def test_a_full_queue_is_answered_not_raised() -> None:
    engine, _, _, _ = build(slots=1, max_queue=0, prefill_batch=1)
    assert engine.submit(submit("a")) is None
    answer = engine.submit(submit("b"))
    assert answer is not None
    assert answer.status == "RESOURCE_EXHAUSTED"


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
    assert runner.moves == [Move(source=1, target=0)]
