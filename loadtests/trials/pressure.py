"""Weigh on the machines of a trial as [pressure] says: one neighbour process, the same for all arms.

It runs from `start_s` to `end_s` of the traffic. Pressure that begins with the traffic is on before the load starts.
`trial.json` has from when to when it was on, or why not; the check *pressure* reads it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from loadtests.monitor.gpus import device_name
from loadtests.trials.context import RunError, TrialContext
from loadtests.trials.machines import MonitorProcess
from loadtests.trials.neighbour import Weighs
from loadtests.trials.processes import child_environment
from servers.clock import now_ns
from servers.processes import Child, messages_of

NEIGHBOUR_COMMAND = (sys.executable, "-P", "-m", "loadtests.trials.neighbour")
_START_S = 60.0
_POLL_S = 0.05


class Pressure:
    """The pressure of one trial. `poll` is called often while traffic flows; without [pressure] nothing happens."""

    def __init__(
        self, trial: TrialContext, monitor: MonitorProcess, *, command: Sequence[str] = NEIGHBOUR_COMMAND
    ) -> None:
        self._trial, self._monitor, self._command = trial, monitor, command
        self._settings = trial.experiment.pressure
        self._child: Child | None = None
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """Put on what begins with the traffic. Raises RunError where it cannot be: nothing is measured yet."""
        if not self._settings.weighs:
            return
        devices = {device_name(arm.model.device) for arm in self._trial.experiment.own_arms}
        self._facts = {**self._settings.model_dump(), "devices": sorted(devices)}
        self._facts |= {"start_ns": None, "end_ns": None, "error": None}
        self._trial.facts.pressure = self._facts
        if self._settings.start_s:
            return
        self._trial.status.phase, self._trial.status.detail = "starting the pressure", ""
        self._spawn()
        deadline = time.monotonic() + _START_S
        while self._facts["start_ns"] is None:
            self._trial.check()
            self._listen(_POLL_S)
            if self._facts["error"] is None and time.monotonic() > deadline:
                self._lose(f"the neighbour was not ready after {_START_S:g} s")
            if error := self._facts["error"]:
                raise RunError(f"the pressure cannot be put on: {error}: lower what [pressure] asks for")

    def poll(self) -> None:
        """Begin and end when it is time, and note what became of the neighbour."""
        start_ns = self._trial.facts.start_ns
        if not self._facts or start_ns is None:
            return
        self._listen(0.0)
        elapsed_s, settings = (now_ns() - start_ns) / 1e9, self._settings
        is_over = 0 < settings.end_s <= elapsed_s
        if is_over:
            self.stop()
        elif self._child is None and self._facts["error"] is None and elapsed_s >= settings.start_s:
            self._spawn()

    def stop(self) -> None:
        """End the pressure, if it is on."""
        if self._child is None:
            return
        self._listen(0.0)
        self._child.kill()
        self._facts["end_ns"] = self._facts["end_ns"] or now_ns()
        self._child = None
        self._trial.keep_facts()

    def _spawn(self) -> None:
        command = [*self._command, "--processors", str(self._settings.processors)]
        if self._settings.gpu_gib:
            indices = [device.removeprefix("cuda:") for device in self._facts["devices"]]
            command += ["--gib", str(self._settings.gpu_gib), "--gpus", *indices]
        log = self._trial.logs / "neighbour.log"
        parse = messages_of(Weighs)
        self._child = Child("neighbour", command, log_path=log, environment=child_environment(), parse=parse)
        self._monitor.name("neighbour", self._child.pid)

    def _listen(self, timeout_s: float) -> None:
        child = self._child
        if child is None or self._facts["error"] is not None:
            return
        messages, ended = child.hear(timeout_s)
        for message in messages:
            assert isinstance(message, Weighs)
            self._facts["start_ns"] = message.at_ns
            if message.error:
                return self._lose(message.error)
        if ended is not None:
            self._lose(f"the neighbour {child.ending(ended, 1)}")

    def _lose(self, why: str) -> None:
        self._facts |= {"error": why, "end_ns": now_ns()}
        self._trial.status.note(f"the pressure is not what was asked: {why}")
        self._trial.keep_facts()
