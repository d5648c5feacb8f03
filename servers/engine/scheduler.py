"""Iteration-level batching: a queue, rows, deadlines, cancellation. No tensors and no clock of its own.

How many requests may wait is decided where they are admitted (servers/front/front.py). The scheduler decides what the
next engine step is; the runner executes it. Rows stay dense: the active requests
always hold rows 0 … n-1, so that a decode step is a plain slice of the cache. When a request leaves, the last row
moves into its place.

A step is planned before the tokens of the step before it are known: a job counts what was launched for it apart from
the output that has come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from servers.config import EngineConfig
from servers.engine.messages import Submit, Timing
from servers.engine.shapes import Kind, StepShape


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Submit):
    """One request inside the engine, and how far it is."""

    row: int = -1  # -1 while queued
    prefilled: int = 0  # prompt tokens whose prefill was launched
    launched: int = 0  # output tokens whose step was launched: those in `output`, then those still on the device
    output: list[int] = field(default_factory=list)
    admitted_ns: int = 0
    timing: Timing = field(default_factory=Timing)

    # Requests may be equal; a job is one of them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def context(self) -> int:
        """Positions held in the cache once the newest sampled token is written."""
        return len(self.prompt) + self.launched

    @property
    def can_decode(self) -> bool:
        """Whether the prompt is in the cache and tokens are still wanted."""
        return self.prefilled == len(self.prompt) and self.launched < self.max_tokens


Outcome = Literal["length", "stop", "embedded"]


@dataclass(frozen=True, slots=True)
class Step:
    """What to run next: beginnings of prompts (prefill), later chunks of prompts (extend), one token for every job that
    can decode, in row order, or whole texts (encode)."""

    kind: Kind
    jobs: tuple[Job, ...]
    chunks: tuple[tuple[int, int], ...] = ()  # (start, stop) in each job's prompt; empty for decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step on its way through the device. What its tokens are a runner knows by the class that it makes of this."""

    step: Step
    answers: tuple[bool, ...]  # whether the job gets a token: not for a chunk with more of the prompt to come
    shape: StepShape
    real_tokens: int  # computed for jobs, padding apart
    batch_id: int
    start_ns: int
    compiled: bool


@dataclass(frozen=True, slots=True)
class Move:
    """The first `positions` of cache row `source` must be copied to `target`: their request has moved there."""

    source: int
    target: int
    positions: int = 0


class Scheduler:
    """Queue, rows and the order of steps.

    While prompts wait, one prefill step and `decode_per_prefill` decode steps alternate, so a running request waits for
    one prefill step at most between two of its tokens; `prefill_chunk` bounds how long that step is (0: whole prompts).
    """

    def __init__(self, limits: EngineConfig) -> None:
        self._limits = limits
        self._queue: deque[Job] = deque()
        self._active: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._decodes_due = 0

    def submit(self, job: Job) -> None:
        """Queue `job`."""
        self._jobs[job.request_id] = job
        self._queue.append(job)

    def next_step(self, at_ns: int = 0) -> Step | None:
        """The next step, counted as launched, or None when there is nothing to do. Admits queued jobs into rows. The
        time does not matter."""
        decodable = tuple(job for job in self._active if job.can_decode)
        if not (decodable and self._decodes_due > 0):
            prefill = self._next_prefill()
            if prefill is not None:
                self._decodes_due = self._limits.decode_per_prefill
                return prefill
        self._decodes_due -= 1
        for job in decodable:
            job.launched += 1
        return Step("decode", decodable) if decodable else None

    def _next_prefill(self) -> Step | None:
        """Later chunks of prompts already begun come first, so that a prompt is finished before another begins."""
        begun = [job for job in self._active if job.prefilled < len(job.prompt)][: self._limits.prefill_batch]
        if begun:
            return self._chunks("extend", begun)
        room = self._room()
        if room <= 0:
            return None
        admitted = [self._queue.popleft() for _ in range(room)]
        for job in admitted:
            job.row = len(self._active)
            self._active.append(job)
        return self._chunks("prefill", admitted)

    def _room(self) -> int:
        """How many waiting requests begin next."""
        return min(self._limits.slots - len(self._active), self._limits.prefill_batch, len(self._queue))

    def _chunks(self, kind: Kind, jobs: list[Job]) -> Step:
        chunks = []
        for job in jobs:
            start, rest = job.prefilled, len(job.prompt) - job.prefilled
            job.prefilled = start + (min(rest, self._limits.prefill_chunk or rest))
            job.launched += job.prefilled == len(job.prompt)  # the last chunk answers the first token
            chunks.append((start, job.prefilled))
        return Step(kind, tuple(jobs), tuple(chunks))

    def rest_ns(self, at_ns: int) -> int | None:
        """0 while there is something to do, else None: no step waits for a moment."""
        return 0 if self._jobs else None

    def record(self, job: Job, token: int) -> Outcome | None:
        """Add a sampled token to `job`; says why the job is over, or None while it goes on."""
        job.output.append(token)
        if token in job.stop_ids:
            return "stop"
        return "length" if len(job.output) >= job.max_tokens else None

    def release(self, request_id: str) -> Move | None:
        """Forget a finished or cancelled job and free its row; the returned move, if any, must be carried out."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        if job.row < 0:
            self._queue.remove(job)
            return None
        last = self._active.pop()
        hole, job.row = job.row, -1
        if last is job:
            return None
        move = Move(source=last.row, target=hole, positions=last.prefilled + last.launched)
        last.row = hole
        self._active[hole] = last
        return move

    def expired(self, now_ns: int) -> list[Job]:
        """Jobs, queued or active, whose deadline has passed; they stay until released."""
        return [job for job in self._jobs.values() if job.deadline_ns and job.deadline_ns <= now_ns]

    def find(self, request_id: str) -> Job | None:
        """The job with that id, if the scheduler still holds it."""
        return self._jobs.get(request_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
