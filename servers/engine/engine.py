"""The engine of a replica: the loop over its steps, and which request gets which token, vector or compile stall.

Everything here belongs to the device thread; other threads fill `Engine.arrivals`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import named
from tailgate.servers.config import STALLING_KINDS
from tailgate.servers.engine.messages import Cancel, Finished, Shutdown, StepOutput, Submit
from tailgate.servers.engine.scheduler import Batcher, Job, LaunchedStep, Move, Scheduler, Step
from tailgate.servers.engine.shapes import Kind
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, StepRecord

log = logging.getLogger("tailgate.engine")

Arrivals = queue.SimpleQueue[Submit | Cancel | Shutdown]

# How the requests of a step end whose shape no graph fits, at an arm that compiles nothing while serving.
REFUSED = "FAILED_PRECONDITION"

_LONGEST_REST_S = 0.5
_LONGEST_WAIT_S = 0.02  # while texts wait for a fuller batch: a deadline may pass


class Runner(Protocol):
    """What the engine needs of a model runner."""

    overlaps: bool  # whether recorded graphs launch steps as a whole, while the device works on the last one
    eos_ids: frozenset[int]  # tokens that end an answer

    def has_graph(self, step: Step) -> bool: ...
    def launch(self, step: Step, batch_id: int) -> LaunchedStep: ...
    def collect(self, launched: Any) -> Sequence[Any]: ...
    def move(self, move: Move) -> None: ...


class Engine:
    """Turns submissions into steps and steps into outputs.

    A step that a recorded graph launches is launched before the tokens of the last one are handed out: what it computes
    for an answer that they end is dropped. Any other launch takes milliseconds, or a compile: finished tokens leave
    before it. `drain_events` gives the compile events since its last call.
    """

    def __init__(
        self,
        scheduler: Scheduler | Batcher,
        runner: Runner,
        drain_events: Callable[[], list[CompileEvent]],
        arrivals: Arrivals | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.arrivals: Arrivals = queue.SimpleQueue() if arrivals is None else arrivals
        self._is_closed = False
        self._drain_events = drain_events
        self._step_id = 0
        self._pending: LaunchedStep | None = None
        self._planned: Step | None = None
        self._last_end_ns = 0
        self._stalls: deque[tuple[int, int]] = deque(maxlen=256)

    @property
    def idle(self) -> bool:
        return self._pending is None and len(self.scheduler) == 0

    @property
    def has_planned(self) -> bool:
        """Whether a step waits until the results before it are out, since its launch may compile."""
        return self._planned is not None

    def turns(self) -> Iterator[list[StepOutput | CompileEvent]]:
        """Step until a Shutdown arrives. Each turn yields what it produced; without work it waits for arrivals."""
        rest_s = 0.0
        while self._take_arrivals(rest_s):
            outputs, events = self.advance()
            yield [*events, *outputs]
            rest_s = 0.0
            if self._pending is None and not self.has_planned:
                rest_ns = self.scheduler.rest_ns(now_ns())
                longest_s = _LONGEST_REST_S if self.idle else _LONGEST_WAIT_S
                rest_s = longest_s if rest_ns is None else min(rest_ns / 1e9, longest_s)

    def _take_arrivals(self, wait_s: float = 0.0) -> bool:
        """Take what has arrived, or arrives within `wait_s`; returns whether more is to come."""
        with contextlib.suppress(queue.Empty):
            message = self.arrivals.get(wait_s > 0 and not self._is_closed, wait_s)
            while True:
                if isinstance(message, Submit):
                    self.submit(message)
                elif isinstance(message, Cancel):
                    self.release(message.request_id)
                else:
                    self._is_closed = True
                message = self.arrivals.get_nowait()
        return not self._is_closed

    def submit(self, message: Submit) -> None:
        job = Job(**vars(message))
        if not job.ignore_eos:
            job.stop_ids = self.runner.eos_ids
        for start_ns, end_ns in self._stalls:
            # it waited in the pipe while a compile, already over, held this process
            job.timing.compile_stall_ns += max(0, end_ns - max(start_ns, job.recv_ns))
        self.scheduler.submit(job)

    def release(self, request_id: str) -> None:
        """Free the slot of a request that is over, or whose client has gone."""
        move = self.scheduler.release(request_id)
        if move is not None:
            self.runner.move(move)

    def expire(self, at_ns: int) -> list[Finished]:
        """End every request whose deadline has passed."""
        message = "the deadline passed before the answer was whole"
        return [self._end(job, "DEADLINE_EXCEEDED", message=message) for job in self.scheduler.expired(at_ns)]

    def advance(self) -> tuple[list[StepOutput], list[CompileEvent]]:
        """Launch the next step, if there is one, take what arrived meanwhile, and hand out what is done.

        A batch of texts is made when the device is free, unless it is full. What is done is handed out alone where no
        graph launches the step, and the next call launches. Returns outputs, oldest first, and compile events. A step
        that cannot be launched fails its prompts, or without any its answers; one whose results do not come fails all
        its requests.
        """
        pending, self._pending = self._pending, None
        outputs = []
        if pending is not None and not self.scheduler.plans_ahead:
            outputs.append(self._hand_out(pending))
            pending = None
            self._take_arrivals()
        if ended := self.expire(now_ns()):
            outputs.append(StepOutput(emit_ns=now_ns(), finished=ended))
        step = _unfinished(self._planned) or self.scheduler.next_step(now_ns())
        self._planned = None
        if (outputs or pending is not None) and (step is None or not self.runner.has_graph(step)):
            if pending is not None:
                outputs.append(self._hand_out(pending))
            self._planned = step
            return outputs, self._settle(())
        if step is None:
            return [], self._settle(())  # a compile on another thread may have ended
        step_id, self._step_id = self._step_id, self._step_id + 1
        launched = self._launch(step, step_id)
        self._take_arrivals()
        events = self._settle(step.jobs)
        if pending is not None:
            outputs.append(self._hand_out(pending))
        if isinstance(launched, Exception):
            blamed = step
            if step.prompts:  # answers that ran without them go on: the next step computes the same tokens again
                blamed = replace(step, decoding=())
                for job in step.decoding:
                    job.launched -= 1
            outputs.append(self._fail(blamed, step_id, launched))
        elif self.runner.overlaps:
            self._pending = launched
        else:
            outputs.append(self._hand_out(launched))
        return outputs, events

    def _launch(self, step: Step, step_id: int) -> LaunchedStep | Exception:
        try:
            launched = self.runner.launch(step, step_id)
        except Exception as error:
            return error
        for job, (start, _) in zip(step.prompts, step.chunks, strict=True):
            if start == 0:
                job.admitted_ns = launched.start_ns
                job.timing.batch_id, job.timing.batch_size = step_id, len(step.jobs)
                job.timing.padded_batch, job.timing.padded_length = launched.shape.batch, launched.shape.length
        return launched

    def _hand_out(self, launched: LaunchedStep) -> StepOutput:
        """Return the tokens or vectors of a step, and the requests that they finish."""
        kind, jobs = launched.step.kind, launched.step.jobs
        try:
            results = self.runner.collect(launched)
        except Exception as error:
            return self._fail(launched.step, launched.batch_id, error)
        end_ns = now_ns()
        # this step waited while the one before it was running
        start_ns = max(launched.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        for job in launched.step.decoding:
            job.timing.decode_ns += end_ns - start_ns
        for job in launched.step.prompts:
            job.timing.prefill_ns += end_ns - start_ns
        finished, emitted = [], []
        for job, result, answers in zip(jobs, results, launched.answers, strict=True):
            if not answers or self.scheduler.find(job.request_id) is not job:
                continue  # more of its prompt to come, or cancelled or ended while the step ran
            outcome = self.scheduler.record(job, result)
            if outcome != "embedded":
                emitted.append((job.request_id, result))
                if outcome is not None:
                    finished.append(self._end(job, "OK", reason=outcome))
            elif result:
                finished.append(self._end(job, "OK", reason=outcome, vector=result))
            else:
                message = "the model's vector of this text is zero or no number"
                finished.append(self._end(job, "INTERNAL", reason=outcome, message=message))
        record = StepRecord(
            step_id=launched.batch_id,
            kind=kind,
            start_ns=start_ns,
            end_ns=end_ns,
            batch=len(jobs),
            padded_batch=launched.shape.batch,
            tokens=launched.real_tokens,
            padded_tokens=launched.shape.tokens,
            compiled=launched.compiled,
        )
        return StepOutput(emit_ns=end_ns, tokens=emitted, finished=finished, step=record)

    def _settle(self, batch: Sequence[Job]) -> list[CompileEvent]:
        """Charge the compile events of the last step to every request that waited, and name these in the events."""
        events = self._drain_events()
        stalls = _merged_spans((event.start_ns, event.end_ns) for event in events if event.kind in STALLING_KINDS)
        for start_ns, end_ns in stalls:
            self._stalls.append((start_ns, end_ns))
            for job in self._held(batch, end_ns):
                # arrivals of this step were already charged for the stalls that submit() knew: not this one
                job.timing.compile_stall_ns += max(0, end_ns - max(start_ns, job.recv_ns))
        for event in events:
            event.request_ids.extend(job.name for job in self._held(batch, event.end_ns))
        return events

    def _held(self, batch: Sequence[Job], end_ns: int) -> list[Job]:
        """Return the batch and the requests that waited for it before `end_ns`."""
        return [*batch, *(job for job in self.scheduler if job not in batch and job.recv_ns < end_ns)]

    def _fail(self, step: Step, step_id: int, error: Exception) -> StepOutput:
        """Finish the requests of a failed step. Raises the error if the device is lost: no later step would run."""
        kind = type(error).__name__
        if kind == "UnforeseenShapeError":  # as asked for, and no fault
            log.warning("step %d (%s of %d) is refused: %s", step_id, step.kind, len(step.jobs), error)
        else:
            log.error("step %d (%s of %d) failed", step_id, step.kind, len(step.jobs), exc_info=error)
        if kind == "AcceleratorError":
            raise error
        statuses = {"OutOfMemoryError": "RESOURCE_EXHAUSTED", "UnforeseenShapeError": REFUSED}
        status = statuses.get(kind, "INTERNAL")
        held = [job for job in step.jobs if self.scheduler.find(job.request_id) is job]  # not cancelled or ended
        finished = [self._end(job, status, message=named(error)) for job in held]
        return StepOutput(emit_ns=now_ns(), finished=finished)

    def _end(self, job: Job, status: str, **result: Any) -> Finished:
        self.release(job.request_id)
        # a copy: a step that still holds the job may add to its own
        timing = replace(job.timing, queue_ns=max(0, (job.admitted_ns or now_ns()) - job.recv_ns))
        return Finished(request_id=job.request_id, status=status, timing=timing, **result)


def _merged_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping spans, so that no request counts a wait twice."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if united and start < united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def _unfinished(step: Step | None) -> Step | None:
    """Return `step` without the requests that finished since it was planned; None if no request is left."""
    if step is None:
        return None
    decoding = tuple(job for job in step.decoding if job.row >= 0)
    held = [index for index, job in enumerate(step.prompts) if job.row >= 0]
    prompts = tuple(step.prompts[index] for index in held)
    chunks = tuple(step.chunks[index] for index in held)
    kind: Kind = "decode" if step.kind == "prefill" and not prompts else step.kind
    return Step(kind, decoding, prompts, chunks) if decoding or prompts else None
