"""What a sample has of the host, and of processes with their descendants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tailgate.loadtests.monitor.host import Host
from tailgate.loadtests.monitor.processes import Processes
from tailgate.loadtests.monitor.readings import Probes, Readings, Unreadable, Watch

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


def monitored(unreadable: list[Unreadable] | None = None) -> Processes:
    return Processes(Readings(([] if unreadable is None else unreadable).append), root=os.getpid())


def test_a_process_is_sampled_with_its_descendants(family: tuple[int, int]) -> None:
    parent, child = family
    unreadable: list[Unreadable] = []
    processes = monitored(unreadable)
    processes.take(Watch(name="eager-0", pid=parent, arm="eager"))
    processes.take(Watch(name="child", pid=child))
    row, alone = processes.sample({parent: 1, child: 2, 1: 50})
    assert (row["kind"], row["name"], row["arm"], row["pid"]) == ("process", "eager-0", "eager", parent)
    assert row["memory_bytes"] > alone["memory_bytes"] > 30 << 20
    assert row["cpu_s"] >= alone["cpu_s"] > 0
    assert unreadable == []
    processes = monitored()
    processes.take(Watch(name="eager-0", pid=parent))
    assert processes.sample({parent: 1, child: 2, 1: 50})[0]["device_memory_bytes"] == 3
    assert processes.sample({parent: 1, child: None})[0]["device_memory_bytes"] is None
    assert processes.sample({1: 50})[0]["device_memory_bytes"] is None


def test_cpu_time_never_falls_when_a_descendant_ends(family: tuple[int, int]) -> None:
    parent, child = family
    processes = monitored()
    processes.take(Watch(name="eager-0", pid=parent))
    before = processes.sample({})[0]
    os.kill(child, 9)
    # Its parent waits for it in a thread, and may do so at any time.
    after = [processes.sample({})[0] for _ in range(20)]
    times = [row["cpu_s"] for row in (before, *after)]
    assert times == sorted(times)


def test_an_ended_process_has_no_row() -> None:
    processes = monitored()
    ended, ending = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    ended.kill()
    ended.wait()
    processes.take(Watch(name="load", pid=ended.pid))
    processes.take(Watch(name="eager-0", pid=ending.pid))
    assert [row["name"] for row in processes.sample({})] == ["eager-0"]
    ending.kill()
    ending.wait()
    assert processes.sample({}) == []


def test_descendants_belong_to_the_run_even_after_their_end(
    family: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = family
    processes = monitored()
    ended = subprocess.Popen(["sleep", "60"])
    pids = (child, ended.pid, os.getpid(), os.getppid(), 1)
    assert [processes.is_of_run(pid) for pid in pids] == [True, True, True, False, False]
    ended.kill()
    ended.wait()
    assert processes.is_of_run(ended.pid) is True
    assert Processes(Readings(print), root=parent).is_of_run(os.getpid()) is False
    assert Processes(Readings(print), root=parent).is_of_run(ended.pid) is None


STAT = """cpu  100 20 30 5000 40 5 6 7 50 0
cpu0 50 10 15 2500 20 2 3 3 0 0
cpu1 50 10 15 2500 20 3 3 4 0 0
"""
MEMORY = "".join(
    f"{name}: {kib} kB\n"
    for name, kib in (
        *(("MemTotal", 1000), ("MemFree", 100), ("MemAvailable", 400), ("Buffers", 0), ("Cached", 0)),
        *(("Active", 0), ("Inactive", 0), ("Shmem", 0)),
    )
)
BOTH = frozenset({0, 1})


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel's files with round numbers in them."""
    folder = tmp_path / "proc"
    (folder / "pressure").mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    (folder / "meminfo").write_text(MEMORY)
    line = "avg10=0.00 avg60=0.00 avg300=0.00 total=250000"
    (folder / "pressure" / "memory").write_text(f"some {line}\nfull {line}\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder))
    return folder


def read(host: Host) -> tuple[dict[str, object], dict[str, str]]:
    unreadable: dict[str, str] = {}
    row = Readings(lambda item: unreadable.update({item.what: item.why})).of("run", host.probes)
    return row, unreadable


def test_a_host_is_read_from_the_kernels_files(proc: Path, tmp_path: Path) -> None:
    row, unreadable = read(Host(proc, tmp_path / "sys", BOTH))
    assert row == {
        "cpu_s": pytest.approx(1.61),  # user, nice, system and both kinds of interrupts
        "steal_s": pytest.approx(0.07),
        "cpus": 2,
        "memory_bytes": 600 * 1024,
        "memory_limit_bytes": 1000 * 1024,
        "pressure_memory_s": 0.25,
    }
    assert unreadable == {}


def test_processors_count_that_the_run_may_use_and_the_other_threads_of_their_cores(proc: Path, tmp_path: Path) -> None:
    row, _ = read(Host(proc, tmp_path / "sys", allowed={1}))
    assert (row["cpu_s"], row["steal_s"], row["cpus"]) == (pytest.approx(0.81), pytest.approx(0.04), 1)
    assert read(Host(proc, tmp_path / "sys", allowed={64}))[0]["cpus"] == 2, "numbered otherwise"
    folder = tmp_path / "sys" / "devices/system/cpu/cpu1/topology"
    folder.mkdir(parents=True)
    for text, cpus in (("0-1", 2), ("0,1", 2), ("none", 1)):
        (folder / "thread_siblings_list").write_text(f"{text}\n")
        assert read(Host(proc, tmp_path / "sys", allowed={1}))[0]["cpus"] == cpus


def test_a_failed_reading_is_reported_once_and_tried_again_each_time() -> None:
    unreadable: list[Unreadable] = []
    readings = Readings(unreadable.append)
    answers = iter([ValueError("not yet"), ValueError("still not"), 7])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    probes: Probes = {"one": read, ("two", "three"): lambda: (2, None)}
    assert [readings.of("cuda:0", probes) for _ in range(3)] == [{"two": 2}, {"two": 2}, {"one": 7, "two": 2}]
    assert unreadable == [Unreadable(name="cuda:0", what="one", why="not yet")]
