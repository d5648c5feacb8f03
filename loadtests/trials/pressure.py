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

    def __init__(
        self, trial: TrialContext, monitor: MonitorProcess, *, command: Sequence[str] = NEIGHBOUR_COMMAND
    ) -> None:
        self._trial, self._monitor, self._command = trial, monitor, command
        self._settings = trial.experiment.pressure
        self._child: Child | None = None
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """Put on the pressure. Raises RunError where it cannot be: nothing is measured yet."""
        if not self._settings.weighs:
            return
        devices = sorted({device_name(arm.model.device) for arm in self._trial.experiment.own_arms})
        known = {"devices": devices, "start_ns": None, "end_ns": None, "error": None}
        self._trial.facts.pressure = self._facts = {**self._settings.model_dump(), **known}
        self._trial.status.phase, self._trial.status.detail = "starting the pressure", ""
        child, deadline = self._spawn(), time.monotonic() + _START_S
        while self._facts["start_ns"] is None:
            self._trial.check()
            self._listen(child, _POLL_S)
            late = f"the neighbour was not ready after {_START_S:g} s" if time.monotonic() > deadline else None
            if error := self._facts["error"] or late:
                raise RunError(f"the pressure cannot be put on: {error}: lower what [pressure] asks for")

    def poll(self) -> None:
        """Record whether the neighbour ended."""
        if self._child is not None:
            self._listen(self._child)

    def stop(self) -> None:
        """End the pressure, if it is on."""
        if self._child is None:
            return
        self._listen(self._child)
        self._child.kill()
        self._facts["end_ns"] = self._facts["end_ns"] or now_ns()
        self._child = None
        self._trial.keep_facts()

    def _spawn(self) -> Child:
        size, processors = int(self._settings.gpu_gib * (1 << 30)), self._settings.processors
        gpus = [device.removeprefix("cuda:") for device in self._facts["devices"] if size]
        command, log_path = [*self._command, str(processors), str(size), *gpus], self._trial.logs / "neighbour.log"
        parse, environment = messages_of(Weighs), child_environment()
        self._child = child = Child("neighbour", command, log_path=log_path, environment=environment, parse=parse)
        self._monitor.name("neighbour", child.pid)
        return child

    def _listen(self, child: Child, timeout_s: float = 0.0) -> None:
        """Take when the pressure was on, and how the neighbour ended, once."""
        facts = self._facts
        messages, ended = child.receive(timeout_s)
        for message in cast("list[Weighs]", messages):
            facts["start_ns"] = message.at_ns
        if ended is not None and facts["error"] is None:
            facts |= {"error": f"the neighbour {child.ending(ended, 1)}", "end_ns": now_ns()}
            self._trial.status.note(f"the pressure is not what was asked: {facts['error']}")
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
