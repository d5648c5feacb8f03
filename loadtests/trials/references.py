"""How fast each device and the host are before and after a trial, apart from any arm: work that never changes.

A process for each device that an arm of ours uses, each with the threads of its arms. They start together, as importing
torch takes most of the time, and measure one after the other, so that none disturbs another on the host: before a trial
in the order of the arms and after it backwards, as a host may grow faster or slower meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from loadtests.experiments.model import OwnArm
from loadtests.monitor.gpus import device_name
from loadtests.trials.context import TrialContext
from loadtests.trials.processes import Child, child_environment, describe_exit, thread_variables
from servers.clock import now_ns

REFERENCE_COMMAND = (sys.executable, "-P", "-m", "servers.reference")
START_TIMEOUT_S = 120.0  # torch from a cold disk, and a device that others keep busy

_POLL_S = 0.1

When = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The process of one device, and when it must be ready."""

    device: str
    child: Child
    deadline: float


class References:
    """Measures the devices of one trial. What cannot be measured is a row with its error, and never ends the run."""

    def __init__(
        self,
        trial: TrialContext,
        *,
        command: Sequence[str] = REFERENCE_COMMAND,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._trial = trial
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._late = f"was not ready after {start_timeout_s:g} s"
        self._seconds = trial.experiment.machines.reference_s
        # A process may be slow and is not stuck while it measures: its repetitions have no fixed length.
        self._limit_s = 30.0 + 10 * self._seconds
        self._running: list[_Measuring] = []

    def measure(self, when: When) -> None:
        """trial.json has a row for each device, and every process of it is gone."""
        arms = {device_name(arm.config.model.device): arm for arm in self._trial.experiment.own_arms}
        if not self._seconds or not arms:
            return
        status, facts = self._trial.status, self._trial.facts
        status.phase, status.detail = "measuring the machines", ""
        try:
            for device, arm in arms.items() if when == "before" else reversed(arms.items()):
                self._start(device, arm, when)
            # None measures while another still warms up.
            answers = [self._message(process, process.deadline, self._late) for process in self._running]
            for process, answer in zip(self._running, answers, strict=True):
                status.detail = process.device
                row = {"host": "run", "device": process.device, "when": when, "at_ns": now_ns(), "error": None}
                row |= self._measured(process) if "ready" in answer else answer
                facts.references.append(row)
                if row["error"]:
                    status.note(f"{process.device} was not measured {when} the trial: {row['error']}")
        finally:
            self.kill()
            for process in self._running:
                process.child.kill()
            self._running = []
            status.detail = ""
            self._trial.keep_facts()

    def kill(self) -> None:
        """Every process was sent SIGKILL. Safe in a signal handler."""
        for process in self._running:
            process.child.kill_now()

    def _start(self, device: str, arm: OwnArm, when: When) -> None:
        name = f"reference-{when}-{device.replace(':', '-')}"
        command = [*self._command, "--device", device, "--seconds", f"{self._seconds:g}"]
        child = Child(
            name,
            command,
            log_path=self._trial.logs / f"{name}.log",
            environment=child_environment() | thread_variables(arm.config),
            commands=True,
        )
        self._running.append(_Measuring(device, child, time.monotonic() + self._start_timeout_s))

    def _measured(self, process: _Measuring) -> dict[str, Any]:
        """What the process, which is ready, says of its device, or {"error": why it says nothing}."""
        process.child.command("go")
        return self._message(process, time.monotonic() + self._limit_s, f"took over {self._limit_s:g} s")

    def _message(self, process: _Measuring, deadline: float, late: str) -> dict[str, Any]:
        """The next JSON object that the process prints. Others' lines on its stdout are in its log."""
        child = process.child
        while True:
            self._trial.check()
            ended = child.poll()  # read first: what it says, it says before it ends
            line = child.line(_POLL_S)
            if line is None:
                if ended is not None:
                    return {"error": f"the reference ended with {describe_exit(ended)}: {child.log_tail(1)}"}
                if time.monotonic() > deadline:
                    return {"error": f"the reference {late}: see {child.log_path}"}
                continue
            with suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    return message
