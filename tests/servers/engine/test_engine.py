"""The engine with a scripted runner, and the parts of its process."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tailgate.servers.clock import now_ns
from tailgate.servers.config import EngineConfig
from tailgate.servers.engine import engine as engine_module
from tailgate.servers.engine.device import Outbox, itemised, process_started_ns
from tailgate.servers.engine.engine import Engine
from tailgate.servers.engine.messages import Cancel, StepOutput, Submit
from tailgate.servers.engine.placement import resolve_device
from tailgate.servers.engine.scheduler import Batcher, LaunchedStep, Move, Scheduler, Step
from tailgate.servers.engine.shapes import StepShape
from tailgate.servers.engine.step_runner import uncollected
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent
from tests.servers.test_config import refusal


@dataclass(frozen=True, kw_only=True)
class ScriptedStep(LaunchedStep):
    tokens: list[int]


class ScriptedRunner:
    """Counts tokens up; `during` runs inside a launch, as messages arrive while the device is busy."""

    def __init__(self, *, overlaps: bool, eos: int) -> None:
        self.overlaps = overlaps
        self.eos_ids = frozenset([eos])
        self.graphs = True
        self.moves: list[Move] = []
        self.log: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.collecting: Callable[[], None] = lambda: None

    def has_graph(self, step: Step) -> bool:
        return self.graphs

    def launch(self, step: Step, batch_id: int) -> ScriptedStep:
        self.log.append(f"launch {batch_id}")
        self.during()
        return ScriptedStep(
            step=step,
            batch_id=batch_id,
            shape=StepShape(step.kind, 4, 8 if step.kind == "prefill" else 1, 8),
            tokens=[9 + job.launched for job in step.jobs],
            answers=tuple(job.prefilled == len(job.prompt) for job in step.jobs),
            real_tokens=len(step.decoding) + sum(stop - start for start, stop in step.chunks),
            start_ns=0,
            compiled=True,
        )

    def collect(self, launched: ScriptedStep) -> list[int]:
        self.log.append(f"collect {launched.batch_id}")
        self.collecting()
        return launched.tokens

    def move(self, move: Move) -> None:
        self.moves.append(move)


class Scripted:
    """An engine, its runner, what arrives, and the compiles that the next step meets."""

    def __init__(self, *, slots: int = 2, overlaps: bool = False, eos: int = -1) -> None:
        self.runner = ScriptedRunner(overlaps=overlaps, eos=eos)
        self.compiles: list[CompileEvent] = []
        self.engine = Engine(Scheduler(EngineConfig(slots=slots)), self.runner, self.drain)
        self.arrivals = self.engine.arrivals

    def drain(self) -> list[CompileEvent]:
        compiles, self.compiles = self.compiles, []
        return compiles

    def submit(self, *names: str, **fields: int) -> None:
        for name in names:
            self.engine.submit(submission(name, **fields))

    def step(self) -> StepOutput:
        (output,), _ = self.engine.advance()
        return output

    def logged(self) -> list[StepOutput]:
        outputs, _ = self.engine.advance()
        self.runner.log += ["out"] * len(outputs)
        return outputs

    def run(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        while not self.engine.idle:
            outputs += self.engine.advance()[0]
        return outputs

    def endings(self) -> list[tuple[str, str, str]]:
        return [
            (item.request_id, item.status, item.reason or item.message)
            for output in self.run()
            for item in output.finished
        ]

    def stalls(self) -> dict[str, int]:
        return {job.request_id: job.timing.compile_stall_ns for job in self.engine.scheduler}

    def fail(self, error: Exception, when: str = "during") -> None:
        """The next step that is launched, or collected, raises the error."""

        def raising() -> None:
            self.runner.during = self.runner.collecting = lambda: None
            raise error

        setattr(self.runner, when, raising)


def submission(name: str, **fields: int) -> Submit:
    values = {"max_tokens": 2, "recv_ns": 0, "deadline_ns": 0, "ignore_eos": True, **fields}
    return Submit(request_id=name, name=name, prompt=[1, 2, 3], **values)  # type: ignore[arg-type]


def compile_of(start_ns: int, end_ns: int, kind: str = "recompile") -> CompileEvent:
    return CompileEvent(event_id="0", kind=kind, start_ns=start_ns, end_ns=end_ns, phase="serving")  # type: ignore[arg-type]


def test_tokens_and_endings_come_out_in_order() -> None:
    scripted = Scripted()
    scripted.submit("a")
    scripted.submit("b", max_tokens=1)
    first = scripted.step()
    assert first.tokens == [("a", 10), ("b", 10)]
    assert [(item.request_id, item.status, item.reason) for item in first.finished] == [("b", "OK", "length")]
    step = first.step
    assert step is not None
    assert (step.kind, step.batch, step.padded_batch, step.tokens, step.padded_tokens) == ("prefill", 2, 4, 6, 32)
    second = scripted.step()
    assert second.tokens == [("a", 11)]
    timing = second.finished[0].timing
    assert (timing.batch_id, timing.batch_size, timing.padded_batch, timing.padded_length) == (0, 2, 4, 8)
    assert scripted.engine.advance() == ([], [])
    assert scripted.engine.idle


def test_a_compile_is_charged_to_its_batch_the_queue_and_later_arrivals() -> None:
    scripted = Scripted(slots=1)
    scripted.submit("trigger", recv_ns=100)
    scripted.submit("queued", recv_ns=500)

    def compile_now() -> None:
        scripted.compiles.append(compile_of(200, 1200))
        scripted.arrivals.put(submission("late", recv_ns=1000))
        scripted.arrivals.put(submission("after its end", recv_ns=1200))

    scripted.runner.during = compile_now
    _, settled = scripted.engine.advance()
    assert settled[0].request_ids == ["trigger", "queued", "late"]
    assert scripted.stalls() == {"trigger": 1000, "queued": 700, "late": 200, "after its end": 0}
    scripted.submit("still in the pipe", recv_ns=1150)
    scripted.submit("afterwards", recv_ns=1300)
    assert (scripted.stalls()["still in the pipe"], scripted.stalls()["afterwards"]) == (50, 0)


def test_compiles_inside_each_other_are_charged_once() -> None:
    scripted = Scripted()
    scripted.submit("a", recv_ns=100)
    spans = ((200, 1200, "autotune"), (900, 1400, "jit"), (2000, 2100, "jit"))
    scripted.runner.during = lambda: scripted.compiles.extend(compile_of(*span) for span in spans)
    _, settled = scripted.engine.advance()
    assert len(settled) == 3
    scripted.submit("still in the pipe", recv_ns=1000)
    assert scripted.stalls() == {"a": 1300, "still in the pipe": 500}


@pytest.mark.parametrize("kind", ["background_compile", "eager_fallback"])
def test_events_that_hold_up_no_step_are_reported_and_charged_to_no_request(kind: str) -> None:
    scripted = Scripted()
    if kind == "eager_fallback":
        scripted.submit("a")
    scripted.compiles = [compile_of(0, 99, kind)]
    _, settled = scripted.engine.advance()
    assert [event.kind for event in settled] == [kind]
    scripted.submit("later", recv_ns=50)
    assert set(scripted.stalls().values()) == {0}


def test_a_compile_is_not_charged_to_an_answer_that_ended_before_it() -> None:
    scripted = Scripted(overlaps=True, eos=10)
    scripted.runner.graphs = False
    scripted.submit("stops", max_tokens=9, ignore_eos=False)
    scripted.submit("continues", max_tokens=2)

    def compile_now() -> None:
        if scripted.runner.log[-1] == "launch 1":
            scripted.compiles.append(compile_of(1, 9))

    scripted.runner.during = compile_now
    settled = []
    while not scripted.engine.idle:
        settled += scripted.engine.advance()[1]
    assert [event.request_ids for event in settled] == [["continues"]]


def test_a_cancel_during_a_step_drops_its_token_and_frees_the_slot() -> None:
    scripted = Scripted(slots=1)
    scripted.submit("a", max_tokens=50)
    scripted.step()
    scripted.submit("b")
    scripted.runner.during = lambda: scripted.arrivals.put(Cancel(request_id="a"))
    assert scripted.step().tokens == []
    scripted.runner.during = lambda: None
    assert scripted.step().tokens == [("b", 10)]


def test_an_expired_request_frees_its_slot_before_the_next_step() -> None:
    scripted = Scripted(slots=1)
    scripted.submit("a", "queued", max_tokens=50, deadline_ns=2**62)
    scripted.step()
    assert scripted.engine.expire(2**62 - 1) == []
    ended = scripted.engine.expire(2**62)
    statuses = [(item.request_id, item.status) for item in ended]
    assert statuses == [("a", "DEADLINE_EXCEEDED"), ("queued", "DEADLINE_EXCEEDED")]
    assert ended[1].timing.queue_ns > 0
    assert len(scripted.engine.scheduler) == 0


def error(kind: str, message: str = "full") -> Exception:
    """An error of torch's or the runner's, which the engine knows by the name of its class."""
    made: Exception = type(kind, (RuntimeError,), {})(message)
    return made


@pytest.mark.parametrize(
    ("kind", "status"),
    [("OutOfMemoryError", "RESOURCE_EXHAUSTED"), ("UnforeseenShapeError", "FAILED_PRECONDITION"), ("Odd", "INTERNAL")],
)
@pytest.mark.parametrize("when", ["during", "collecting"])
def test_a_failing_step_ends_its_requests_and_the_engine_continues(kind: str, status: str, when: str) -> None:
    scripted = Scripted(slots=1, overlaps=when == "collecting")
    scripted.submit("a", "b")
    scripted.fail(error(kind, "first line\nmore"), when)
    assert scripted.endings() == [("a", status, f"{kind}: first line"), ("b", "OK", "length")]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_cannot_be_launched_fails_its_prompts_and_running_answers_go_on(overlaps: bool) -> None:
    scripted = Scripted(overlaps=overlaps)
    scripted.submit("runs", max_tokens=4)
    outputs, _ = scripted.engine.advance()
    scripted.submit("fails")
    scripted.fail(error("UnforeseenShapeError"))
    outputs += scripted.run()
    assert [token for output in outputs for name, token in output.tokens if name == "runs"] == [10, 11, 12, 13]
    endings = {item.request_id: item.status for output in outputs for item in output.finished}
    assert endings == {"runs": "OK", "fails": "FAILED_PRECONDITION"}


def test_a_failing_step_does_not_end_an_answer_twice() -> None:
    scripted = Scripted(overlaps=True, eos=10)
    scripted.submit("stops", max_tokens=9, ignore_eos=False)
    scripted.submit("fails", max_tokens=9)

    def fail() -> None:
        if scripted.runner.log[-1] == "launch 1":
            raise error("OutOfMemoryError")

    scripted.runner.during = fail
    assert [ending[:2] for ending in scripted.endings()] == [("stops", "OK"), ("fails", "RESOURCE_EXHAUSTED")]


def test_a_lost_device_ends_the_engine() -> None:
    scripted = Scripted()
    scripted.submit("a")
    lost = error("AcceleratorError")
    scripted.fail(lost)
    with pytest.raises(type(lost)):
        scripted.step()


def test_an_end_of_sequence_token_stops_a_request_unless_it_is_ignored_and_later_tokens_are_dropped() -> None:
    scripted = Scripted(overlaps=True, eos=11)
    scripted.submit("stops", max_tokens=50, ignore_eos=False)
    scripted.submit("continues", max_tokens=4)
    outputs = scripted.run()
    tokens = [token for output in outputs for token in output.tokens]
    assert [token for name, token in tokens if name == "stops"] == [10, 11]
    assert [token for name, token in tokens if name == "continues"] == [10, 11, 12, 13]
    assert scripted.runner.moves == [Move(source=1, target=0, positions=3 + 3)]
    endings = {item.request_id: item.reason for output in outputs for item in output.finished}
    assert endings == {"stops": "stop", "continues": "length"}


@pytest.mark.parametrize("graphs", [True, False])
def test_a_recorded_step_is_launched_before_the_last_tokens_are_sent_and_another_one_after_them(graphs: bool) -> None:
    scripted = Scripted(overlaps=True)
    scripted.runner.graphs = graphs
    scripted.submit("a", max_tokens=3)
    outputs = [output for _ in range(4 if graphs else 6) for output in scripted.logged()]
    assert [output.tokens for output in outputs] == [[("a", 10)], [("a", 11)], [("a", 12)]]
    ahead = ["launch 0", "launch 1", "collect 0", "out", "launch 2", "collect 1", "out", "collect 2", "out"]
    after = ["launch 0", "collect 0", "out", "launch 1", "collect 1", "out", "launch 2", "collect 2", "out"]
    assert scripted.runner.log == (ahead if graphs else after)


def test_a_request_that_is_cancelled_before_its_planned_step_is_launched_is_not_in_it() -> None:
    scripted = Scripted(overlaps=True)
    scripted.runner.graphs = False
    scripted.submit("a", "b")
    assert [len(scripted.logged()) for _ in range(2)] == [0, 1]
    scripted.engine.release("a")
    assert [output.tokens for output in scripted.run()] == [[("b", 11)]]


def test_a_batch_of_texts_is_made_when_the_device_is_free_or_it_is_full() -> None:
    scripted = Scripted(overlaps=True)
    scripted.engine.scheduler = Batcher(EngineConfig(slots=2))
    for names in ("a", "b", "cd", ""):
        scripted.submit(*names)
        scripted.logged()
    # b came while a ran; c and d fill a batch, which is launched before the device is free
    assert " ".join(scripted.runner.log) == "launch 0 collect 0 launch 1 out launch 2 collect 1 out collect 2 out"


def test_the_time_of_a_step_begins_when_the_one_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1000, 1000)
    monkeypatch.setattr(engine_module, "now_ns", lambda: next(ticks))
    scripted = Scripted(overlaps=True)
    scripted.submit("a", max_tokens=3)
    *others, last = scripted.run()
    steps = [output.step for output in (*others, last) if output.step]
    assert [step.start_ns for step in steps] == [0, *(step.end_ns for step in steps[:-1])]
    timing = last.finished[0].timing
    assert (timing.prefill_ns, timing.decode_ns) == (steps[0].end_ns, steps[-1].end_ns - steps[0].end_ns)


def test_a_flush_returns_when_all_messages_are_in_the_pipe() -> None:
    front_end, engine_end = multiprocessing.Pipe()
    outbox = Outbox(engine_end)
    threading.Thread(target=outbox.send, daemon=True).start()
    for number in range(100):
        outbox.put(number)
    outbox.flush()
    received: list[int] = []
    while front_end.poll():
        received += front_end.recv()
    assert received == list(range(100))
    outbox.put("last")
    assert front_end.recv() == ["last"], "without a flush too"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_flush_to_a_front_that_does_not_read_ends_after_its_time(is_gone: bool) -> None:
    front_end, engine_end = multiprocessing.Pipe()
    outbox = Outbox(engine_end)
    if is_gone:
        front_end.close()
    threading.Thread(target=outbox.send, daemon=True).start()
    outbox.put("x" * (64 << 20))  # more than a pipe takes
    outbox.flush(0.05)


def test_the_items_of_a_start_leave_no_gap() -> None:
    items = itemised({"load": 40, "decode": 20}, started_ns=100, entered_ns=130, imported_ns=145, ready_ns=210)
    assert items == {"process": 30, "import": 15, "load": 40, "decode": 20, "other": 5}
    assert process_started_ns(1) < now_ns() <= process_started_ns(2**22 + 1), "a process that is gone starts now"


def test_no_garbage_is_collected_while_a_graph_is_recorded() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="broke"), uncollected():
        raise ValueError("the recording broke")
    assert gc.isenabled()


@pytest.mark.parametrize(("name", "gpus", "words"), [("cuda", 0, ("no GPU",)), ("cuda:2", 2, ("2 GPUs", "cuda:1"))])
def test_a_missing_device_is_refused(
    name: str, gpus: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    refusal(resolve_device, name, words=words)
    assert resolve_device("auto").type == ("cuda" if gpus else "cpu")
