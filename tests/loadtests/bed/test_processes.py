from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.bed.processes import Processes
from loadtests.bed.readings import Readings

# A process with a thread and a child of that thread; both tell their pids and end with their stdin.
FAMILY = """
import os, subprocess, sys, threading
code = "import sys; held = bytearray(30 << 20); print(1, flush=True); sys.stdin.read()"
def start():
    child = subprocess.Popen([sys.executable, "-c", code], stdin=sys.stdin, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    child.wait()
threading.Thread(target=start).start()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """The pids of a process and of its child."""
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    parent.communicate("")


def watched(said: list[dict[str, str]] | None = None) -> Processes:
    return Processes(Readings("run", ([] if said is None else said).append), root=os.getpid())


def test_a_process_is_sampled_with_its_descendants(family: tuple[int, int]) -> None:
    parent, child = family
    said: list[dict[str, str]] = []
    processes = watched(said)
    processes.watch("eager-0", pid=parent, arm="eager")
    processes.watch("child", pid=child)
    row, alone = processes.sample({parent: 1, child: 2, 1: 50})
    assert (row["kind"], row["name"], row["arm"], row["pid"]) == ("process", "eager-0", "eager", parent)
    assert row["threads"] == 3
    assert alone["threads"] == 1
    assert row["memory_bytes"] > alone["memory_bytes"] > 30 << 20
    assert row["cpu_s"] > alone["cpu_s"] > 0
    assert row["files"] > alone["files"] > 2
    assert row["voluntary_switches"] > 0
    assert row["involuntary_switches"] >= 0
    assert said == []


def test_memory_of_the_devices_is_that_of_the_whole_family(family: tuple[int, int]) -> None:
    parent, child = family
    processes = watched()
    processes.watch("eager-0", pid=parent)
    assert processes.sample({parent: 1, child: 2, 1: 50})[0]["device_memory_bytes"] == 3
    assert processes.sample({parent: 1, child: None})[0]["device_memory_bytes"] is None
    assert processes.sample({1: 50})[0]["device_memory_bytes"] is None


def test_cpu_time_never_falls_when_a_descendant_ends(family: tuple[int, int]) -> None:
    parent, child = family
    processes = watched()
    processes.watch("eager-0", pid=parent)
    before = processes.sample({})[0]
    os.kill(child, 9)
    # Its parent waits for it in a thread, and may do so at any time.
    after = [processes.sample({})[0] for _ in range(20)]
    times = [row["cpu_s"] for row in (before, *after)]
    assert times == sorted(times)


def test_an_ended_process_has_no_row() -> None:
    processes = watched()
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes.watch("load", pid=ended.pid)
    assert processes.sample({}) == []


def test_a_forgotten_name_has_no_row(family: tuple[int, int]) -> None:
    processes = watched()
    processes.watch("eager-0", pid=family[0])
    processes.forget("eager-0")
    processes.forget("never-there")
    assert processes.sample({}) == []


def test_whoever_descends_from_the_run_is_of_it(family: tuple[int, int], tmp_path: Path) -> None:
    parent, child = family
    processes = watched()
    assert processes.is_of_run(child) is True
    assert processes.is_of_run(os.getpid()) is True
    assert processes.is_of_run(os.getppid()) is False
    assert processes.is_of_run(1) is False
    assert Processes(Readings("run", print), root=parent).is_of_run(os.getpid()) is False
    assert Processes(Readings("run", print), root=1 << 22, proc=tmp_path).is_of_run(child) is None


def test_a_process_of_the_run_that_has_ended_stays_of_it() -> None:
    processes = watched()
    ended = subprocess.Popen(["sleep", "60"])
    assert processes.is_of_run(ended.pid) is True
    ended.kill()
    ended.wait()
    assert processes.is_of_run(ended.pid) is True
