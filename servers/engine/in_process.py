"""An arm in this process, without the wire: loaded and warmed as it is served, and asked as its engine is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tailgate.servers.clock import now_ns
from tailgate.servers.compiler.policy import UnforeseenShapeError
from tailgate.servers.compiler.recorder import Compile, CompileRecorder
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.encoder import EncoderRunner
from tailgate.servers.engine.engine import REFUSED, Engine
from tailgate.servers.engine.messages import Finished, StepOutput, Submit
from tailgate.servers.engine.runner import ModelRunner, runner_for
from tailgate.servers.engine.scheduler import scheduler_for
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent


@contextmanager
def warm_runner(
    arm: ArmConfig, report: Callable[[int, int, str], None], show: Callable[[Compile], object] = lambda compile: None
) -> Iterator[ModelRunner | EncoderRunner]:
    """Load the arm and warm every planned shape. Its recorder listens until the block ends, and shows each compile;
    `report` as for `warm_up`."""
    recorder = CompileRecorder(show=show)
    recorder.install()
    try:
        runner = runner_for(arm, recorder)
        runner.load()
        runner.warm_up(report)
        yield runner
    finally:
        recorder.remove()


def requests_of(prompts: Sequence[Sequence[int]], counts: Sequence[int], *, first: int = 0) -> list[Submit]:
    """Return requests that arrive now and never stop early, for `counts` tokens each, numbered from `first`."""
    at_ns = now_ns()
    return [
        Submit(request_id=str(number), prompt=list(prompt), max_tokens=count, recv_ns=at_ns, ignore_eos=True)
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True), first)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The tokens of each request and how it ended, by request id; and all that the engine produced, in order."""

    tokens: dict[str, list[int]]
    ended: dict[str, Finished]
    outputs: list[StepOutput]
    events: list[CompileEvent]


def ask(runner: ModelRunner | EncoderRunner, requests: Sequence[Submit], *, slots: int = 0) -> Answers:
    """Answer `requests`, and nothing else, by the engine that serves.

    All come at once; with `slots`, one every other turn while fewer than that many are held. Raises RuntimeError when a
    request fails or loses tokens; UnforeseenShapeError, once all were asked, when a strict arm refuses any.
    """
    arm = runner.arm.replace(engine=runner.arm.engine.replace(max_wait_ms=0.0))
    engine, waiting = Engine(scheduler_for(arm), runner, runner.recorder.drain), deque(requests)
    outputs: list[StepOutput] = []
    events: list[CompileEvent] = []
    while waiting and not slots:
        engine.arrivals.put(waiting.popleft())
    turn = 0
    for messages in engine.turns():
        for message in messages:
            if isinstance(message, StepOutput):
                outputs.append(message)
            else:
                events.append(message)
        if waiting and (turn % 2 == 0 or engine.idle) and len(engine.scheduler) < slots:
            engine.arrivals.put(waiting.popleft())
        elif engine.idle and not waiting:
            break
        turn += not engine.has_planned  # hand-out and launch are one turn
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for name, token in (pair for output in outputs for pair in output.tokens):
        tokens[name].append(token)
    ended = {finished.request_id: finished for output in outputs for finished in output.finished}
    answers = Answers(tokens=tokens, ended=ended, outputs=outputs, events=events)
    _check(requests, answers)
    return answers


def _check(requests: Sequence[Submit], answers: Answers) -> None:
    refused = [request for request in requests if answers.ended[request.request_id].status == REFUSED]
    if refused:
        name, length = refused[0].request_id, len(refused[0].prompt)
        raise UnforeseenShapeError(
            f"{len(refused)} of {len(requests)} requests are refused, first request {name} (prompt of {length} "
            f"tokens): {answers.ended[name].message}"
        )
    for request in requests:
        name, wanted = request.request_id, request.max_tokens
        ended, came = answers.ended[name], len(answers.tokens[name])
        # a vector without a direction is an answer, and no fault of the engine
        if ended.status != "OK" and ended.reason != "embedded":
            raise RuntimeError(f"request {name} ended {ended.status}: {ended.message}")
        if came != wanted:
            raise RuntimeError(f"the engine answered request {name} with {came} tokens instead of {wanted}")
