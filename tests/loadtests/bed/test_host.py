from pathlib import Path

import pytest

from loadtests.bed.host import Host
from loadtests.bed.readings import Readings

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


def test_what_others_do_on_processors_that_the_run_may_not_use_is_not_in_its_way(proc: Path, tmp_path: Path) -> None:
    host = Host(proc, tmp_path / "sys", allowed={1})
    row, said = read(host)
    assert (row["cpu_s"], row["steal_s"], row["cpus"]) == (0.81, 0.04, 1)
    assert said["load1"] == "the load is of all 2 processors, and 1 are the run's"
    assert host.facts()["cpus_allowed"] is None, "this kernel lists one processor only"


def test_what_others_do_on_the_other_thread_of_a_core_is_in_its_way(proc: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sys" / "devices/system/cpu/cpu1/topology"
    folder.mkdir(parents=True)
    for text in ("0-1", "0,1"):
        (folder / "thread_siblings_list").write_text(f"{text}\n")
        row, _ = read(Host(proc, tmp_path / "sys", allowed={1}))
        assert (row["cpu_s"], row["cpus"]) == (1.61, 2)
    (folder / "thread_siblings_list").write_text("none\n")
    assert read(Host(proc, tmp_path / "sys", allowed={1}))[0]["cpus"] == 1


def test_a_host_whose_processors_are_numbered_otherwise_is_read_whole(proc: Path, tmp_path: Path) -> None:
    row, _ = read(Host(proc, tmp_path / "sys", allowed={64}))
    assert row["cpus"] == 2


def test_what_a_kernel_does_not_show_is_said_and_the_rest_is_read(proc: Path, tmp_path: Path) -> None:
    for what in ("cpu", "memory", "io"):
        (proc / "pressure" / what).unlink()
    (proc / "meminfo").write_text("MemTotal:  1000 kB\n")  # an old kernel
    row, said = read(Host(proc, tmp_path / "sys", BOTH))
    assert set(row) == {"cpu_s", "steal_s", "cpus", "load1"}
    unread = {"pressure_cpu_s", "pressure_memory_s", "pressure_io_s", "frequency_mhz"}
    assert set(said) == unread | {"memory_bytes", "memory_limit_bytes"}
    assert "No such file or directory" in said["pressure_cpu_s"]
    assert "virtual machine" in said["frequency_mhz"]


def test_a_host_without_such_files_is_not_guessed(tmp_path: Path) -> None:
    host = Host(tmp_path / "none", tmp_path / "none", BOTH)
    row, said = read(host)
    assert row == {}
    assert {"cpu_s", "load1", "memory_bytes"} <= set(said)
    assert host.facts()["cpus"] is None


@pytest.mark.parametrize(
    ("flags", "vendor", "expected"),
    [("fpu", "QEMU", None), ("fpu hypervisor", "QEMU", "QEMU"), ("fpu hypervisor", None, "hypervisor")],
)
def test_a_virtual_machine_is_named(
    proc: Path, tmp_path: Path, flags: str, vendor: str | None, expected: str | None
) -> None:
    (proc / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n")
    if vendor is not None:
        (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
        (tmp_path / "sys/class/dmi/id/sys_vendor").write_text(f"{vendor}\n")
    facts = Host(proc, tmp_path / "sys").facts()
    assert (facts["cpu"], facts["cpus"], facts["virtual"]) == ("Some CPU", 1, expected)
