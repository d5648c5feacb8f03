"""What a locustfile here does with Locust's events: its part in the load, by hand or under a schedule."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import zmq
from locust import events, runners
from locust.env import Environment
from locust.rpc import zmqrpc
from locust.runners import LocalRunner, MasterRunner, WorkerRunner
from zmq.utils import z85

from tailgate.loadtests.generator.precise_sleep import LIBC
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.workers.by_hand import add_arguments, hand_config
from tailgate.loadtests.workers.channel import TOKEN_VARIABLE, channel_token
from tailgate.loadtests.workers.load_process import LoadProcess
from tailgate.loadtests.workers.master import Master
from tailgate.loadtests.workers.worker import Worker
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import Task

logger = logging.getLogger("tailgate")

_PR_SET_PDEATHSIG = 1
_OPEN_SOCKET: Any = zmqrpc.BaseSocket.__init__


def listen(task: Task) -> None:
    """Let the locustfile that is being loaded send requests of this task. End the process for a bad secret."""
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
    """Check settings before anything starts, and take this process's part."""
    load = LoadProcess(environment, task=task)
    options = load.options
    # Locust lets Ctrl-C raise in whichever greenlet runs, which could be a reader or the bookkeeper in mid-row. Now
    # it reaches the main greenlet, which waits, and the shutdown is the same.
    main = gevent.get_hub().parent
    gevent.signal_handler(signal.SIGINT, lambda: gevent.kill(main, KeyboardInterrupt))
    if not isinstance(runner, WorkerRunner):
        try:
            if options.trial:
                trial = TrialConfig.read(Path(options.trial, "generator.json"))
                Schedule.read(Path(options.trial, "schedule.arrow"), trial.arms)
            elif options.headless or environment.host:
                hand_config(environment, 1, task=task)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(2)
    master = Master(environment) if options.trial and isinstance(runner, (LocalRunner, MasterRunner)) else None
    if isinstance(runner, WorkerRunner) or (master is not None and isinstance(runner, LocalRunner)):
        # Now: once the test starts, the master's options replace this process's.
        keep = Path(options.keep).resolve() if options.keep and isinstance(runner, WorkerRunner) else None
        Worker(environment, load, keep=keep)
    if isinstance(runner, WorkerRunner) and options.processes:
        # A worker that outlived its master, by kill -9 too, would go on sending, to arms that died with the run.
        LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

    def on_test_start(**_: Any) -> None:
        if master is not None:
            master.assign()
        elif not isinstance(runner, MasterRunner) and not options.trial:
            try:
                config = hand_config(environment, load.tests + 1, task=task)
                generator = load.begin(config, worker=load.worker, records=options.records)
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
        if load.log is not None and not options.trial:
            load.log.complete = True
        load.end()

    hooks: Any = environment.events
    hooks.test_start.add_listener(on_test_start)
    hooks.test_stopping.add_listener(on_test_stopping)
    hooks.test_stop.add_listener(on_test_stop)
    hooks.quitting.add_listener(lambda **_: load.close())
    if master is not None:
        hooks.quitting.add_listener(lambda **_: master.close())


# --- Locust's channel -------------------------------------------------------------------------------------------------


def close_channel() -> None:
    """Let every socket that Locust opens from now on speak only with processes that have the secret.

    Without the variable Locust is left as it is. Raises ConfigError for an empty or short secret.

    Locust's own channel takes any process: a stranger's gets a share of the load and of the schedule. ZeroMQ's CURVE
    (https://rfc.zeromq.org/spec/26/) needs the master's public key for the first message. Here both sides make all keys
    from the secret, and none of them is ever sent, so that a message without it is never read.
    """
    if TOKEN_VARIABLE not in os.environ:
        return
    token = channel_token("Locust's channel")

    def pair(side: str) -> tuple[bytes, bytes]:
        # Slow on purpose, some 50 ms: a recorded greeting may be used to try words as secrets.
        key = hashlib.scrypt(token.encode(), salt=f"tailgate {side}".encode(), n=2**14, r=8, p=1, dklen=32)
        secret = z85.encode(key)
        return zmq.curve_public(secret), secret

    master, worker = pair("master"), pair("worker")

    def open_closed(self: Any, sock_type: Any, ipv4_only: bool) -> None:
        _OPEN_SOCKET(self, sock_type, ipv4_only)
        is_master = sock_type == zmq.ROUTER
        public, secret = master if is_master else worker
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(*((zmq.CURVE_SERVER, 1) if is_master else (zmq.CURVE_SERVERKEY, master[0])))

    # Locust gives no way to say how its sockets are opened.
    rpc: Any = zmqrpc
    rpc.BaseSocket.__init__ = open_closed


def keep_channel() -> None:
    """Keep a worker's master through a step of the wall clock.

    Locust (2.47) takes a master for lost whose last heartbeat is a minute old by the wall clock, also where that clock
    has just been set.
    """
    module: Any = runners
    module.time = SimpleNamespace(time=lambda: now_ns() / 1e9)
