"""The locustfile: chat traffic over gRPC, open loop.

By hand, against a running `tailgate split` or one arm's server:

    locust -f loadtests/chat.py --host localhost:50051 --headless -u 4 -r 4 -t 60s

Each User is one Poisson source of --request-rate requests/s: it sleeps to its own next instant, starts the call
without waiting for it, and draws the next gap. So user counts, LoadTestShape, --processes and the web page work as
ever, and a slow server cannot slow the traffic down. Latencies count from the scheduled instant.

The names of serving benchmarks mean here what they mean there, for one User: --request-rate (inf with
--max-concurrency keeps that many under way: a closed loop), --burstiness, --max-concurrency, --num-prompts, --seed,
and --goodput ttft:200 tpot:50, which is counted from the records and told at the end.

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
from loadtests.external.addresses import KINDS, ExternalConfig, external_from_flags, parse_target
from loadtests.external.client_security import SecurityConfig
from loadtests.generator.generator import Generator, TrialConfig
from loadtests.generator.goodput import Goodput
from loadtests.generator.load_log import LoadLog
from loadtests.generator.locust_counts import LocustCounts
from loadtests.generator.precise_sleep import sleep_until
from loadtests.generator.record import RequestRecord
from loadtests.generator.recorder import RequestRecorder
from loadtests.generator.request_copy import Prepared
from loadtests.generator.spool import OnWritten
from loadtests.traffic.lengths import FITS, FitName, fitted_lengths
from loadtests.traffic.schedule import PlannedRequest, Schedule
from loadtests.workers.clock_offsets import end_with_parent
from loadtests.workers.locust_channel import close_channel
from loadtests.workers.master import Conductor
from loadtests.workers.worker import Follower
from servers.clock import now_ns
from servers.config import ConfigError

logger = logging.getLogger("tailgate")

_GAPS_AT_ONCE = 256
_KEPT_ON_ENVIRONMENT = "tailgate_load"  # Locust loads this file more than once: state hangs on its Environment


_SECURITY_FLAGS = (
    ("--tls-ca", "tls_ca", "PEM file of the authority behind an https:// host (default: the system's)"),
    ("--tls-server-name", "tls_server_name", "Name that the host's certificate carries (default: the host)"),
    ("--client-certificate", "client_certificate", "Certificate (PEM) for servers that ask who the client is"),
    ("--client-key", "client_key", "Key of --client-certificate (PEM)"),
    ("--token-env", "token_env", "Environment variable that holds the bearer token; never the token itself"),
    ("--token-file", "token_file", "File that holds the bearer token"),
)


class RequestError(Exception):
    """What Locust shows for a request that did not end with OK: the gRPC status and the message."""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
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
    add("--request-rate", type=_rate, default=1.0, help="Requests/s of each User (default 1); inf: all at once")
    add("--max-concurrency", type=int, default=0, help="Most under way from each load process (default 0: no limit)")
    add("--num-prompts", type=int, default=0, help="Each load process ends after so many (default 0: no limit)")
    # A list, which the web page would hand back as one text.
    add("--goodput", nargs="+", default=[], include_in_web_ui=False, help="Good is within these: ttft:200 tpot:50")
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
    add("--client", choices=("frames", "grpcio"), default="frames", help="grpcio: a check, up to 100 calls at once")
    add("--keepalive", type=float, default=0.0, help="Ping a silent server after so many seconds (default 0: never)")
    add("--kind", choices=("tailgate", *KINDS), default="tailgate", help="What the host speaks (default tailgate)")
    add("--model-name", default="", help="The model's name at a host of another kind")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        include_in_web_ui=False,
        help="A setting of that kind, as in [arms.openai] of an experiment, such as endpoint=chat; may be repeated",
    )
    # Not in the web page: whoever reaches it must not choose files of this machine. Locust's own page has --tls-key.
    for flag, dest, text in _SECURITY_FLAGS:
        add(flag, dest=dest, default="", include_in_web_ui=False, help=text)
    add("--schedule", default="", include_in_web_ui=False, help="schedule.arrow to replay; needs --trial-config")
    add("--trial-config", default="", include_in_web_ui=False, help="generator.json of the trial to replay")
    add("--keep", default="", include_in_web_ui=False, help="On a worker that shares no disk: where its records stay")
    add(
        "--remote-workers", type=int, default=0, include_in_web_ui=False, help="Workers to wait for besides --processes"
    )


class _LoadProcess:
    """This process's part in the load: its generator, its recorder, and the way to Locust's statistics."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.generator: Generator | None = None
        self.log: LoadLog | None = None
        self.recorder: RequestRecorder | None = None
        self.tests = 0
        self.stopping = False
        self.over_http: set[str] = set()  # arms
        self.goodput: Goodput | None = None
        self.launched = self.booked = 0
        self.users = itertools.count()
        self.requests = itertools.count()
        self.counts = LocustCounts(environment)
        gevent.spawn(self._show_counts)

    def _show_counts(self) -> None:
        while True:
            gevent.sleep(1.0)
            self.counts.flush()

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
        workers: int,
        planned: int | None,
        records: str,
        on_written: OnWritten | None = None,
    ) -> Generator:
        """A fresh generator for one test, recording into `records` unless that is empty."""
        self.end()
        self.stopping = False
        self.launched = self.booked = 0
        self.goodput = Goodput(parse_goodput_flag(self.options.goodput)) if self.options.goodput else None
        directory = Path(records) if records else None
        if directory is not None and self.recorder is None:
            self.recorder = RequestRecorder(directory / f"requests-{worker}.arrow", on_written=on_written)
        self.over_http = {arm for arm, external in config.external.items() if external.kind == "openai"}
        self.log = LoadLog(directory, worker=worker, planned=planned, arms=config.arms, recorder=self.recorder)
        self.generator = Generator(config, log=self.log, recorder=self.recorder, on_record=self.take, workers=workers)
        return self.generator

    def end(self) -> None:
        """Nothing is in flight and everything is recorded; the recorder stays open for a next test."""
        generator, self.generator = self.generator, None
        if generator is not None:
            generator.stop()
            self.counts.flush()

    def close(self) -> None:
        """As `end`, and the record file has its end mark."""
        self.end()
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            try:
                recorder.close()
                if self.log is not None:
                    self.log.write()  # with what the disk took at last
            except OSError as error:
                logger.error("records cannot be written (%s): free the disk and run again", error)

    def take(self, record: RequestRecord) -> None:
        """Locust and the goodput have this request; after the last of --num-prompts the test ends."""
        self.tell_locust(record)
        if self.goodput is not None and record.status != "CANCELLED":
            self.goodput.add(record)
        self.booked += 1
        wanted = 0 if self.options.schedule else self.options.num_prompts
        runner = self.environment.runner
        if wanted and self.booked == wanted and isinstance(runner, LocalRunner):
            gevent.spawn(runner.quit if self.options.headless else runner.stop)

    def sent_all(self) -> bool:
        """Whether --num-prompts allows no more."""
        return bool(0 < self.options.num_prompts <= self.launched)

    def tell_locust(self, record: RequestRecord) -> None:
        """Locust's statistics have this request, unless the end of the test cut it off."""
        if record.status == "CANCELLED":
            return
        fire: Any = self.environment.events.request.fire
        suffix = f" [{record.arm}]" if record.arm else ""
        protocol = "HTTP" if (record.arm or "*") in self.over_http else "gRPC"
        context = {"arm": record.arm, "replica": record.replica, "request_id": record.request_id, "phase": record.phase}
        if record.ok and self.counts.alone:
            self.counts.add(protocol, f"Generate e2e{suffix}", record.e2e_ms, record.output_tokens)
            if (first_ms := record.ttft_ms) is not None:
                self.counts.add(protocol, f"Generate ttft{suffix}", first_ms, 0)
            return
        start_time = record.scheduled_ns / 1e9
        failure = None if record.ok else RequestError(f"{record.status}: {record.error or 'no message'}")
        fire(
            request_type=protocol,
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
                request_type=protocol,
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


def _hand_config(environment: Environment, test: int) -> TrialConfig:
    options = environment.parsed_options
    assert options is not None
    if not environment.host:
        raise ConfigError("no host is given: add --host localhost:50051, the splitter or one arm's server")
    external = _external(options, environment.host)
    parse_goodput_flag(options.goodput)
    if isinf(options.request_rate) and not (options.max_concurrency or options.num_prompts):
        raise ConfigError(
            "--request-rate inf sends everything at once: say how much with --num-prompts, or how much may be under "
            "way with --max-concurrency"
        )
    return TrialConfig(
        trial=test,
        arms=(options.arm,) if options.arm else (),
        targets={} if external else {"*": environment.host},
        external=external,
        timeout_s=options.request_timeout,
        vocab_size=options.vocab_size,
        max_concurrency=options.max_concurrency,
        client=options.client,
        keepalive_s=options.keepalive,
        security=_security(options),
    )


def _external(options: Any, host: str) -> dict[str, ExternalConfig]:
    """The host as an arm of another kind; empty when it is one of tailgate's own."""
    if options.kind != "tailgate":
        external = external_from_flags(
            options.kind,
            host,
            model_name=options.model_name,
            settings=options.option,
            security=_security(options),
            vocab_size=options.vocab_size,
        )
        return {options.arm or "*": external}
    if options.model_name or options.option:
        raise ConfigError("--model-name and --option are for hosts of another kind: add --kind openai or oip")
    parse_target(host)
    return {}


def _security(options: Any) -> SecurityConfig:
    security = SecurityConfig(
        tls_ca=options.tls_ca,
        tls_server_name=options.tls_server_name,
        tls_certificate=options.client_certificate,
        tls_key=options.client_key,
        token_env=options.token_env,
        token_file=options.token_file,
    )
    security.check()
    return security


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
    conductor = Conductor(environment) if scheduled and isinstance(runner, (LocalRunner, MasterRunner)) else None
    if isinstance(runner, WorkerRunner) or (scheduled and conductor is not None and isinstance(runner, LocalRunner)):
        # Now: once the test starts, the master's options replace this process's.
        keep = Path(options.keep).resolve() if options.keep and isinstance(runner, WorkerRunner) else None
        Follower(environment, load, keep=keep)
    if isinstance(runner, WorkerRunner) and options.processes:
        end_with_parent()

    def on_test_start(**_: Any) -> None:
        if isinstance(runner, MasterRunner) and options.goodput:
            load.goodput = Goodput(parse_goodput_flag(options.goodput))
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
        if conductor is not None:
            conductor.stop()

    def on_test_stop(**_: Any) -> None:
        if load.log is not None and not options.schedule:
            load.log.complete = True
        load.end()
        if not isinstance(runner, WorkerRunner) and not (isinstance(runner, MasterRunner) and options.headless):
            tell_goodput()

    def tell_goodput(**_: Any) -> None:
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
        hooks.quit.add_listener(tell_goodput)  # the workers' last reports come after the stop
    hooks.test_start.add_listener(on_test_start)
    hooks.test_stopping.add_listener(on_test_stopping)
    hooks.test_stop.add_listener(on_test_stop)
    hooks.quitting.add_listener(lambda **_: load.close())
    if conductor is not None:
        hooks.quitting.add_listener(lambda **_: conductor.close())


try:
    close_channel()
except ConfigError as problem:
    sys.stderr.write(f"{problem}\n")
    sys.exit(2)
_hooks: Any = events
_hooks.init_command_line_parser.add_listener(add_arguments)
_hooks.init.add_listener(on_init)
