"""The User of every locustfile here: one Poisson source that waits for nothing but its own next instant."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from locust import User, task
from locust.exception import StopUser

from loadtests.generator.generator import Generator
from loadtests.generator.precise_sleep import sleep_until
from loadtests.generator.preparer import Prepared
from loadtests.traffic.lengths import FitName, fitted_lengths
from loadtests.traffic.schedule import PlannedRequest
from loadtests.workers.load_process import LoadProcess
from servers.clock import now_ns

_GAPS_AT_ONCE = 256


class OpenLoopUser(User):
    """One open-loop source of requests. Under --schedule it only keeps Locust's user count above zero.

    The locustfile's own class says by its name what is sent; what that is follows from the task of its `LoadProcess`.
    """

    abstract = True

    def on_start(self) -> None:
        self._load: LoadProcess = LoadProcess.of(self.environment)
        options = self._load.options
        self._idle = bool(options.schedule) or self._load.generator is None
        self._next_ns = now_ns()
        if self._idle or self._load.generator is None:
            return
        spawn_key = (self._load.worker, next(self._load.users))
        self._rng = np.random.default_rng(np.random.SeedSequence(entropy=options.seed, spawn_key=spawn_key))
        self._gaps_ns: list[int] = []
        self._lengths: list[tuple[int, int]] = []
        self._plan_next(self._load.generator)
        cast("Any", self).wait()  # Locust has no annotation on it

    def on_stop(self) -> None:
        """With --stop-timeout, what this process has in flight had that long to end."""
        generator, timeout_s = self._load.generator, self.environment.stop_timeout
        if self._load.stopping and timeout_s and generator is not None:
            generator.wait_idle(timeout_s)

    def wait_time(self) -> float:
        """Seconds to just before the next instant; `ask` sleeps the rest precisely."""
        return 3600.0 if self._idle else max(0.0, (self._next_ns - now_ns()) / 1e9 - 0.001)

    @task
    def ask(self) -> None:
        """The request that is due is on its way, and the next one is planned."""
        if self._idle:
            return
        generator = self._load.generator
        if generator is None:
            raise StopUser
        sleep_until(self._next_ns)
        generator.launch(self._prepared, self._next_ns)
        self._plan_next(generator)

    def _plan_next(self, generator: Generator) -> None:
        load, options, rng = self._load, self._load.options, self._rng
        if not self._gaps_ns:
            gaps = rng.standard_gamma(options.burstiness, _GAPS_AT_ONCE) / (options.burstiness * options.request_rate)
            self._gaps_ns = (gaps * 1e9).astype(np.int64).tolist()
            fit: FitName = options.workload
            lengths = fitted_lengths(fit, _GAPS_AT_ONCE, rng=rng).scaled(options.length_scale)
            prompts = np.minimum(lengths.input_tokens, options.max_prompt_tokens).tolist()
            answers = np.minimum(lengths.output_tokens, load.max_new_tokens).tolist()
            self._lengths = list(zip(prompts, answers, strict=True))
        self._next_ns += self._gaps_ns.pop()
        prompt_tokens, max_tokens = self._lengths.pop()
        seed = int(rng.integers(0, 2**63 - 1))
        number = next(load.requests)
        name = f"{load.tests}-{load.worker}.{number}"
        plan = PlannedRequest(
            index=number,
            offset_ns=0,
            session_id=name,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            prompt_seed=seed,
            arm=options.arm or None,
            phase="measure",
        )
        self._prepared: Prepared = generator.prepare(plan, name)
