"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s: it sleeps to its own next instant, starts the call
without waiting for it, and draws the next gap. So user counts, LoadTestShape, --processes and the web page work as
ever, and a slow server cannot slow the traffic down. Latencies count from the scheduled instant.

The names of serving benchmarks mean here what they mean there, for one User: --request-rate (inf with
--max-concurrency keeps that many under way: a closed loop), --burstiness, --max-concurrency, --num-prompts, --seed,
and --goodput ttft:200 tpot:50, which is counted from the records and printed at the end.

Locust's statistics get two rows for each arm: "Generate e2e [arm]" for every request (failures are counted here) and
"Generate ttft [arm]" for every first token. The row "Aggregated" mixes both, so read the rows. Percentiles there
are rounded; exact ones come from the records (--records DIR). A request still running when the test stops is recorded
as CANCELLED and not shown; --stop-timeout lets it end.

Driven by the orchestrator, with --schedule and --trial-config, Users do nothing: each load process dispatches its
share of the schedule and Locust quits when the last answer is in.
"""

from __future__ import annotations

import logging
import signal
import sys
from math import isinf
from pathlib import Path
from typing import Any, cast

import gevent
import numpy as np
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.experiments.field_names import parse_goodput_flag
from loadtests.generator.generator import Generator
from loadtests.generator.goodput import Goodput
from loadtests.generator.precise_sleep import sleep_until
from loadtests.generator.request_copy import Prepared
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.lengths import FitName, fitted_lengths
from loadtests.traffic.schedule import PlannedRequest, Schedule
from loadtests.workers.load_process import LoadProcess, end_with_parent
from loadtests.workers.locust_channel import close_channel
from loadtests.workers.locust_flags import add_arguments, hand_config
from loadtests.workers.master import Master
from loadtests.workers.worker import Worker
from servers.clock import now_ns
from servers.fields import ConfigError

logger = logging.getLogger("tailgate")

_GAPS_AT_ONCE = 256
_KEPT_ON_ENVIRONMENT = "tailgate_load"  # Locust loads this file more than once: state hangs on its Environment


class ChatUser(User):
    """One open-loop source of chat requests. Under --schedule it only keeps Locust's user count above zero."""

    abstract = False

    def on_start(self) -> None:
        self._load: LoadProcess = getattr(self.environment, _KEPT_ON_ENVIRONMENT)
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
        if isinf(self._load.options.request_rate):
            generator.wait_room()
            self._next_ns = now_ns()
        else:
            sleep_until(self._next_ns)
        if self._load.sent_all():
            self._idle = True
            return
        self._load.launched += 1
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
            answers = np.minimum(lengths.output_tokens, options.max_new_tokens).tolist()
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
            turn=0,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            prompt_seed=seed,
            arm=options.arm or None,
            phase="measure",
            prefix_seed=seed,
        )
        self._prepared: Prepared = generator.prepare(plan, name)


def on_init(environment: Environment, runner: Any, **_: Any) -> None:
    """Settings are checked before anything starts, and this process knows its part."""
    load = LoadProcess(environment)
    setattr(environment, _KEPT_ON_ENVIRONMENT, load)
    options = load.options
    # Locust lets Ctrl-C raise in whichever greenlet runs, which could be a reader or the bookkeeper in mid-row. Now
    # it reaches the main greenlet, which waits, and the shutdown is the same.
    main = gevent.get_hub().parent
    gevent.signal_handler(signal.SIGINT, lambda: gevent.kill(main, KeyboardInterrupt))
    scheduled = bool(options.schedule or options.trial_config)
    if not isinstance(runner, WorkerRunner):
        try:
            if scheduled and not (options.schedule and options.trial_config):
                raise ConfigError("--schedule and --trial-config belong together: give both or neither")
            if scheduled:
                TrialConfig.read(Path(options.trial_config))
                Schedule.read(options.schedule)
            elif options.headless or environment.host:
                hand_config(environment, 1)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(2)
    master = Master(environment) if scheduled and isinstance(runner, (LocalRunner, MasterRunner)) else None
    if isinstance(runner, WorkerRunner) or (scheduled and master is not None and isinstance(runner, LocalRunner)):
        # Now: once the test starts, the master's options replace this process's.
        keep = Path(options.keep).resolve() if options.keep and isinstance(runner, WorkerRunner) else None
        Worker(environment, load, keep=keep)
    if isinstance(runner, WorkerRunner) and options.processes:
        end_with_parent()

    def on_test_start(**_: Any) -> None:
        if isinstance(runner, MasterRunner) and options.goodput:
            load.goodput = Goodput(parse_goodput_flag(options.goodput))
        if master is not None:
            master.assign()
        elif not isinstance(runner, MasterRunner) and not options.schedule:
            try:
                generator = load.begin(
                    hand_config(environment, load.tests + 1),
                    worker=load.worker,
                    workers=1,
                    planned=None,
                    records=options.records,
                )
            except ConfigError as error:
                logger.error("%s", error)
                if options.headless:
                    environment.process_exit_code = 2
                if isinstance(runner, LocalRunner):
                    gevent.spawn(runner.quit if options.headless else runner.stop)
                return
            load.tests += 1
            generator.connect()
            generator.open_window()

    def on_test_stopping(**_: Any) -> None:
        load.stopping = True
        if master is not None:
            master.stop()

    def on_test_stop(**_: Any) -> None:
        if load.log is not None and not options.schedule:
            load.log.complete = True
        load.end()
        if not isinstance(runner, WorkerRunner) and not (isinstance(runner, MasterRunner) and options.headless):
            print_goodput()

    def print_goodput(**_: Any) -> None:
        if load.goodput is not None:
            sys.stdout.write("\n".join(load.goodput.lines()) + "\n")

    def on_report(data: dict[str, Any], **_: Any) -> None:
        if load.goodput is not None:
            data["tailgate_goodput"] = load.goodput.take()

    def on_worker_report(data: dict[str, Any], **_: Any) -> None:
        if load.goodput is not None and "tailgate_goodput" in data:
            load.goodput.merge(data["tailgate_goodput"])

    hooks: Any = environment.events
    hooks.report_to_master.add_listener(on_report)
    hooks.worker_report.add_listener(on_worker_report)
    if isinstance(runner, MasterRunner) and options.headless:
        hooks.quit.add_listener(print_goodput)  # the workers' last reports come after the stop
    hooks.test_start.add_listener(on_test_start)
    hooks.test_stopping.add_listener(on_test_stopping)
    hooks.test_stop.add_listener(on_test_stop)
    hooks.quitting.add_listener(lambda **_: load.close())
    if master is not None:
        hooks.quitting.add_listener(lambda **_: master.close())


try:
    close_channel()
except ConfigError as problem:
    sys.stderr.write(f"{problem}\n")
    sys.exit(2)
_hooks: Any = events
_hooks.init_command_line_parser.add_listener(add_arguments)
_hooks.init.add_listener(on_init)
