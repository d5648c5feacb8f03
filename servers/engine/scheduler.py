"""Which requests the next engine step takes. No tensors and no clock of its own.

Rows stay dense: the active requests always hold rows 0 … n-1, so that a decode step is a plain slice of the cache. When
a request leaves, the last row moves into its place. A step is planned before the tokens of the step before it are
known: a job counts what was launched for it separately from the output that has come back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from tailgate.servers.config import MOST_PROMPTS, ArmConfig, EngineConfig
from tailgate.servers.engine.messages import Submit, Timing
from tailgate.servers.engine.shapes import Kind, StepShape


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Submit):
    """One request inside the engine, and how far it is."""

    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer
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
    """What to run next: parts of prompts after one token for every job that can decode (prefill), these tokens alone
    (decode), or whole texts (encode)."""

    kind: Kind
    decoding: tuple[Job, ...] = ()
    prompts: tuple[Job, ...] = ()  # or texts
    chunks: tuple[tuple[int, int], ...] = ()  # (start, stop) in each prompt

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.decoding + self.prompts

    @property
    def decoding_rows(self) -> int:
        """The first cache rows, as far as one decodes."""
        return max((job.row + 1 for job in self.decoding), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight on the device."""

    step: Step
    answers: tuple[bool, ...]  # whether the job gets a token: not for a chunk with more of the prompt to come
    shape: StepShape
    real_tokens: int  # computed for jobs, without padding
    batch_id: int
    start_ns: int
    compiled: bool


@dataclass(frozen=True, slots=True)
class Move:
    """The first `positions` of cache row `source` must be copied to row `target`."""

    source: int
    target: int
    positions: int = 0


class _Held:
    """The jobs that a scheduler holds, waiting or running, by id."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def expired(self, now_ns: int) -> list[Job]:
        """Return the jobs whose deadline has passed; they stay until released."""
        return [job for job in self._jobs.values() if job.deadline_ns and job.deadline_ns <= now_ns]

    def find(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)


class Scheduler(_Held):
    """Queue, rows and the next step. Every step carries one token of every running answer; prompts take what is left of
    `engine.longest_step`, begun ones first."""

    plans_ahead = True  # the next step is launched while the last one runs

    def __init__(self, limits: EngineConfig) -> None:
        super().__init__()
        self._limits = limits
        self._queue: deque[Job] = deque()
        self._active: list[Job] = []

    def submit(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        self._queue.append(job)

    def next_step(self, at_ns: int = 0) -> Step | None:
        """Plan the next step and count it as launched, or None. Admits queued jobs into rows."""
        decoding = tuple(job for job in self._active if job.can_decode)
        for job in decoding:
            job.launched += 1
        step = Step("decode", decoding)
        prompts, chunks = self._prompts(self._limits.longest_step - step.decoding_rows)
        if prompts:
            return Step("prefill", decoding, tuple(prompts), tuple(chunks))
        return step if decoding else None

    def _prompts(self, room: int) -> tuple[list[Job], list[tuple[int, int]]]:
        """Return the prompts to go on with or to begin, and their parts: `room` tokens together at most."""
        prompts: list[Job] = []
        chunks: list[tuple[int, int]] = []
        begun = [job for job in self._active if job.prefilled < len(job.prompt)]
        while room > 0 and len(prompts) < MOST_PROMPTS:
            if len(prompts) < len(begun):
                job = begun[len(prompts)]
            elif self._queue and len(self._active) < self._limits.slots:
                job = self._queue.popleft()
                job.row = len(self._active)
                self._active.append(job)
            else:
                break
            start, job.prefilled = job.prefilled, min(len(job.prompt), job.prefilled + room)
            job.launched += job.prefilled == len(job.prompt)  # the last part answers the first token
            prompts.append(job)
            chunks.append((start, job.prefilled))
            room -= job.prefilled - start
        return prompts, chunks

    def rest_ns(self, at_ns: int) -> int | None:
        """Return 0 while there is something to do, else None: no step waits for a moment."""
        return 0 if self._jobs else None

    def record(self, job: Job, token: int) -> Outcome | None:
        """Add a sampled token to `job`; returns why the job is over, or None while it goes on."""
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


class Batcher(_Held):
    """Texts that wait (row -1), texts that run, and when the next batch leaves: when it has `slots` texts, or once the
    device is free and `max_wait_ms` after its oldest text arrived. Later texts never overtake earlier ones."""

    def __init__(self, limits: EngineConfig) -> None:
        super().__init__()
        self._most = limits.slots
        self._wait_ns = int(limits.max_wait_ms * 1e6)
        self._waiting: OrderedDict[str, Job] = OrderedDict()

    def submit(self, job: Job) -> None:
        self._jobs[job.request_id] = self._waiting[job.request_id] = job

    @property
    def plans_ahead(self) -> bool:
        """Whether the next batch may leave before the one on the device is done: only when no later text would fit."""
        return len(self._waiting) >= self._most

    def next_step(self, at_ns: int) -> Step | None:
        """Return the batch that leaves at `at_ns`; None when there is none, or one that is still to fill up."""
        if self.rest_ns(at_ns) != 0:
            return None
        jobs = tuple(islice(self._waiting.values(), self._most))
        for row, job in enumerate(jobs):
            del self._waiting[job.request_id]
            job.row, job.prefilled, job.launched = row, len(job.prompt), 1
        return Step("encode", prompts=jobs, chunks=tuple((0, len(job.prompt)) for job in jobs))

    def rest_ns(self, at_ns: int) -> int | None:
        """Return how long until the next batch leaves if nothing else comes: 0 when it is due, None without texts."""
        if not self._waiting:
            return None
        if self.plans_ahead:
            return 0
        oldest = next(iter(self._waiting.values()))
        return max(0, oldest.recv_ns + self._wait_ns - at_ns)

    def record(self, job: Job, result: object) -> Outcome:
        return "embedded"

    def release(self, request_id: str) -> None:
        """Forget a finished or cancelled text. One that runs is computed to the end, and its result is dropped."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.row = -1
            self._waiting.pop(request_id, None)


def scheduler_for(arm: ArmConfig) -> Scheduler | Batcher:
    """Return an empty scheduler for the arm's task."""
    return Batcher(arm.engine) if arm.model.embeds else Scheduler(arm.engine)
