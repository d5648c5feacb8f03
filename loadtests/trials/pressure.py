"""Weigh on the machines of a trial as [pressure] says: one neighbour process, the same for all arms.

It is on before the load starts. `trial.json` states from when to when it was on, or why not; the check *pressure* reads
it. The neighbour is this module as a program.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tailgate.loadtests.monitor.gpus import device_name
from tailgate.loadtests.trials.context import RunError, TrialContext
from tailgate.loadtests.trials.machines import MonitorProcess
from tailgate.loadtests.trials.processes import child_environment
from tailgate.servers.clock import now_ns
from tailgate.servers.processes import Child, messages_of, say

NEIGHBOUR_COMMAND = (sys.executable, "-P", "-m", "tailgate.loadtests.trials.pressure")
_START_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Weighs:
    """Since when the pressure is on."""

    at_ns: int


class Pressure:
    """The pressure of one trial. `poll` is called often while traffic flows; without [pressure] nothing happens."""

    def __init__(self, trial: TrialContext, monitor: MonitorProcess) -> None:
        self._trial, self._monitor = trial, monitor
        self._child: Child | None = None
        self._facts: dict[str, Any] = {"start_ns": None, "end_ns": None, "error": None}

    def start(self) -> None:
        """Put on the pressure. Raises RunError where it cannot be: nothing is measured yet."""
        settings, facts, trial = self._trial.experiment.pressure, self._facts, self._trial
        if not settings.weighs:
            return
        facts |= settings.model_dump()
        trial.facts.pressure = facts
        trial.status.phase, trial.status.detail = "starting the pressure", ""
        size = int(settings.gpu_gib * (1 << 30))
        gpus = {device_name(arm.model.device).removeprefix("cuda:") for arm in trial.experiment.managed_arms if size}
        self._child = Child(
            "neighbour",
            [*NEIGHBOUR_COMMAND, str(settings.processors), str(size), *sorted(gpus)],
            log_path=trial.logs / "neighbour.log",
            environment=child_environment(),
            parse=messages_of(Weighs),
        )
        self._monitor.name("neighbour", self._child.pid)
        deadline = time.monotonic() + _START_S
        while facts["start_ns"] is None:
            trial.check()
            self.poll(_POLL_S)
            late = f"the neighbour was not ready after {_START_S:g} s" if time.monotonic() > deadline else None
            if error := facts["error"] or late:
                raise RunError(f"the pressure cannot be put on: {error}: lower what [pressure] asks for")

    def poll(self, timeout_s: float = 0.0) -> None:
        """Record when the pressure was on, and how the neighbour ended, once."""
        if self._child is None:
            return
        messages, ended = self._child.receive(timeout_s)
        for message in cast("list[Weighs]", messages):
            self._facts["start_ns"] = message.at_ns
        if ended is not None and self._facts["error"] is None:
            self._facts |= {"error": f"the neighbour {self._child.ending(ended, 1)}", "end_ns": now_ns()}
            self._trial.status.note(f"the pressure is not what was asked: {self._facts['error']}")
            self._trial.keep_facts()

    def stop(self) -> None:
        """End the pressure, if it is on."""
        self.poll()
        if self._child is not None:
            self._child.kill()
            self._child = None
            self._facts["end_ns"] = self._facts["end_ns"] or now_ns()
            self._trial.keep_facts()


def hold(gpus: Sequence[int], size: int) -> None:
    """Take `size` bytes on each GPU by the driver, which makes them resident at once. Raises OSError."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")

    call("cuInit", 0)
    for gpu in gpus:
        device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDeviceGet", ctypes.byref(device), gpu)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))


def burn() -> None:
    """Keep one processor busy. A digest of a large block runs without the interpreter's lock."""
    block = bytes(1 << 20)
    while True:
        hashlib.sha256(block)


def main(processors: int, size: int, *gpus: int) -> None:
    """Act as the neighbour: hold `size` bytes on each GPU, keep processors busy, and say `Weighs`. Never returns."""
    if gpus:
        hold(gpus, size)
    for _ in range(processors):
        threading.Thread(target=burn, daemon=True).start()
    say(Weighs(at_ns=now_ns()))
    threading.Event().wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
