"""What a locustfile here does with Locust's events: its part in the load, by hand or under a schedule."""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.schedule import Schedule
from loadtests.workers.load_process import LoadProcess, end_with_parent
from loadtests.workers.locust_channel import close_channel, keep_channel
from loadtests.workers.locust_flags import add_arguments, hand_config
from loadtests.workers.master import Master
from loadtests.workers.worker import Worker
from servers.complaint import ConfigError
from servers.config import Task

logger = logging.getLogger("tailgate")


def listen(task: Task) -> None:
    """The locustfile that is being loaded sends requests of this task. A bad secret of the channel ends the process."""
    keep_channel()
    try:
        close_channel()
    except ConfigError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(2)
    hooks: Any = events
    hooks.init_command_line_parser.add_listener(partial(add_arguments, task=task))
    hooks.init.add_listener(partial(_on_init, task))


def _on_init(task: Task, environment: Environment, runner: Any, **_: Any) -> None:
    """Settings are checked before anything starts, and this process knows its part."""
    load = LoadProcess(environment, task=task)
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
                hand_config(environment, 1, task=task)
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
        if master is not None:
            master.assign()
        elif not isinstance(runner, MasterRunner) and not options.schedule:
            try:
                generator = load.begin(
                    hand_config(environment, load.tests + 1, task=task),
                    worker=load.worker,
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

    hooks: Any = environment.events
    hooks.test_start.add_listener(on_test_start)
    hooks.test_stopping.add_listener(on_test_stopping)
    hooks.test_stop.add_listener(on_test_stop)
    hooks.quitting.add_listener(lambda **_: load.close())
    if master is not None:
        hooks.quitting.add_listener(lambda **_: master.close())
