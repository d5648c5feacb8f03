"""Steady decode and prefill of a warm arm in this process, without the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servers.engine.in_process import Answers, ask, requests_of
from servers.engine.messages import StepOutput
from servers.engine.runner import ModelRunner


class MeasurementError(RuntimeError):
    """A measurement cannot be trusted; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyDecode:
    """Decode while every row was busy: `steps` steps of `batch` rows in `seconds`, attending to `positions` each."""

    batch: int
    steps: int
    seconds: float
    step_ms: float  # the median step
    positions: float  # cache positions read by a step, summed over its rows; mean over the steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the steady steps."""
        return self.batch * self.steps / self.seconds


def decode(runner: ModelRunner, prompts: Sequence[list[int]], new_tokens: int) -> SteadyDecode:
    """Measure decode of `prompts` together, `new_tokens` each."""
    _, answers = _answered(runner, prompts, new_tokens)
    lengths = {str(number): len(prompt) for number, prompt in enumerate(prompts)}
    return steady_decode(answers.outputs, lengths, len(prompts))


def prefill_tokens_per_s(runner: ModelRunner, prompts: Sequence[list[int]]) -> float:
    """Measure prompt tokens per second from the arrival of all `prompts` to the last first token."""
    start_ns, answers = _answered(runner, prompts, 1)
    last_ns = max(output.emit_ns for output in answers.outputs if output.tokens)
    return sum(map(len, prompts)) / ((last_ns - start_ns) / 1e9)


def _answered(runner: ModelRunner, prompts: Sequence[list[int]], new_tokens: int) -> tuple[int, Answers]:
    """(start, answers) of `prompts` at once. Raises MeasurementError for a compile event."""
    runner.recorder.drain()
    requests = requests_of(prompts, [new_tokens] * len(prompts))
    answers = ask(runner, requests)
    if events := [*answers.events, *runner.recorder.drain()]:
        kinds = dict(Counter(event.kind for event in events))
        raise MeasurementError(f"the compiler worked after the warm-up: {kinds}")
    return requests[0].recv_ns, answers


def steady_decode(outputs: Sequence[StepOutput], prompt_tokens: dict[str, int], batch: int) -> SteadyDecode:
    """Measure the decode steps with `batch` rows that followed on another such step, from emission to emission.

    prompt_tokens: prompt length by request id. A step that waited behind a prefill, or that follows on a step with
    fewer or more rows, does not count. Raises MeasurementError when there is none.
    """
    emitted: Counter[str] = Counter()
    durations: list[int] = []
    positions: list[int] = []
    last_ns: int | None = None  # when the step before was emitted, if that was a full decode step
    for output in outputs:
        full = output.step is not None and output.step.kind == "decode" and output.step.batch == batch
        full = full and len(output.tokens) == batch
        if full and last_ns is not None:
            durations.append(output.emit_ns - last_ns)
            positions.append(sum(prompt_tokens[name] + emitted[name] for name, _ in output.tokens))
        if output.step is not None:
            last_ns = output.emit_ns if full else None
        emitted.update(name for name, _ in output.tokens)
    if not durations:
        raise MeasurementError(f"no decode step had {batch} rows twice in a row: ask for more new tokens")
    return SteadyDecode(
        batch=batch,
        steps=len(durations),
        seconds=sum(durations) / 1e9,
        step_ms=float(np.median(durations)) / 1e6,
        positions=float(np.mean(positions)),
    )
