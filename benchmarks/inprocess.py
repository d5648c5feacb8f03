"""An arm in this process, without the wire: requests in, steady decode and prefill out.

Importing this file imports no torch, so that the compiler's cache directory can still be chosen.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servers.clock import now_ns
from servers.compiler.events import CompileEvent
from servers.config import ArmConfig
from servers.engine.engine import Engine, serve
from servers.engine.messages import StepOutput, Submit
from servers.engine.scheduler import Scheduler


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


class InProcess:
    """A warm arm in this process. Every method belongs to the thread that called `load`."""

    def __init__(self, arm: ArmConfig, runner: Any, recorder: Any) -> None:
        self.arm = arm
        self.runner = runner
        self.recorder = recorder

    @classmethod
    def load(cls, arm: ArmConfig, note: Callable[[str], None]) -> InProcess:
        """The arm's model is loaded and every planned shape is warm."""
        from servers.compiler.recorder import CompileRecorder
        from servers.engine.runner import ModelRunner

        recorder = CompileRecorder()
        recorder.install()
        try:
            runner = ModelRunner(arm, recorder)
            runner.load()
            runner.warm_up(lambda done, total, detail: note(f"{arm.name}: warm-up {done} of {total}: {detail}"))
        except BaseException:
            recorder.remove()
            raise
        recorder.drain()
        gc.collect()
        gc.freeze()  # as the device loop does
        return cls(arm, runner, recorder)

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        return int(self.runner.vocab_size)

    def close(self) -> None:
        """Remove the recorder's taps from the compiler."""
        self.recorder.remove()
        gc.unfreeze()

    def decode(self, prompts: Sequence[list[int]], new_tokens: int) -> SteadyDecode:
        """Measure decode of `prompts` together, `new_tokens` each."""
        _, outputs = self._serve(prompts, new_tokens)
        lengths = {str(number): len(prompt) for number, prompt in enumerate(prompts)}
        return steady_decode(outputs, lengths, len(prompts))

    def prefill_tokens_per_s(self, prompts: Sequence[list[int]]) -> float:
        """Measure prompt tokens per second from the arrival of all `prompts` to the last first token."""
        start_ns, outputs = self._serve(prompts, 1)
        last_ns = max(output.emit_ns for output in outputs if output.tokens)
        return sum(map(len, prompts)) / ((last_ns - start_ns) / 1e9)

    def _serve(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[int, list[StepOutput]]:
        """(start, outputs) of `prompts` at once. Raises MeasurementError for a failed request or a compile event."""
        engine = Engine(Scheduler(self.arm.engine), self.runner, self.recorder.drain)
        outputs: list[StepOutput] = []
        self.recorder.drain()
        events: list[CompileEvent] = []
        start_ns = now_ns()
        requests = [
            Submit(request_id=str(number), prompt=prompt, max_tokens=new_tokens, recv_ns=start_ns, ignore_eos=True)
            for number, prompt in enumerate(prompts)
        ]
        for message in serve(engine, requests):
            if isinstance(message, StepOutput):
                outputs.append(message)
            else:
                events.append(message)
        events += self.recorder.drain()
        ended = Counter(finished.status for output in outputs for finished in output.finished)
        if ended != {"OK": len(prompts)}:
            raise MeasurementError(f"of {len(prompts)} requests, {dict(ended)}")
        if events:
            kinds = dict(Counter(event.kind for event in events))
            raise MeasurementError(f"the compiler worked after the warm-up: {kinds}")
        return start_ns, outputs


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
