"""The master's side of a scheduled trial: hands out shares, starts all load processes at one instant, gathers records.

In a run without workers one process is both sides, and Locust's local runner delivers the messages to itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.exception import RPCError
from locust.runners import STATE_MISSING, MasterRunner

from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.generator.clock_offsets import host_identity
from tailgate.loadtests.generator.trial_config import END_FILE, TrialConfig
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.workers import channel
from tailgate.loadtests.workers.file_copy import FileReceiver
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError, write_failure

logger = logging.getLogger("tailgate")

START_DELAY_NS = 2_000_000_000
_WATCH_EVERY_S = 0.2
_STOP_WITHIN_S = 8.0  # for the last records after an interrupt


@dataclass(slots=True)
class _Load:
    """One load process as the master knows it."""

    number: int
    client_id: str
    account: dict[str, Any] | None = None  # the last that came over the network; None: it writes its own file
    records: FileReceiver | None = None  # that come from another host
    lost: str | None = None


class Master:
    """Assigns shares, starts, waits for the last answer, quits Locust."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        assert environment.runner is not None
        self._runner: Any = environment.runner
        assert environment.parsed_options is not None
        self._options: Any = environment.parsed_options
        self._folder = Path(self._options.trial).resolve()
        self._loads: dict[str, _Load] = {}
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._started = self._quitting = False
        self._error: str | None = None
        for kind, listener in (
            (channel.READY, self._on_ready),
            (channel.DONE, self._on_done),
            (channel.CLOCK, self._on_clock),
            (channel.FILE, self._on_file),
            (channel.ACCOUNT, self._on_account),
        ):
            self._runner.register_message(kind, partial(self._receive, listener))
        if remote := int(self._options.remote_workers):
            # With --processes Locust expects just the processes of this host.
            self._options.expect_workers = (self._options.processes or 0) + remote

    def assign(self) -> None:
        """Hand every load process that is connected now its share."""
        ids = ["local"]  # as Locust's local runner calls itself
        if self._is_master:
            clients = self._runner.clients
            ids = sorted(
                (client.id for client in clients.ready + clients.running + clients.spawning),
                key=self._runner.get_worker_index,
            )
        config = TrialConfig.read(self._folder / "generator.json")
        schedule = Schedule.read(self._folder / "schedule.arrow", config.arms)
        self._waiting, self._running = set(ids), set(ids)
        shared = {
            "protocol": channel.PROTOCOL,
            "host": host_identity(),
            "records": str(self._folder),
            "config": config.to_dict(),
        }
        for number, client_id in enumerate(ids):
            load = self._loads[client_id] = _Load(number=number, client_id=client_id)
            share = schedule.share(number, len(ids)).to_bytes()
            self._send(channel.ASSIGN, {**shared, "worker": number, "share": share}, load)
        gevent.spawn(self._watch)

    def stop(self) -> None:
        """Give load processes on other hosts some seconds to stop and to hand over their last records."""
        remote = [load for load in self._loads.values() if load.account is not None and load.client_id in self._running]
        for load in remote:
            self._send(channel.STOP, {}, load)
        with gevent.Timeout(_STOP_WITHIN_S, False):
            while any(load.client_id in self._running for load in remote):
                gevent.sleep(0.05)

    def close(self) -> None:
        """Stop load processes on other hosts, and complete the files that came from them."""
        self.stop()
        for load in self._loads.values():
            if load.records is not None:
                load.records.close()

    # --- Messages -----------------------------------------------------------------------------------------------------

    @property
    def _is_master(self) -> bool:
        return isinstance(self._runner, MasterRunner)

    def _send(self, kind: str, data: dict[str, Any], load: _Load) -> None:
        try:
            self._runner.send_message(kind, data, load.client_id)
        except RPCError as error:
            logger.warning("a message to load process %d could not be sent: %s", load.number, error)

    def _receive(
        self, listener: Callable[[_Load, dict[str, Any]], None], environment: Environment, msg: Any, **_: Any
    ) -> None:
        if (load := self._loads.get(str(msg.node_id))) is not None:
            listener(load, msg.data)

    def _on_ready(self, load: _Load, data: dict[str, Any]) -> None:
        self._waiting.discard(load.client_id)
        self._start_when_ready()

    def _on_done(self, load: _Load, data: dict[str, Any]) -> None:
        if data["error"]:
            self._fail(data["error"])
        if data["missing"]:
            self._mark_lost(load, data["missing"])
        self._ended(load)

    def _on_clock(self, load: _Load, data: dict[str, Any]) -> None:
        answer = {"sent_ns": data["sent_ns"], "received_ns": now_ns()}
        self._send(channel.CLOCK, {**answer, "answered_ns": now_ns()}, load)

    def _on_file(self, load: _Load, data: dict[str, Any]) -> None:
        try:
            if load.records is None:
                path = self._folder / f"requests-{load.number}.arrow"
                load.records = FileReceiver(path, confirm=lambda size: self._send(channel.HAVE, {"size": size}, load))
            load.records.take(data["at"], data["bytes"])
        except ConfigError as error:
            self._fail(f"records of load process {load.number} cannot be taken: {error}")

    def _on_account(self, load: _Load, data: dict[str, Any]) -> None:
        if load.lost is not None and load.client_id not in self._running and not data["complete"]:
            logger.warning("load process %d is back", load.number)
            load.lost = None
            self._running.add(load.client_id)
        load.account = data
        self._write_account(load)

    # --- The trial ----------------------------------------------------------------------------------------------------

    def _start_when_ready(self) -> None:
        if self._waiting or self._error is not None or not self._running or self._started:
            return
        self._started = True
        self._runner.send_message(channel.START, {"start_ns": now_ns() + START_DELAY_NS})

    def _ended(self, load: _Load) -> None:
        self._running.discard(load.client_id)
        self._waiting.discard(load.client_id)
        if self._running and self._error is None:
            self._start_when_ready()
            return
        if self._error is None and self._loads and all(item.lost for item in self._loads.values()):
            self._fail(f"every load process is lost: {load.lost}")
        self._quit()

    def _watch(self) -> None:
        """Send the time in end.json, at which the load ends early, when the file changes, and count a worker that died
        as done: what it flushed is kept, and the others go on."""
        path, sent = self._folder / END_FILE, ""
        while self._running:
            gevent.sleep(_WATCH_EVERY_S)
            with suppress(OSError):
                if (text := path.read_text(encoding="utf-8")) != sent:
                    sent = text
                    self._runner.send_message(channel.END, json.loads(text))
            for client_id in list(self._running) if self._is_master else ():
                node = self._runner.clients.get(client_id)
                if node is None or node.state == STATE_MISSING:
                    load = self._loads[client_id]
                    why = "it is no longer connected" if node is None else "it no longer answers"
                    logger.error("load process %d is lost (%s); its records end at its last flush", load.number, why)
                    self._mark_lost(load, why)
                    self._ended(load)

    def _fail(self, why: str) -> None:
        """End the trial without success."""
        logger.error("%s", why)
        if self._error is None:
            self._error = why
            self._quit()

    def _quit(self) -> None:
        # A failed request is a record, not a failure of the load process: the exit code says whether that one worked.
        self._environment.process_exit_code = 0 if self._error is None else 1
        if not self._quitting:
            self._quitting = True
            gevent.spawn(self._runner.quit)

    def _mark_lost(self, load: _Load, why: str) -> None:
        load.lost = why
        self._write_account(load)

    def _write_account(self, load: _Load) -> None:
        """Write generator-N.json of a load process that cannot write it here itself, or no longer does."""
        path = self._folder / f"generator-{load.number}.json"
        account = load.account
        if account is None:
            try:
                account = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                account = {"worker": load.number, "started": 0, "finished": 0, "complete": False}
        lost = {} if load.lost is None else {"lost": load.lost}
        try:
            write_document(path, {**account, **lost})
        except OSError as error:
            self._fail(f"records cannot be written: {write_failure(error)} and run again")
