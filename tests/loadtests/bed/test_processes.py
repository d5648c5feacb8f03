from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.bed.processes import Processes
from loadtests.bed.readings import Readings
from tests.fakes.patience import wait_for

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


def test_switches_and_files_are_read_only_with_a_search_for_descendants(family: tuple[int, int]) -> None:
    processes = watched()
    processes.watch("eager-0", pid=family[0])
    seldom = {"voluntary_switches", "involuntary_switches", "files"}
    assert [seldom <= set(processes.sample({})[0]) for _ in range(3)] == [True, False, False]
    processes.watch("load", pid=family[1])  # a new name is searched for at once
    assert all(seldom <= set(row) for row in processes.sample({}))


def test_a_process_with_the_number_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    def stat(started: int) -> None:
        fields = ["S", "1", *["0"] * 9, "100", "0", "0", "0", "0", "0", "2", "0", str(started), "0", "7"]
        (tmp_path / "5" / "stat").write_text(f"5 (a (b) c) {' '.join(fields)}\n")

    for folder in ("5/task/5", "5/fd"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "5/task/5/children").write_text("")
    (tmp_path / "5/task/5/status").write_text("voluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\nx:\t9\n")
    stat(1000)
    processes = Processes(Readings("run", print), root=1, proc=tmp_path)
    processes.watch("load", pid=5)
    (row,) = processes.sample({})
    assert (row["cpu_s"], row["threads"], row["memory_bytes"]) == (
        100 / os.sysconf("SC_CLK_TCK"),
        2,
        7 * os.sysconf("SC_PAGE_SIZE"),
    )
    assert (row["voluntary_switches"], row["involuntary_switches"], row["files"]) == (3, 4, 0)
    stat(2000)
    assert processes.sample({}) == []


def test_a_kernel_that_lists_no_children_has_them_found_by_their_parents(tmp_path: Path) -> None:
    for pid, parent in ((5, 1), (6, 5), (7, 6), (8, 1)):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/fd").mkdir()
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (x) S {parent} " + "0 " * 15 + "1 0 9 0 1")
        (tmp_path / f"{pid}/task/{pid}/stat").write_text("")
        (tmp_path / f"{pid}/task/{pid}/status").write_text("Name:\tx\n")
    said: list[dict[str, str]] = []
    processes = Processes(Readings("run", said.append), root=1, proc=tmp_path)
    processes.watch("load", pid=5)
    assert processes.sample({})[0]["threads"] == 3
    assert [(item["name"], item["what"]) for item in said] == [("load", "voluntary_switches")]


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


def test_an_idle_descendant_is_read_in_every_eighth_sample(tmp_path: Path) -> None:
    def write(pid: int, parent: int, ticks: int) -> None:
        fields = ["S", f"{parent}", *["0"] * 9, f"{ticks}", *["0"] * 5, "1", "0", "9", "0", "1"]
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (x) {' '.join(fields)}\n")

    for pid, child in ((5, "6"), (6, "")):
        for folder in (f"{pid}/task/{pid}", f"{pid}/fd"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(child)
        (tmp_path / f"{pid}/task/{pid}/status").write_text("")
        write(pid, pid - 1, 100)
    processes = Processes(Readings("run", [].append), root=1, proc=tmp_path)

    def ticks_of_both(*, search: bool) -> int:
        if search:
            processes.watch("gone", pid=99)  # a new name is searched for at once
        (row,) = processes.sample({})
        return round(row["cpu_s"] * os.sysconf("SC_CLK_TCK"))

    processes.watch("eager-0", pid=5)
    assert [ticks_of_both(search=True) for _ in range(2)] == [200, 200]
    write(6, 5, 150)
    write(5, 4, 110)
    assert [ticks_of_both(search=False) for _ in range(8)] == [210] * 7 + [260]
    write(6, 5, 170)
    assert ticks_of_both(search=False) == 280
    assert ticks_of_both(search=True) == 280


def test_an_idle_descendant_that_ends_is_seen_at_once(family: tuple[int, int]) -> None:
    parent, child = family
    processes = watched()
    processes.watch("eager-0", pid=parent)
    for _ in range(2):
        processes.watch("child", pid=child)  # a new name is searched for at once
        processes.sample({})
    os.kill(child, 9)
    wait_for(lambda: processes.sample({})[0]["threads"] < 3)


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
