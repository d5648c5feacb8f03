"""Replicas that take turns on the processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailgate.loadtests.trials import processes
from tailgate.loadtests.trials.context import RunError
from tailgate.loadtests.trials.processes import ProcessorTurns

# A thread and a child of its own, so that both are seen to be bound.
SLEEPER = (
    "import subprocess, sys, threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True); "
    "time.sleep(60)"
)


def bound(pid: int) -> set[int]:
    """Where the threads of the process may run; all may run in the same places."""
    (places,) = {frozenset(os.sched_getaffinity(int(path.name))) for path in Path(f"/proc/{pid}/task").iterdir()}
    return set(places)


def test_replicas_change_processors_after_each_turn_and_have_all_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, places = 100.0, dict[int, Any]()
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {3, 4, 5, 6, 9})
    monkeypatch.setattr(processes, "_bind", lambda pid, processors: places.update({pid: processors}))
    turns = ProcessorTurns(1.0)
    turns.start([1, 2])
    seen = []
    for _ in range(3):
        seen.append(dict(places))
        now += 0.5
        turns.poll()
        assert places == seen[-1]
        now += 0.6
        turns.poll()
    assert seen == [{1: [3, 4], 2: [5, 6]}, {1: [5, 6], 2: [3, 4]}, {1: [3, 4], 2: [5, 6]}]
    turns.stop()
    assert places == {1: {3, 4, 5, 6, 9}, 2: {3, 4, 5, 6, 9}}


def test_every_thread_of_a_process_and_of_its_children_is_bound() -> None:
    first = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        processes._bind(process.pid, [first])
        assert bound(process.pid) == bound(child) == {first}
        os.kill(child, 9)
        process.kill()


@pytest.mark.parametrize(
    ("usable", "words"), [({0}, "2 replicas cannot take turns on 1 processor"), ({0, 1}, "not permitted")]
)
def test_turns_that_cannot_be_taken_end_the_run_before_the_traffic(
    usable: set[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, processors: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: usable)
    monkeypatch.setattr(processes.os, "sched_setaffinity", refuse)
    turns = ProcessorTurns(1.0)
    with pytest.raises(RunError, match=f"machines.processor_turn_s is 1: .*{words}.*: set it to 0"):
        turns.start([os.getpid(), os.getpid()])
    turns.stop()
    turns.start([])  # every replica has died, of which the run says more
