"""What the kernel shows of a host and of processes with their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.bed import readings as module
from loadtests.bed.family import cpu_seconds, stat_of
from loadtests.bed.host import Host
from loadtests.bed.processes import Processes
from loadtests.bed.readings import Probe, Readings, Seldom, probe
from tests.fakes.processes import wait_for

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
    unreadable: list[dict[str, str]] = []
    processes = watched(unreadable)
    processes.watch("eager-0", pid=parent, arm="eager")
    processes.watch("child", pid=child)
    row, alone = processes.sample({parent: 1, child: 2, 1: 50})
    assert (row["kind"], row["name"], row["arm"], row["pid"]) == ("process", "eager-0", "eager", parent)
    assert (row["threads"], alone["threads"]) == (3, 1)
    assert row["memory_bytes"] > alone["memory_bytes"] > 30 << 20
    assert row["cpu_s"] >= alone["cpu_s"] > 0
    assert row["files"] > alone["files"] > 2
    assert row["voluntary_switches"] > 0
    assert unreadable == []
    processes = watched()
    processes.watch("eager-0", pid=parent)
    assert processes.sample({parent: 1, child: 2, 1: 50})[0]["device_memory_bytes"] == 3
    assert processes.sample({parent: 1, child: None})[0]["device_memory_bytes"] is None
    assert processes.sample({1: 50})[0]["device_memory_bytes"] is None


def write_process(proc: Path, pid: int, parent: int, *, ticks: int = 100, started: int = 9, children: str = "") -> None:
    """A process with one thread, as /proc shows it."""
    for folder in (f"{pid}/task/{pid}", f"{pid}/fd"):
        (proc / folder).mkdir(parents=True, exist_ok=True)
    fields = ["S", f"{parent}", *["0"] * 9, f"{ticks}", *["0"] * 5, "2", "0", f"{started}", "0", "7"]
    (proc / f"{pid}/stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")
    (proc / f"{pid}/task/{pid}/children").write_text(children)
    switches = "voluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\nx:\t9\n"
    (proc / f"{pid}/task/{pid}/status").write_text(switches)


def test_a_process_with_the_number_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    write_process(tmp_path, 5, 1, started=1000)
    processes = Processes(Readings("run", print), root=1, proc=tmp_path)
    processes.watch("load", pid=5)
    (row,) = processes.sample({})
    assert row["cpu_s"] == 100 / os.sysconf("SC_CLK_TCK")
    assert (row["threads"], row["memory_bytes"]) == (2, 7 * os.sysconf("SC_PAGE_SIZE"))
    assert (row["voluntary_switches"], row["involuntary_switches"], row["files"]) == (3, 4, 0)
    write_process(tmp_path, 5, 1, started=2000)
    assert processes.sample({}) == []


def test_descendants_are_found_by_their_parents_where_the_kernel_lists_no_children(tmp_path: Path) -> None:
    for pid, parent in ((5, 1), (6, 5), (7, 6), (8, 1)):
        write_process(tmp_path, pid, parent)
        (tmp_path / f"{pid}/task/{pid}/children").unlink()
        (tmp_path / f"{pid}/task/{pid}/stat").write_text("")
    (tmp_path / "5/task/5/status").write_text("Name:\tx\n")
    unreadable: list[dict[str, str]] = []
    processes = Processes(Readings("run", unreadable.append), root=1, proc=tmp_path)
    processes.watch("load", pid=5)
    assert processes.sample({})[0]["threads"] == 3 * 2
    assert [(item["name"], item["what"]) for item in unreadable] == [("load", "voluntary_switches")]


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


def test_an_ended_or_forgotten_process_has_no_row(family: tuple[int, int]) -> None:
    processes = watched()
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes.watch("load", pid=ended.pid)
    processes.watch("eager-0", pid=family[0])
    processes.forget("eager-0")
    processes.forget("never-there")
    assert processes.sample({}) == []


def test_descendants_belong_to_the_run_even_after_their_end(family: tuple[int, int], tmp_path: Path) -> None:
    parent, child = family
    processes = watched()
    ended = subprocess.Popen(["sleep", "60"])
    pids = (child, ended.pid, os.getpid(), os.getppid(), 1)
    assert [processes.is_of_run(pid) for pid in pids] == [True, True, True, False, False]
    ended.kill()
    ended.wait()
    assert processes.is_of_run(ended.pid) is True
    assert Processes(Readings("run", print), root=parent).is_of_run(os.getpid()) is False
    assert Processes(Readings("run", print), root=1 << 22, proc=tmp_path).is_of_run(child) is None


@pytest.mark.process
def test_work_of_a_process_counts_with_that_of_its_children() -> None:
    busy = "import os; os.fork(); [None for _ in iter(int, 1)]"
    process = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    try:
        wait_for(lambda: (cpu_seconds(process.pid) or 0.0) >= 1.0)
        alone = stat_of(process.pid).cpu_ticks / os.sysconf("SC_CLK_TCK")
        assert (cpu_seconds(process.pid) or 0.0) > 1.3 * alone
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert cpu_seconds(process.pid) is None


STAT = """cpu  100 20 30 5000 40 5 6 7 50 0
cpu0 50 10 15 2500 20 2 3 3 0 0
cpu1 50 10 15 2500 20 3 3 4 0 0
intr 12345 0 0
"""
BOTH = frozenset({0, 1})


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A kernel's files with round numbers in them."""
    folder = tmp_path / "proc"
    (folder / "pressure").mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    (folder / "loadavg").write_text("1.50 0.70 0.30 2/203 444\n")
    (folder / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\n")
    (folder / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu vme\n")
    for what, micros in (("cpu", 1_500_000), ("memory", 0), ("io", 250_000)):
        line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={micros}"
        (folder / "pressure" / what).write_text(f"some {line}\nfull {line}\n")
    return folder


def read(host: Host) -> tuple[dict[str, object], dict[str, str]]:
    said: dict[str, str] = {}
    row = Readings("run", lambda item: said.update({item["what"]: item["why"]})).of("run", host.probes)
    return row, said


def test_a_host_is_read_from_the_kernels_files(proc: Path, tmp_path: Path) -> None:
    for cpu, khz in (("cpu0", 2_000_000), ("cpu1", 3_000_000)):
        folder = tmp_path / "sys" / "devices/system/cpu" / cpu / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    row, said = read(Host(proc, tmp_path / "sys", BOTH))
    assert row == {
        "cpu_s": 1.61,  # user, nice, system and both kinds of interrupts
        "steal_s": 0.07,
        "cpus": 2,
        "load1": 1.5,
        "memory_bytes": 600 * 1024,
        "memory_limit_bytes": 1000 * 1024,
        "frequency_mhz": 2500.0,
        "pressure_cpu_s": 1.5,
        "pressure_memory_s": 0.0,
        "pressure_io_s": 0.25,
    }
    assert said == {}


def test_processors_that_the_run_may_not_use_do_not_count(proc: Path, tmp_path: Path) -> None:
    host = Host(proc, tmp_path / "sys", allowed={1})
    row, unreadable = read(host)
    assert (row["cpu_s"], row["steal_s"], row["cpus"]) == (0.81, 0.04, 1)
    assert "load1" in unreadable
    assert host.facts()["cpus_allowed"] is None, "this kernel lists one processor only"
    assert read(Host(proc, tmp_path / "sys", allowed={64}))[0]["cpus"] == 2, "numbered otherwise"


def test_the_other_thread_of_a_core_counts(proc: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sys" / "devices/system/cpu/cpu1/topology"
    folder.mkdir(parents=True)
    for text, cpus in (("0-1", 2), ("0,1", 2), ("none", 1)):
        (folder / "thread_siblings_list").write_text(f"{text}\n")
        assert read(Host(proc, tmp_path / "sys", allowed={1}))[0]["cpus"] == cpus


def test_what_a_kernel_does_not_show_is_reported_and_the_rest_is_read(proc: Path, tmp_path: Path) -> None:
    for what in ("cpu", "memory", "io"):
        (proc / "pressure" / what).unlink()
    (proc / "meminfo").write_text("MemTotal:  1000 kB\n")  # an old kernel
    row, unreadable = read(Host(proc, tmp_path / "sys", BOTH))
    assert set(row) == {"cpu_s", "steal_s", "cpus", "load1"}
    unread = {"pressure_cpu_s", "pressure_memory_s", "pressure_io_s", "frequency_mhz"}
    assert set(unreadable) == unread | {"memory_bytes", "memory_limit_bytes"}
    nothing = Host(tmp_path / "none", tmp_path / "none", BOTH)
    assert read(nothing)[0] == {}
    assert nothing.facts()["cpus"] is None


@pytest.mark.parametrize(("flags", "expected"), [("fpu", None), ("fpu hypervisor", "QEMU")])
def test_a_virtual_machine_is_named(proc: Path, tmp_path: Path, flags: str, expected: str | None) -> None:
    (proc / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n")
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/sys_vendor").write_text("QEMU\n")
    facts = Host(proc, tmp_path / "sys").facts()
    assert (facts["cpu"], facts["cpus"], facts["virtual"]) == ("Some CPU", 1, expected)


def test_a_failed_reading_is_reported_once_and_tried_again_each_time() -> None:
    unreadable: list[dict[str, str]] = []
    readings = Readings("run", unreadable.append)
    answers = iter([ValueError("not yet"), ValueError("still not"), 7])

    def read() -> int:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    probes = [probe("one", read), Probe(("two", "three"), lambda: (2, None))]
    assert [readings.of("cuda:0", probes) for _ in range(3)] == [{"two": 2}, {"two": 2}, {"one": 7, "two": 2}]
    assert unreadable == [{"host": "run", "name": "cuda:0", "what": "one", "why": "not yet"}]


def test_a_costly_reading_waits_until_its_share_of_a_processor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"monotonic": 100.0, "thread_time": 0.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: now["monotonic"])
    monkeypatch.setattr(module.time, "thread_time", lambda: now["thread_time"])
    seldom = Seldom(share=0.001, least_s=2.0)
    assert seldom.due
    with seldom.spending():
        now["thread_time"] += 0.005
    due = []
    for now["monotonic"] in (102.0, 104.9, 105.0):
        due.append(seldom.due)
    assert due == [False, False, True]
    with seldom.spending():
        pass  # costs nothing
    assert not seldom.due
    seldom.hurry()
    assert seldom.due
