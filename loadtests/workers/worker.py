"""A load process's side of a scheduled trial: prepares its share, waits for the start, drives, reports the end.

With `keep` it shares no disk and no clock with the master: records are written to a folder under `keep` on the master's
clock and copied from there, and the clocks are compared before and all through the trial.
"""

from __future__ import annotations

import logging
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.exception import RPCError

from tailgate.loadtests.generator.clock_offsets import ClockComparison, Exchange, host_identity
from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.workers import channel
from tailgate.loadtests.workers.file_copy import FileSender, folder_for
from tailgate.loadtests.workers.load_process import LoadProcess
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError
from tailgate.servers.fields import read

logger = logging.getLogger("tailgate")

_EXCHANGES_FIRST = 20
_ANSWER_WITHIN_S = 5.0
_MASTER_WITHIN_S = 60.0
_COMPARE_EVERY_S = 1.0
MASTER_SILENT_S = 10.0
_SHIP_WITHIN_S = 60.0
_SHIP_WITHIN_S_STOPPED = 5.0


class Worker:
    """Follows the master's messages. `keep` None: the master's disk and clock are this process's too."""

    def __init__(self, environment: Environment, load: LoadProcess, *, keep: Path | None) -> None:
        self._environment = environment
        self._load = load
        self._keep = keep
        assert environment.runner is not None
        self._runner: Any = environment.runner
        self._clock = ClockComparison()
        self._last_message_ns = 0
        self._compared = Event()
        self._sender: FileSender | None = None
        self._settled_ns: int | None = None
        self._reported = False
        listeners = {
            channel.ASSIGN: lambda data: gevent.spawn(self._prepare, data),
            channel.START: lambda data: gevent.spawn(self._drive, int(data["start_ns"])),
            channel.END: self._on_end,
            channel.STOP: lambda data: gevent.spawn(self._finish, None, _SHIP_WITHIN_S_STOPPED),
        }
        if keep is not None:
            listeners |= {channel.CLOCK: self._on_clock, channel.HAVE: self._on_have}
        for kind, listener in listeners.items():
            self._runner.register_message(kind, lambda environment, msg, listener=listener, **_: listener(msg.data))

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _on_clock(self, data: dict[str, Any]) -> None:
        self._last_message_ns = now_ns()
        self._clock.add(Exchange(data["sent_ns"], data["received_ns"], data["answered_ns"], self._last_message_ns))
        self._compared.set()

    def _on_have(self, data: dict[str, Any]) -> None:
        if self._sender is not None:
            self._sender.confirm(data["size"])

    def _on_end(self, data: dict[str, Any]) -> None:
        generator, offset_ns = self._load.generator, self._clock.best.offset_ns
        if generator is None:
            return
        if data.get("at_ns"):
            generator.end_at(int(data["at_ns"]) - offset_ns)
        for arm, at_ns in data.get("arms", {}).items():
            generator.end_arm_at(arm, int(at_ns) - offset_ns)

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        try:
            self._runner.send_message(kind, data)
        except RPCError as error:  # what counts is sent again
            logger.warning("a message to the master could not be sent: %s", error)

    # --- Preparing ----------------------------------------------------------------------------------------------------

    def _prepare(self, assigned: dict[str, Any]) -> None:
        try:
            self._begin(assigned)
        except Exception as error:  # the master waits for an answer, whatever it is
            self._send(channel.DONE, {"error": self._reason(error), "missing": ""})
        else:
            self._send(channel.READY, {})

    def _reason(self, error: Exception) -> str:
        where = "" if self._keep is None else f"worker on {socket.gethostname()}: "
        if isinstance(error, ConfigError):
            return f"{where}{error}"
        logger.error("a fault in the load process", exc_info=error)
        return f"{where}{type(error).__name__}: {error}"

    def _begin(self, assigned: dict[str, Any]) -> None:
        """Load the share and encode its first seconds."""
        if assigned.get("protocol") != channel.PROTOCOL:
            raise ConfigError(
                f"the master speaks version {assigned.get('protocol')} of the workers' messages, this host version "
                f"{channel.PROTOCOL}: install the same tailgate on both"
            )
        worker, folder = int(assigned["worker"]), Path(assigned["records"])
        if self._keep is None:
            _check_one_host(assigned["host"])
        else:
            folder = folder_for(self._keep, "/".join(folder.parts[-2:]))
            self._compare_clocks()
        config = read(TrialConfig, assigned["config"], where="generator")
        share = Schedule.parse(assigned["share"], config.arms)
        clock = None if self._keep is None else self._clock
        generator = self._load.begin(config, worker=worker, records=str(folder), clock=clock)
        if self._keep is not None:
            self._follow(folder / f"requests-{worker}.arrow")
        generator.load(share)
        generator.connect()
        if generator.failure is not None:
            raise ConfigError(generator.failure)

    def _compare_clocks(self) -> None:
        """Compare the clocks until their offset is known well enough to begin."""
        until_s = time.monotonic() + _MASTER_WITHIN_S
        while self._clock.count < _EXCHANGES_FIRST:
            if time.monotonic() > until_s:
                raise ConfigError(f"the master did not answer within {_MASTER_WITHIN_S:g} s: see its log")
            self._compared.clear()
            self._send(channel.CLOCK, {"sent_ns": now_ns()})
            self._compared.wait(_ANSWER_WITHIN_S)

    def _follow(self, records: Path) -> None:
        """Copy the records to the master, and tell it how this process stands."""
        log = self._load.log
        assert log is not None
        self._sender = FileSender(records, send=partial(self._send, channel.FILE))
        log.on_write = self._send_account
        log.refresh()  # the master knows from now on that this process exists
        gevent.spawn(self._compare_loop)

    def _send_account(self, account: dict[str, Any]) -> None:
        if self._sender is not None and not self._sender.missing_bytes:
            self._settled_ns = account["settled_ns"]  # by now on the master's disk
        self._send(channel.ACCOUNT, {**account, "settled_ns": self._settled_ns})

    def _compare_loop(self) -> None:
        self._last_message_ns = now_ns()
        while not self._reported:
            gevent.sleep(_COMPARE_EVERY_S)
            self._send(channel.CLOCK, {"sent_ns": now_ns()})
            if now_ns() - self._last_message_ns > MASTER_SILENT_S * 1e9:
                error = f"the master has been silent for {MASTER_SILENT_S:g} s"
                logger.error("%s; what was recorded is kept here", error)
                self._environment.process_exit_code = 1
                self._finish(error, 0.0)
                self._runner.quit()

    # --- Driving ------------------------------------------------------------------------------------------------------

    def _drive(self, start_ns: int) -> None:
        generator, log = self._load.generator, self._load.log
        if generator is None or log is None:
            return None
        try:
            generator.run(start_ns - self._clock.best.offset_ns)
        except Exception as error:
            return self._finish(self._reason(error), _SHIP_WITHIN_S)
        if self._load.generator is not generator:
            return None  # stopped by another, which also recorded what was in flight
        if generator.failure is None:
            log.complete = True
        return self._finish(generator.failure, _SHIP_WITHIN_S)

    def _finish(self, error: str | None, ship_within_s: float) -> None:
        """Send the master every record, or what it lacks, and that this process is done."""
        if self._reported:
            return
        self._reported = True
        if (log := self._load.log) is not None:
            log.error = error or log.error
        self._load.close()
        missing, sender = "", self._sender
        if sender is not None:
            if not sender.wait_complete(ship_within_s):
                missing = (
                    f"{sender.missing_bytes} bytes of {sender.path.name} did not reach the master: "
                    f"they are in {sender.path.parent} on {socket.gethostname()}"
                )
            sender.close()
        self._send(channel.DONE, {"error": error, "missing": missing})


def _check_one_host(host: str) -> None:
    """Raise ConfigError where `host` is not this one, as far as both can tell."""
    if host and host_identity() and host != host_identity():
        raise ConfigError(
            f"the worker on {socket.gethostname()} shares no clock with the master: "
            "start it with `tailgate worker --master HOST:PORT`"
        )
