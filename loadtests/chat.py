"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s: it sleeps to its own next instant, starts the call
without waiting for it, and draws the next gap. So user counts, LoadTestShape, --processes and the web page work as
ever, and a slow server cannot slow the traffic down. Latencies count from the scheduled instant.

Locust's statistics get two rows for each arm: "Generate e2e [arm]" for every request (failures are counted here) and
"Generate ttft [arm]" for every first token. The row "Aggregated" mixes both, so read the rows. Percentiles there
are rounded; exact ones come from the records (--records DIR). A request still running when the test stops is recorded
as CANCELLED and not shown; --stop-timeout lets it end.

Driven by the orchestrator, with --schedule and --trial-config, Users do nothing: each load process dispatches its
share of the schedule and Locust quits when the last answer is in.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import signal
import sys
from pathlib import Path
from typing import Any, cast

import gevent
import numpy as np
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import STATE_MISSING, LocalRunner, MasterRunner, WorkerRunner

from loadtests.client import parse_target
from loadtests.generator import Generator, Prepared, TrialConfig, sleep_until
from loadtests.recorder import LoadLog, RequestRecord, RequestRecorder
from loadtests.schedule import PlannedRequest, Schedule
from loadtests.workload import FITS, FitName, fitted_lengths
from servers.clock import now_ns
from servers.config import ConfigError

logger = logging.getLogger("tailgate")

# Messages between the process that conducts a scheduled trial and those that drive load. In a run without workers one
# process is both, and Locust's local runner delivers the messages to itself.
ASSIGN, START = "tailgate_assign", "tailgate_start"
READY, DONE = "tailgate_ready", "tailgate_done"

START_DELAY_NS = 2_000_000_000
_GAPS_AT_ONCE = 256
_KEPT_ON_ENVIRONMENT = "tailgate_load"  # Locust loads this file more than once: state hangs on its Environment


class RequestError(Exception):
    """What Locust shows for a request that did not end with OK: the gRPC status and the message."""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def add_arguments(parser: Any) -> None:
    """Locust's command line and web page know tailgate's settings."""
    add = parser.add_argument
    add("--request-rate", type=_positive, default=1.0, help="Requests per second of each User (default 1)")
    add("--burstiness", type=_positive, default=1.0, help="Shape of the gamma gaps: 1 is Poisson, below 1 is bursty")
    add("--workload", choices=sorted(FITS), default="conversation", help="Which lengths (default conversation)")
    add("--length-scale", type=_positive, default=0.1, help="Factor on all lengths (default 0.1: fits small models)")
    add("--max-prompt-tokens", type=_count, default=128, help="Longer prompts are cut (default 128)")
    add("--max-new-tokens", type=_count, default=32, help="Longer answers are cut (default 32)")
    add("--vocab-size", type=int, default=256, help="Prompts are token ids below this (default 256)")
    add("--arm", default="", help="Send every request to this arm (default: the splitter chooses)")
    add("--request-timeout", type=_positive, default=60.0, help="Deadline of each request in seconds (default 60)")
    add("--seed", type=int, default=0, help="Seed of gaps, lengths and prompts (default 0)")
    add("--records", default="", help="Directory for requests-N.arrow (default: no records)")
    add("--schedule", default="", include_in_web_ui=False, help="schedule.arrow to replay; needs --trial-config")
    add("--trial-config", default="", include_in_web_ui=False, help="generator.json of the trial to replay")


class _LoadProcess:
    """This process's part in the load: its generator, its recorder, and the way to Locust's statistics."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.generator: Generator | None = None
        self.log: LoadLog | None = None
        self.recorder: RequestRecorder | None = None
        self.tests = 0
        self.stopping = False
        self.users = itertools.count()
        self.requests = itertools.count()

    @property
    def options(self) -> Any:
        return self.environment.parsed_options

    @property
    def worker(self) -> int:
        return max(0, getattr(self.environment.runner, "worker_index", 0))

    def begin(self, config: TrialConfig, *, worker: int, workers: int, planned: int | None, records: str) -> Generator:
        """A fresh generator for one test, recording into `records` unless that is empty."""
        self.end()
        self.stopping = False
        directory = Path(records) if records else None
        if directory is not None and self.recorder is None:
            self.recorder = RequestRecorder(directory / f"requests-{worker}.arrow")
        self.log = LoadLog(directory, worker=worker, planned=planned, arms=config.arms)
        self.generator = Generator(
            config, log=self.log, recorder=self.recorder, on_record=self.tell_locust, workers=workers
        )
        return self.generator

    def end(self) -> None:
        """Nothing is in flight and everything is recorded; the recorder stays open for a next test."""
        generator, self.generator = self.generator, None
        if generator is not None:
            generator.stop()

    def close(self) -> None:
        """As `end`, and the record file has its end mark."""
        self.end()
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            try:
                recorder.close()
            except OSError as error:
                logger.error("records cannot be written (%s): free the disk and run again", error)

    def tell_locust(self, record: RequestRecord) -> None:
        """Locust's statistics have this request, unless the end of the test cut it off."""
        if record.status == "CANCELLED":
            return
        fire: Any = self.environment.events.request.fire
        suffix = f" [{record.arm}]" if record.arm else ""
        context = {"arm": record.arm, "replica": record.replica, "request_id": record.request_id, "phase": record.phase}
        start_time = record.scheduled_ns / 1e9
        failure = None if record.ok else RequestError(f"{record.status}: {record.error or 'no message'}")
        fire(
            request_type="gRPC",
            name=f"Generate e2e{suffix}",
            response_time=record.e2e_ms,
            response_length=record.output_tokens,
            exception=failure,
            context=context,
            start_time=start_time,
        )
        ttft_ms = record.ttft_ms
        if failure is None and ttft_ms is not None:
            fire(
                request_type="gRPC",
                name=f"Generate ttft{suffix}",
                response_time=ttft_ms,
                response_length=0,
                exception=None,
                context=context,
                start_time=start_time,
            )


def _process_of(environment: Environment) -> _LoadProcess:
    load: _LoadProcess = getattr(environment, _KEPT_ON_ENVIRONMENT)
    return load


class ChatUser(User):
    """One open-loop source of chat requests. Under --schedule it only keeps Locust's user count above zero."""

    abstract = False

    def on_start(self) -> None:
        self._load = _process_of(self.environment)
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


def _hand_config(environment: Environment, test: int) -> TrialConfig:
    options = environment.parsed_options
    assert options is not None
    if not environment.host:
        raise ConfigError("no host is given: add --host localhost:50051, the splitter or one arm's server")
    parse_target(environment.host)
    return TrialConfig(
        trial=test,
        arms=(options.arm,) if options.arm else (),
        targets={"*": environment.host},
        timeout_s=options.request_timeout,
        vocab_size=options.vocab_size,
    )


class _Worker:
    """The load-driving side of a scheduled trial: prepares its share, waits for the start, reports the end."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.load = _process_of(environment)
        assert environment.runner is not None
        self.runner = environment.runner
        self.runner.register_message(ASSIGN, self.on_assign)
        self.runner.register_message(START, self.on_start)

    def on_assign(self, environment: Environment, msg: Any, **_: Any) -> None:
        gevent.spawn(self._prepare, **msg.data)

    def on_start(self, environment: Environment, msg: Any, **_: Any) -> None:
        gevent.spawn(self._drive, int(msg.data["start_ns"]))

    def _prepare(self, *, worker: int, workers: int, schedule: str, trial_config: str, records: str) -> None:
        try:
            config = TrialConfig.read(Path(trial_config))
            share = Schedule.read(schedule).share(worker, workers)
            copies = [len(config.arms) if arm == "*" else 1 for arm in share.table["arm"].to_pylist()]
            generator = self.load.begin(
                config,
                worker=worker,
                workers=workers,
                planned=sum(copies),
                records=records or str(Path(schedule).parent),
            )
            generator.load(share)
            generator.connect()
            if generator.failure is not None:
                raise ConfigError(generator.failure)
        except ConfigError as error:
            self.runner.send_message(DONE, {"error": str(error)})
        else:
            self.runner.send_message(READY, {})

    def _drive(self, start_ns: int) -> None:
        generator, log = self.load.generator, self.load.log
        if generator is None or log is None:
            return
        ended = generator.run(start_ns)
        if self.load.generator is not generator:
            return  # stopped from outside, which also recorded what was in flight
        if generator.failure is None:
            log.complete = True
        if not ended:
            logger.warning("%d requests had not ended when the drain time was over", generator.inflight)
        self.load.close()
        self.runner.send_message(DONE, {"error": generator.failure})


class _Conductor:
    """The side that assigns shares, starts all load processes at one instant and quits after the last answer."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        assert environment.runner is not None
        self.runner = environment.runner
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.error: str | None = None
        self.runner.register_message(READY, self.on_ready)
        self.runner.register_message(DONE, self.on_done)

    def assign(self) -> None:
        """Every load process connected now has its share."""
        options = self.environment.parsed_options
        assert options is not None
        ids = [""]
        if isinstance(self.runner, MasterRunner):
            clients = self.runner.clients
            ids = sorted(
                (client.id for client in clients.ready + clients.running + clients.spawning),
                key=self.runner.get_worker_index,
            )
        self.waiting, self.running = set(ids), set(ids)
        for number, client_id in enumerate(ids):
            share = {
                "worker": number,
                "workers": len(ids),
                "schedule": str(Path(options.schedule).resolve()),
                "trial_config": str(Path(options.trial_config).resolve()),
                "records": str(Path(options.records).resolve()) if options.records else "",
            }
            self.runner.send_message(ASSIGN, share, client_id or None)
        gevent.spawn(self._watch)

    def on_ready(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.waiting.discard(self._sender(msg))
        self._start_when_ready()

    def on_done(self, environment: Environment, msg: Any, **_: Any) -> None:
        if msg.data.get("error"):
            self.error = self.error or msg.data["error"]
            logger.error("%s", msg.data["error"])
        self._gone(self._sender(msg))

    def _sender(self, msg: Any) -> str:
        return str(msg.node_id) if isinstance(self.runner, MasterRunner) else ""

    def _start_when_ready(self) -> None:
        if self.waiting or self.error is not None or not self.running:
            return
        options = self.environment.parsed_options
        assert options is not None
        start_ns = TrialConfig.read(Path(options.trial_config)).start_ns or now_ns() + START_DELAY_NS
        self.waiting = {"started"}  # one start a trial
        self.runner.send_message(START, {"start_ns": start_ns})

    def _gone(self, client_id: str) -> None:
        self.running.discard(client_id)
        self.waiting.discard(client_id)
        if self.running and self.error is None:
            self._start_when_ready()
            return
        # A failed request is a record, not a failure of the load process: the exit code says whether that one worked.
        self.environment.process_exit_code = 0 if self.error is None else 1
        gevent.spawn(self.runner.quit)

    def _watch(self) -> None:
        """A worker that died counts as done: what it flushed is on disk, and the others go on."""
        while self.running and isinstance(self.runner, MasterRunner):
            gevent.sleep(1.0)
            for client_id in list(self.running):
                node = self.runner.clients.get(client_id)
                if node is None or node.state == STATE_MISSING:
                    logger.error("load process %s is lost; its records end at its last flush", client_id)
                    self._gone(client_id)


def on_init(environment: Environment, runner: Any, **_: Any) -> None:
    """Settings are checked before anything starts, and this process knows its part."""
    load = _LoadProcess(environment)
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
                _hand_config(environment, 1)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(2)
    conductor = _Conductor(environment) if scheduled and isinstance(runner, (LocalRunner, MasterRunner)) else None
    if isinstance(runner, WorkerRunner) or (scheduled and conductor is not None and isinstance(runner, LocalRunner)):
        _Worker(environment)

    def on_test_start(**_: Any) -> None:
        if conductor is not None:
            conductor.assign()
        elif not isinstance(runner, MasterRunner) and not options.schedule:
            try:
                generator = load.begin(
                    _hand_config(environment, load.tests + 1),
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

    def on_test_stop(**_: Any) -> None:
        if load.log is not None and not options.schedule:
            load.log.complete = True
        load.end()

    hooks: Any = environment.events
    hooks.test_start.add_listener(on_test_start)
    hooks.test_stopping.add_listener(on_test_stopping)
    hooks.test_stop.add_listener(on_test_stop)
    hooks.quitting.add_listener(lambda **_: load.close())


_hooks: Any = events
_hooks.init_command_line_parser.add_listener(add_arguments)
_hooks.init.add_listener(on_init)
