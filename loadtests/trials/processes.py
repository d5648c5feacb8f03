"""What the processes of a run are given: their environment, and processors in turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from tailgate.analysis.wording import counted
from tailgate.loadtests.provider import TOKEN_VARIABLE as PROVIDER_TOKEN_VARIABLE
from tailgate.loadtests.trials.context import RunError
from tailgate.loadtests.workers.channel import TOKEN_VARIABLE
from tailgate.servers.clock import anchored_environment
from tailgate.servers.complaint import LOGS
from tailgate.servers.config import ArmConfig


def child_environment(logs: Path | None = None) -> dict[str, str]:
    """Return this process's environment with the shared clock and the folder for tracebacks, without variables of
    Locust and without the secrets of its channel and of those who ask about a candidate."""
    secrets = {TOKEN_VARIABLE, PROVIDER_TOKEN_VARIABLE}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_") and key not in secrets}
    return {**kept, **anchored_environment(), **({} if logs is None else {LOGS: str(logs.resolve())})}


def thread_variables(arm: ArmConfig) -> dict[str, str]:
    """Return what sizes the thread pools of an arm on the CPU. They are sized once, when torch is imported."""
    threads = arm.engine.threads
    if not threads or arm.model.device.startswith("cuda"):
        return {}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


class ProcessorTurns:
    """Have replicas change processors every `every_s` of the traffic, so that no processor's speed looks like an arm's.

    On a shared host a processor whose core a neighbour works on runs at half the speed of another, for tens of seconds,
    and a guest cannot see which. The usable processors are cut into as many sets of equal size, neighbours together, as
    there are replicas, and after each turn every replica takes the set of the one before it: after as many turns as
    there are sets each has had all of them. 0 is never. `poll` is called many times a turn; `stop` gives every thread
    all processors back.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._pids: tuple[int, ...] = ()
        self._sets: list[Sequence[int]] = []
        self._next_s = 0.0
        self._turns = 0

    def start(self, pids: Sequence[int]) -> None:
        """Begin the turns of these processes. Raises RunError where there are fewer processors."""
        if not self._every_s:
            return
        usable = sorted(os.sched_getaffinity(0))
        each = len(usable) // max(1, len(pids))  # all may have died
        if not each:
            few = f"{counted(len(pids), 'replica')} cannot take turns on {counted(len(usable), 'processor')}"
            raise RunError(f"machines.processor_turn_s is {self._every_s:g}: {few}: set it to 0")
        self._pids = tuple(pids)
        self._sets = [usable[first * each : (first + 1) * each] for first in range(len(pids))]
        self.poll()

    def poll(self) -> None:
        """Move the replicas on, if their turn is over. Raises RunError where the kernel refuses."""
        if not self._sets or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._every_s
        try:
            for place, pid in enumerate(self._pids):
                _bind(pid, self._sets[(place + self._turns) % len(self._sets)])
        except OSError as error:
            raise RunError(f"machines.processor_turn_s is {self._every_s:g}: {error}: set it to 0") from None
        self._turns += 1

    def stop(self) -> None:
        """Let every thread run where it might before."""
        for pid in self._pids:
            with contextlib.suppress(OSError):
                _bind(pid, os.sched_getaffinity(0))


def _bind(pid: int, processors: Collection[int]) -> None:
    """Bind every thread of the process and its descendants; skip one that has ended. Raises OSError where the kernel
    refuses."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for thread in member.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, processors)
