"""A load process's side of a scheduled trial: prepares its share, waits for the start, drives, reports the end.

With `keep` it shares no disk and no clock with the master: the share comes over Locust's channel, records are kept in
a folder under `keep` and sent back, and the clocks are compared before and all through the trial.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from gevent.event import AsyncResult
from locust.env import Environment
from locust.exception import RPCError

from loadtests.generator.load_log import LoadLog
from loadtests.generator.trial_config import TrialConfig
from loadtests.traffic.schedule import Schedule
from loadtests.workers.clock_offsets import ClockComparison, Exchange, clock_identity, host_identity
from loadtests.workers.host_watch import HostWatch
from loadtests.workers.load_process import LoadProcess
from loadtests.workers.messages import (
    ACCOUNT,
    ASSIGN,
    CLOCK,
    DONE,
    END,
    KEPT,
    MACHINES,
    PART,
    PROTOCOL,
    READY,
    ROWS,
    START,
    STOP,
)
from loadtests.workers.shipping import Outbox, new_folder
from servers.clock import now_ns
from servers.fields import ConfigError

logger = logging.getLogger("tailgate")

_EXCHANGES_FIRST = 20
_ANSWER_WITHIN_S = 5.0
_TRIES = 12
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
        self._answers: dict[str, AsyncResult] = {}
        self._outbox: Outbox | None = None
        self._watch: HostWatch | None = None
        self._heard_ns = 0
        self._settled_ns: int | None = None
        self._reported = False
        listeners: dict[str, Callable[[dict[str, Any]], Any]] = {
            ASSIGN: lambda data: gevent.spawn(self._prepare, **data),
            START: lambda data: gevent.spawn(self._drive, int(data["start_ns"])),
            END: self._on_end,
            STOP: lambda data: gevent.spawn(self._finish, None, _SHIP_WITHIN_S_STOPPED),
        }
        if keep is not None:
            listeners |= {
                PART: lambda data: None,
                MACHINES: lambda data: None,
                CLOCK: self._on_clock,
                KEPT: self._on_kept,
            }
        for kind, listener in listeners.items():
            self._runner.register_message(kind, partial(self._receive, kind, listener))

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _receive(
        self, kind: str, listener: Callable[[dict[str, Any]], Any], environment: Environment, msg: Any, **_: Any
    ) -> None:
        self._heard_ns = now_ns()
        listener(msg.data)
        waiting = self._answers.get(kind)
        if waiting is not None:
            waiting.set(msg.data)

    def _on_clock(self, data: dict[str, Any]) -> None:
        if data["identity"] and data["identity"] == clock_identity():
            self._clock.same()
        self._clock.add(Exchange(data["sent_ns"], data["received_ns"], data["answered_ns"], self._heard_ns))

    def _on_end(self, data: dict[str, Any]) -> None:
        generator = self._load.generator
        if generator is None:
            return
        offset_ns = self._clock.at(now_ns())[0]
        if data.get("at_ns"):
            generator.end_at(int(data["at_ns"]) - offset_ns)
        for arm, at_ns in data.get("arms", {}).items():
            generator.end_arm_at(arm, int(at_ns) - offset_ns)

    def _on_kept(self, data: dict[str, Any]) -> None:
        if self._outbox is not None:
            self._outbox.acknowledged(int(data["number"]))

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        try:
            self._runner.send_message(kind, data)
        except RPCError as error:  # records stay in the outbox and are sent again
            logger.warning("a message to the master could not be sent: %s", error)

    def _ask(self, kind: str, data: Callable[[], dict[str, Any]], accepts: Callable[[dict[str, Any]], bool]) -> Any:
        """The master's answer. The request is sent again where none came, because a full queue drops messages."""
        for _ in range(_TRIES):
            self._answers[kind] = AsyncResult()
            self._send(kind, data())
            with gevent.Timeout(_ANSWER_WITHIN_S, False):
                answer = self._answers[kind].get()
                if accepts(answer):
                    return answer
        raise ConfigError(f"the master did not answer within {_TRIES * _ANSWER_WITHIN_S:g} s: see its log")

    # --- Preparing ----------------------------------------------------------------------------------------------------

    def _prepare(self, **assigned: Any) -> None:
        try:
            if assigned.get("protocol") != PROTOCOL:
                raise ConfigError(
                    f"the master speaks version {assigned.get('protocol')} of the workers' messages, this host version "
                    f"{PROTOCOL}: install the same tailgate on both"
                )
            worker, workers = int(assigned["worker"]), int(assigned["workers"])
            if self._keep is None:
                _check_one_host(assigned["host"])
                share = Schedule.read(assigned["schedule"]).share(worker, workers)
                config_path, folder = Path(assigned["trial_config"]), Path(assigned["records"])
            else:
                share_path, config_path = self._share_sent(worker, self._keep)
                share, folder = Schedule.read(share_path), share_path.parent
            config = TrialConfig.read(config_path)
            generator = self._load.begin(
                config,
                worker=worker,
                workers=workers,
                planned=share.copies(config.arms),
                records=str(folder),
                on_written=None if self._outbox is None else self._outbox.written,
            )
            if self._keep is not None:
                self._follow_clock()
                self._watch_host(config, folder, worker)
            generator.load(share)
            generator.connect()
            if generator.failure is not None:
                raise ConfigError(generator.failure)
        except ConfigError as error:
            self._send(DONE, {"error": f"{self._where}{error}"})
        except Exception as error:  # the master waits for an answer, whatever it is
            logger.exception("the share of the schedule could not be prepared")
            self._send(DONE, {"error": f"{self._where}{type(error).__name__}: {error}"})
        else:
            self._send(READY, {})

    @property
    def _where(self) -> str:
        return "" if self._keep is None else f"worker on {socket.gethostname()}: "

    def _share_sent(self, worker: int, keep: Path) -> tuple[Path, Path]:
        """Where the share and the trial lie that the master has sent, in a new folder under `keep`."""
        for _ in range(_EXCHANGES_FIRST):
            self._compare()
            if self._clock.summary(now_ns())["same"]:
                break
        first = self._part(0)
        folder = new_folder(keep, str(first["name"]))
        share_path, config_path = folder / "schedule.arrow", folder / "generator.json"
        try:
            config_path.write_text(first["config"], encoding="utf-8")
            with share_path.open("wb") as file:
                file.write(first["bytes"])
                for number in range(1, int(first["of"])):
                    file.write(self._part(number)["bytes"])
        except OSError as error:
            raise ConfigError(f'"{folder}" cannot be written ({error}): give another --keep') from None
        self._outbox = Outbox(
            folder / f"requests-{worker}.arrow",
            send=lambda message: self._send(ROWS, message),
            clock=lambda: self._clock.map_at(now_ns()),
        )
        return share_path, config_path

    def _part(self, number: int) -> Any:
        return self._ask(PART, lambda: {"part": number}, lambda answer: answer["part"] == number)

    def _compare(self) -> None:
        self._ask(CLOCK, lambda: {"sent_ns": now_ns()}, lambda answer: True)

    def _follow_clock(self) -> None:
        log = self._load.log
        assert log is not None
        log.clock = self._clock_now()
        log.on_write = lambda account, progress: self._send(
            ACCOUNT, {"account": {**account, "settled_ns": self._settled_there(account)}, "progress": progress}
        )
        log.refresh()  # the master knows from now on that this process exists
        gevent.spawn(self._compare_for_ever, log)

    def _settled_there(self, account: Mapping[str, Any]) -> int | None:
        """Up to which instant of the master's clock all that was due has ended and is on its disk."""
        settled_ns = account.get("settled_ns")
        if settled_ns is not None and self._outbox is not None and not self._outbox.unacknowledged_rows:
            self._settled_ns = int(settled_ns) + self._clock.at(now_ns())[0]
        return self._settled_ns

    def _watch_host(self, config: TrialConfig, folder: Path, worker: int) -> None:
        if not config.sample_s:
            return
        path, host = folder / f"machines-{worker}.arrow", f"worker-{worker}"
        try:
            self._watch = HostWatch(path, trial=config.trial, host=host, sample_s=config.sample_s)
        except OSError as error:
            logger.warning("this host is not watched: %s", error)

    def _clock_now(self) -> dict[str, Any]:
        return {**self._clock.summary(now_ns()), "host": socket.gethostname()}

    def _compare_for_ever(self, log: LoadLog) -> None:
        self._heard_ns = now_ns()
        while not self._reported:
            gevent.sleep(_COMPARE_EVERY_S)
            self._send(CLOCK, {"sent_ns": now_ns()})
            log.clock = self._clock_now()
            if now_ns() - self._heard_ns > MASTER_SILENT_S * 1e9:
                log.error = f"the master has been silent for {MASTER_SILENT_S:g} s"
                logger.error("%s; what was recorded is kept here", log.error)
                self._environment.process_exit_code = 1
                self._finish(log.error, 0.0)
                self._runner.quit()

    # --- Driving ------------------------------------------------------------------------------------------------------

    def _drive(self, start_ns: int) -> None:
        generator, log = self._load.generator, self._load.log
        if generator is None or log is None:
            return
        try:
            ended = generator.run(start_ns - self._clock.at(now_ns())[0])
        except Exception as error:
            logger.exception("the schedule could not be kept")
            log.error = f"{self._where}{type(error).__name__}: {error}"
            self._finish(log.error, _SHIP_WITHIN_S)
            return
        if self._load.generator is not generator:
            return  # stopped from outside, which also recorded what was in flight
        if generator.failure is None:
            log.complete = True
        if not ended:
            logger.warning("%d requests had not ended when the drain time was over", generator.inflight)
        self._finish(generator.failure, _SHIP_WITHIN_S)

    def _finish(self, error: str | None, ship_within_s: float) -> None:
        """The master has every record, or knows how many it lacks, and that this process is done."""
        if self._reported:
            return
        self._reported = True
        self._load.close()
        self._hand_over_samples(ship_within_s)
        report: dict[str, Any] = {"error": error}
        if self._outbox is not None:
            if not self._outbox.wait_empty(ship_within_s):
                report["missing_rows"] = self._outbox.unacknowledged_rows
                report["kept"] = f"they are in {self._outbox.path.parent} on {socket.gethostname()}"
            self._outbox.close()
        self._send(DONE, report)

    def _hand_over(self, part: dict[str, Any]) -> None:
        """The master has the part, and with the last one the samples on disk. Otherwise ConfigError."""
        answer = self._ask(MACHINES, lambda: part, lambda answer: answer["part"] == part["part"])
        if answer.get("error"):
            raise ConfigError(answer["error"])

    def _hand_over_samples(self, within_s: float) -> None:
        """The master has what was seen of this host, or the account says why not."""
        watch, self._watch = self._watch, None
        log = self._load.log
        if watch is None or log is None:
            return
        monitor = watch.stop()
        try:
            parts = watch.samples(self._clock.at(now_ns())[0])
            with gevent.Timeout(within_s, ConfigError(f"the master did not take them within {within_s:g} s")):
                for number, part in enumerate(parts):
                    self._hand_over({"part": number, "of": len(parts), "bytes": part})
        except ValueError as error:  # RecordError and ConfigError
            logger.warning("samples of this host stay here: %s", error)
            monitor["gaps"].append({"host": f"worker-{log.worker}", "at_ns": None, "why": str(error)})
        log.monitor = monitor
        try:
            log.write()
        except OSError as error:
            logger.warning("the account cannot be written: %s", error)


def _check_one_host(host: str) -> None:
    """This host is the master's, as far as both can tell; otherwise ConfigError."""
    if host and host_identity() and host != host_identity():
        raise ConfigError(
            f"the worker on {socket.gethostname()} shares no clock with the master: "
            "start it with `tailgate worker --master HOST:PORT`"
        )
