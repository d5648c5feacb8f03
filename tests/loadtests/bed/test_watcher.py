"""The watcher as a process, as a trial starts it; the GPUs are a fake module called pynvml on its path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

import pytest

from analysis.records.schemas import BED
from analysis.records.sums import sums_path
from analysis.records.tables import read_table
from tests.fakes.patience import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[3]
FAKE_DRIVER = """
import os, sys
from tests.fakes.nvml import FakeCard, FakeNvml
refused = {"nvmlDeviceGetPowerUsage": "Not Supported"}
sys.modules[__name__] = FakeNvml([FakeCard(used=1 << 32, utilisation=80, processes={1: 5, %d: 7}, refused=refused)])
"""


class Watcher:
    """A running watcher and what it says."""

    def __init__(self, folder: Path, *flags: str, driver: str = "") -> None:
        (folder / "driver").mkdir()
        if driver:
            (folder / "driver" / "pynvml.py").write_text(driver)
        self.path = folder / "bed.arrow"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "loadtests.bed.watcher", "--out", str(self.path), "--trial", "3", *flags],
            env={**os.environ, "PYTHONPATH": f"{folder / 'driver'}:{ROOT}"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.stdin = cast("IO[str]", self.process.stdin)
        self.stdout = cast("IO[str]", self.process.stdout)
        self.unreadable: list[dict[str, str]] = []
        self.bed = self.message("bed")

    def message(self, kind: str) -> dict[str, Any]:
        """The next message of the kind; what cannot be read is remembered on the way."""
        for line in self.stdout:
            message = json.loads(line)
            if "unreadable" in message:
                self.unreadable.append(message["unreadable"])
            if kind in message:
                content: dict[str, Any] = message[kind]
                return content
        raise AssertionError(f"it ended without {kind}")

    def name(self, name: str, pid: int | None, arm: str | None = None) -> None:
        self.stdin.write(json.dumps({"name": name, "pid": pid, "arm": arm}) + "\n")
        self.stdin.flush()

    def rows(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", read_table(self.path, BED)[0].to_pylist())

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Rows of the kind, once there are so many of them in the file."""

        def found() -> list[dict[str, Any]]:
            return [row for row in self.rows() if row["kind"] == kind] if self.path.exists() else []

        wait_for(lambda: len(found()) >= count, otherwise=found)
        return found()


@pytest.mark.process
@pytest.mark.parametrize("by", ["stdin", "SIGTERM"])
def test_host_and_processes_are_sampled_until_the_run_ends(tmp_path: Path, by: str) -> None:
    watcher = Watcher(tmp_path, "--sample-s", "0.05")
    assert list(watcher.bed["machines"]) == ["run"]
    assert len(watcher.bed["machines"]["run"]["machine"]) == 12
    assert (watcher.bed["devices"], watcher.bed["before"]) == ({}, [])
    watcher.name("eager-0", os.getpid(), "eager")
    watcher.wait_for("process", 3)
    if by == "stdin":
        watcher.stdin.close()
    else:
        watcher.process.terminate()
    cost = watcher.message("watcher")
    assert watcher.process.wait(PATIENCE_S) == 0
    assert 0 < cost["cpu_s"] < cost["seconds"]

    table, truncated = read_table(watcher.path, BED)
    assert not truncated
    rows = table.to_pylist()
    assert {(row["trial"], row["host"]) for row in rows} == {(3, "run")}
    hosts = [row for row in rows if row["kind"] == "host"]
    processes = [row for row in rows if row["kind"] == "process"]
    assert [row["at_ns"] for row in hosts] == sorted({row["at_ns"] for row in hosts})
    assert hosts[-1]["cpu_s"] >= hosts[0]["cpu_s"] > 0
    assert {(row["name"], row["arm"], row["pid"]) for row in processes} == {("eager-0", "eager", os.getpid())}
    assert all(row["memory_bytes"] > 0 and row["threads"] > 0 for row in processes)


@pytest.mark.process
def test_a_name_that_is_taken_back_has_no_more_rows(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, "--sample-s", "0.05")
    watcher.name("load", os.getpid())
    watcher.wait_for("process")
    watcher.name("load", None)
    watcher.name("splitter", os.getpid())
    watcher.wait_for("process", 4)
    watcher.stdin.close()
    watcher.process.wait(60)
    rows = watcher.rows()
    last = max(row["at_ns"] for row in rows)
    assert {row["name"] for row in rows if row["at_ns"] == last} == {"run", "splitter"}


@pytest.mark.process
def test_a_killed_watcher_leaves_what_it_saw_until_the_last_second(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, "--sample-s", "0.05")
    watcher.name("load", os.getpid())
    seen = len(watcher.wait_for("process", 5))
    watcher.process.send_signal(signal.SIGKILL)
    killed_ns = time.time_ns()
    watcher.process.wait(60)
    table, truncated = read_table(watcher.path, BED)
    assert truncated  # its end is missing, and that is said
    assert len([row for row in table.to_pylist() if row["kind"] == "process"]) >= seen
    assert killed_ns - max(table.column("at_ns").to_pylist()) < 10 * 10**9
    assert sums_path(watcher.path).exists()


@pytest.mark.process
def test_devices_are_watched_and_what_the_driver_refuses_is_said_once(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, "--sample-s", "0.05", "--devices", "auto", "cuda", driver=FAKE_DRIVER % os.getpid())
    assert list(watcher.bed["devices"]) == ["cuda:0"]
    assert watcher.bed["devices"]["cuda:0"]["lock_command"] == "sudo nvidia-smi -i 0 -lgc 1980,1980"
    (look,) = watcher.bed["before"]
    assert [process["pid"] for process in look["processes"]] == [1]
    assert look["utilisation_pct"] == 80
    watcher.name("eager-0", os.getpid(), "eager")
    watcher.wait_for("device", 3)
    held = watcher.wait_for("process", 2)
    watcher.stdin.close()
    watcher.message("watcher")
    assert held[-1]["device_memory_bytes"] == 7
    (device,) = {row["name"] for row in watcher.rows() if row["kind"] == "device"}
    assert device == "cuda:0"
    row = watcher.wait_for("device")[-1]
    assert (row["foreign_processes"], row["foreign_memory_bytes"]) == (1, 5)
    assert row["throttle"] == []
    assert row["power_w"] is None
    refused = [item for item in watcher.unreadable if item["name"] == "cuda:0"]
    assert refused == [{"host": "run", "name": "cuda:0", "what": "power_w", "why": "Not Supported"}]


@pytest.mark.process
def test_a_device_without_a_driver_is_said_and_the_host_is_watched(tmp_path: Path) -> None:
    driver = (
        "import sys\nfrom tests.fakes.nvml import FakeNvml\n"
        "sys.modules[__name__] = FakeNvml([], missing='Driver Not Loaded')\n"
    )
    watcher = Watcher(tmp_path, "--sample-s", "0.05", "--devices", "cuda:1", "auto", driver=driver)
    assert watcher.bed["devices"] == {}
    devices = [item for item in watcher.unreadable if item["what"] == "device"]
    why = "Driver Not Loaded; No module named 'amdsmi'"
    assert devices == [{"host": "run", "name": "cuda:1", "what": "device", "why": why}]
    watcher.wait_for("host", 2)
    watcher.stdin.close()
    assert watcher.process.wait(PATIENCE_S) == 0
