"""This process's part in the load: its generator, its recorder, and the way to Locust's statistics."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any, Self

from locust.env import Environment

from tailgate.loadtests.generator.clock_offsets import ClockComparison
from tailgate.loadtests.generator.generator import Generator
from tailgate.loadtests.generator.load_log import LoadLog
from tailgate.loadtests.generator.record import RequestRecord
from tailgate.loadtests.generator.recorder import RequestRecorder, record_file
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.servers.complaint import write_failure
from tailgate.servers.config import Task

logger = logging.getLogger("tailgate")

_KEPT_ON_ENVIRONMENT = "tailgate_load"  # Locust loads a locustfile more than once: state hangs on its Environment


class LoadProcess:
    """One test after another: `begin` makes what drives and records it, `end` and `close` finish it."""

    def __init__(self, environment: Environment, *, task: Task = "generate") -> None:
        self.environment = environment
        self.task = task  # under a schedule, that of the trial
        setattr(environment, _KEPT_ON_ENVIRONMENT, self)
        logging.raiseExceptions = False  # a full disk takes no line of the log either: no traceback in its place
        self.generator: Generator | None = None
        self.log: LoadLog | None = None
        self.recorder: RequestRecorder | None = None
        self.tests = 0
        self.stopping = False
        self.users = itertools.count()
        self.requests = itertools.count()

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """Return the load process that was made for Locust's environment."""
        load: Self = getattr(environment, _KEPT_ON_ENVIRONMENT)
        return load

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    @property
    def worker(self) -> int:
        return max(0, getattr(self.environment.runner, "worker_index", 0))

    def begin(
        self,
        config: TrialConfig,
        *,
        worker: int,
        records: str,
        clock: ClockComparison | None = None,
    ) -> Generator:
        """Make a fresh generator for one test, which records into the folder `records` unless that is empty."""
        self.end()
        self.task = config.task
        self.stopping = False
        directory = Path(records) if records else None
        if directory is not None and self.recorder is None:
            self.recorder = RequestRecorder(record_file(directory / f"requests-{worker}.arrow"), clock=clock)
        self.log = LoadLog(directory, worker=worker, arms=config.arms, recorder=self.recorder, clock=clock)
        on_record = None if self.options.trial else self.count_in_locust
        self.generator = Generator(config, log=self.log, on_record=on_record)
        return self.generator

    def end(self) -> None:
        """Cut what is in flight and record everything; the recorder stays open for a next test."""
        generator, self.generator = self.generator, None
        if generator is not None:
            generator.stop()

    def close(self) -> None:
        """Do as `end` does, and write the end of the record file."""
        self.end()
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            try:
                recorder.close()
                if self.log is not None:
                    self.log.write()  # with what the disk took at last
            except OSError as error:
                logger.error("records cannot be written: %s and run again", write_failure(error))

    def count_in_locust(self, record: RequestRecord) -> None:
        """Count the request once in Locust's statistics, in the row "E2E" of its arm, and its TTFT in a row that
        "Aggregated" leaves out. A request that the end of the test cut off is not counted."""
        if record.status == "CANCELLED":
            return
        name = self.task.capitalize() + (f" [{record.arm}]" if record.arm else "")
        fire: Any = self.environment.events.request.fire
        fire(
            request_type="E2E",
            name=name,
            response_time=record.e2e_ms,
            response_length=record.output_tokens or 0,
            exception=None if record.ok else f"{record.status}: {record.error or 'no message'}",
            context={},
            start_time=record.scheduled_ns / 1e9,
        )
        ttft_ms: Any = record.ttft_ms  # Locust's annotation says int
        if record.ok and ttft_ms is not None:
            # Not by the event: Locust would count the request again in "Aggregated".
            self.environment.stats.get(name, "TTFT").log(ttft_ms, 0)
