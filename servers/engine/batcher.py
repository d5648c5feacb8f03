"""Dynamic batching of whole texts: a queue, a largest batch and a longest wait. No tensors and no clock of its own.

How many requests may wait is decided where they are admitted (servers/front/front.py). A batch leaves when it is full,
or when its oldest text has waited long enough for company; later texts never overtake earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from servers.config import EngineConfig
from servers.engine.scheduler import Job, Outcome, Step


class Batcher:
    """Texts that wait, texts that run, and when the next batch leaves.

    A batch takes `slots` texts at most and waits `max_wait_ms` at most, counted from when its oldest text arrived at
    the server. Texts that run have a row, those that wait have none (-1).
    """

    def __init__(self, limits: EngineConfig) -> None:
        self._most = limits.slots
        self._wait_ns = int(limits.max_wait_ms * 1e6)
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._jobs: dict[str, Job] = {}

    def submit(self, job: Job) -> None:
        """Queue `job`."""
        self._jobs[job.request_id] = self._waiting[job.request_id] = job

    def next_step(self, at_ns: int) -> Step | None:
        """The batch that leaves at `at_ns`, or None when there is none, or one that still waits for company."""
        if self.rest_ns(at_ns) != 0:
            return None
        jobs = tuple(islice(self._waiting.values(), self._most))
        for row, job in enumerate(jobs):
            del self._waiting[job.request_id]
            job.row, job.prefilled, job.launched = row, len(job.prompt), 1
        return Step("encode", jobs, tuple((0, len(job.prompt)) for job in jobs))

    def rest_ns(self, at_ns: int) -> int | None:
        """How long until the next batch leaves, if nothing else comes: 0 when it is due, None when no text waits."""
        if not self._waiting:
            return None
        if len(self._waiting) >= self._most:
            return 0
        oldest = next(iter(self._waiting.values()))
        return max(0, oldest.recv_ns + self._wait_ns - at_ns)

    def record(self, job: Job, result: object) -> Outcome:
        """A text is done as soon as it has run."""
        return "embedded"

    def release(self, request_id: str) -> None:
        """Forget a finished or cancelled text. One that runs is computed to the end, and nobody is given the result."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.row = -1
            self._waiting.pop(request_id, None)

    def expired(self, now_ns: int) -> list[Job]:
        """Texts, waiting or running, whose deadline has passed; they stay until released."""
        return [job for job in self._jobs.values() if job.deadline_ns and job.deadline_ns <= now_ns]

    def find(self, request_id: str) -> Job | None:
        """The text with that id, if it is still held."""
        return self._jobs.get(request_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
