"""The engine of a replica: what arrives, the next step, who gets which token, who waited for which compile.

Everything here belongs to the device thread, but for `Arrivals`, which a reader thread fills.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from servers.clock import now_ns
from servers.config import ArmConfig
from servers.messages import Cancel, CompileEvent, Finished, StepOutput, StepRecord, Submit, Timing
from servers.scheduler import Job, Move, QueueFullError, Scheduler
from servers.shapes import StepShape

log = logging.getLogger("tailgate.engine")

# Compile events during which requests stand still. A limit hit is the moment the compiler gave up; an eager fallback
# runs, only slower.
STALLING = frozenset({"compile", "recompile", "graph_capture", "autotune", "limit_hit"})


class Runner(Protocol):
    """What the engine needs of a model runner."""

    def step(self, kind: str, jobs: Sequence[Job], batch_id: int) -> tuple[list[int], StepShape, bool]:
        """Run one step; the sampled tokens, the shape that ran, whether compiled code ran it."""

    def move(self, move: Move) -> None:
        """Copy a cache row."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""


class Events(Protocol):
    """What the engine needs of the compile recorder."""

    def drain(self) -> list[CompileEvent]:
        """The events since the last call."""


class Engine:
    """Turns submissions into steps and steps into outputs. One call of `advance` is one engine step."""

    def __init__(self, arm: ArmConfig, runner: Runner, events: Events) -> None:
        self.runner = runner
        self.events = events
        self.scheduler = Scheduler(
            slots=arm.engine.slots, max_queue=arm.engine.max_queue, prefill_batch=arm.engine.prefill_batch
        )
        self.eos_ids: frozenset[int] = frozenset()
        self._step_id = 0
        self._stalls: deque[tuple[int, int]] = deque(maxlen=256)

    def submit(self, message: Submit) -> Finished | None:
        """Queue a request; an answer at once when it cannot be queued."""
        job = Job(
            request_id=message.request_id,
            prompt=message.prompt,
            max_tokens=message.max_tokens,
            recv_ns=message.recv_ns,
            deadline_ns=message.deadline_ns,
            stop_ids=message.stop_ids if message.ignore_eos else message.stop_ids | self.eos_ids,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            seed=message.seed,
        )
        for start_ns, end_ns in self._stalls:
            # it stood in the pipe while a compile, already over, held this process
            job.compile_stall_ns += max(0, end_ns - max(start_ns, job.recv_ns))
        try:
            self.scheduler.submit(job)
        except QueueFullError:
            return self._finished(job, "RESOURCE_EXHAUSTED", message="the queue is full")
        return None

    def cancel(self, request_id: str) -> None:
        """Free the slot of a request whose client has gone."""
        self._release(request_id)

    def expire(self, at_ns: int) -> list[Finished]:
        """End every request whose deadline has passed."""
        ended = []
        for job in self.scheduler.expired(at_ns):
            ended.append(self._finished(job, "DEADLINE_EXCEEDED", message="the deadline passed while generating"))
            self._release(job.request_id)
        return ended

    def advance(self, arrivals: Arrivals) -> tuple[StepOutput | None, list[CompileEvent]]:
        """Run the next step, if there is one, then take what arrived meanwhile; returns its output and compile events.

        A failing step fails its own requests and no others.
        """
        step = self.scheduler.next_step()
        if step is None:
            return None, []
        step_id, self._step_id = self._step_id, self._step_id + 1
        jobs = step.jobs
        start_ns = now_ns()
        try:
            tokens, shape, compiled = self.runner.step(step.kind, jobs, step_id)
        except Exception as error:
            log.exception("step %d (%s of %d) failed", step_id, step.kind, len(jobs))
            return self._fail(jobs, error), self._settle(jobs)
        end_ns = now_ns()
        if step.kind == "prefill":
            for job in jobs:
                job.admitted_ns, job.prefill_ns = start_ns, end_ns - start_ns
                job.batch_id, job.batch_size = step_id, len(jobs)
                job.padded_batch, job.padded_length = shape.batch, shape.length
        else:
            for job in jobs:
                job.decode_ns += end_ns - start_ns
        rejected = arrivals.take(self)
        events = self._settle(jobs)
        finished = rejected
        emitted = []
        for job, token in zip(jobs, tokens, strict=True):
            if self.scheduler.find(job.request_id) is not job:
                continue  # cancelled while the step ran
            emitted.append((job.request_id, token))
            outcome = self.scheduler.record(job, token)
            if outcome is not None:
                finished.append(self._finished(job, "OK", reason=outcome))
                self._release(job.request_id)
        real = sum(len(job.prompt) for job in jobs) if step.kind == "prefill" else len(jobs)
        record = StepRecord(
            step_id=step_id,
            kind=step.kind,
            start_ns=start_ns,
            end_ns=end_ns,
            batch=len(jobs),
            padded_batch=shape.batch,
            tokens=real,
            padded_tokens=shape.tokens,
            compiled=compiled,
        )
        return StepOutput(emit_ns=end_ns, tokens=emitted, finished=finished, step=record), events

    def _settle(self, batch: Sequence[Job]) -> list[CompileEvent]:
        """Charge the compile events of the last step to everyone who waited, and name them in the events."""
        settled = []
        for event in self.events.drain():
            waiting = [job for job in self.scheduler if job not in batch and job.recv_ns < event.end_ns]
            held = [*batch, *waiting]
            if event.kind in STALLING:
                self._stalls.append((event.start_ns, event.end_ns))
                for job in held:
                    # arrivals of this step were already charged for the stalls that submit() knew: not this one
                    job.compile_stall_ns += max(0, event.end_ns - max(event.start_ns, job.recv_ns))
            settled.append(replace(event, request_ids=tuple(job.request_id for job in held)))
        return settled

    def _fail(self, jobs: Sequence[Job], error: Exception) -> StepOutput:
        out_of_memory = type(error).__name__ == "OutOfMemoryError"
        status = "RESOURCE_EXHAUSTED" if out_of_memory else "INTERNAL"
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        finished = []
        for job in jobs:
            finished.append(self._finished(job, status, message=text))
            self._release(job.request_id)
        return StepOutput(emit_ns=now_ns(), finished=finished)

    def _release(self, request_id: str) -> None:
        move = self.scheduler.release(request_id)
        if move is not None:
            self.runner.move(move)
        self.runner.forget(request_id)

    @staticmethod
    def _finished(job: Job, status: str, *, reason: str = "", message: str = "") -> Finished:
        waited_until = job.admitted_ns or now_ns()
        timing = Timing(
            queue_ns=max(0, waited_until - job.recv_ns),
            prefill_ns=job.prefill_ns,
            decode_ns=job.decode_ns,
            compile_stall_ns=job.compile_stall_ns,
            batch_id=job.batch_id,
            batch_size=job.batch_size,
            padded_batch=job.padded_batch,
            padded_length=job.padded_length,
        )
        return Finished(request_id=job.request_id, status=status, reason=reason, message=message, timing=timing)


class Arrivals:
    """Messages from the front, in order, as a thread read them off the pipe."""

    def __init__(self) -> None:
        self._messages: deque[Submit | Cancel] = deque()
        self._something = threading.Event()
        self.closed = False

    def put(self, message: Submit | Cancel) -> None:
        """Add a message (called on the reader thread)."""
        self._messages.append(message)
        self._something.set()

    def close(self) -> None:
        """Say that no more messages will come."""
        self.closed = True
        self._something.set()

    def take(self, engine: Engine) -> list[Finished]:
        """Hand everything that has arrived to `engine`; answers for the requests it could not take."""
        rejected = []
        self._something.clear()
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, Cancel):
                engine.cancel(message.request_id)
            elif (answer := engine.submit(message)) is not None:
                rejected.append(answer)
        return rejected

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, at most `timeout_s`."""
        self._something.wait(timeout_s)
