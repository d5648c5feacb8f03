"""The process that samples a trial's machines, what a trial keeps of it, and the reference measurement of devices."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tailgate.analysis.records.schemas import MACHINES
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.trials import machines
from tailgate.loadtests.trials.context import StopRequestedError, TrialContext
from tailgate.loadtests.trials.machines import MonitorProcess, When, busy_text, measure_references
from tailgate.servers import processes
from tests.fakes.machines import GIB
from tests.fakes.processes import wait_for
from tests.fakes.whole_run import ROOT, trial_context

TWO_GPUS = """
import os, sys
from tests.fakes.machines import GIB, FakeCard, FakeNvml
refused = {"nvmlDeviceGetPowerUsage": "Not Supported"}
held = {1: 4 * GIB, os.getppid(): 7}
busy = FakeCard(uuid="GPU-0", bus=1, used=4 * GIB, utilisation=93, processes=held, refused=refused)
sys.modules[__name__] = FakeNvml([busy, FakeCard(uuid="GPU-1", bus=2)])
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module called pynvml with two GPUs, on the first of which process 1 works."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "pynvml.py").write_text(TWO_GPUS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'driver'}:{ROOT}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sampled(context: TrialContext, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """Rows of the kind, once so many are in the table."""
    path = context.folder / "machines.arrow"

    def found() -> list[dict[str, Any]]:
        rows = read_table(path, MACHINES)[0].to_pylist() if path.exists() else []
        return [row for row in rows if row["kind"] == kind]

    wait_for(lambda: len(found()) >= count, otherwise=found)
    return found()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to import; tests of a limit set their own."""
    monkeypatch.setattr(machines, "_FIRST_LOOK_S", 60.0)
    monkeypatch.setattr(machines, "_STOP_GRACE_S", 60.0)


def trial(folder: Path, *devices: str, check: Callable[[], None] = lambda: None, **machines: float) -> TrialContext:
    """A trial of an arm on each of the devices, on two processors where none is given."""
    arms = [
        {"name": f"arm{number}", "preset": "eager", "control": not number, "model": {"device": device}}
        for number, device in enumerate(devices or ("cpu", "cpu"))
    ]
    table = {"arms": arms, "engine": {"threads": 3}, "machines": machines, "compare_models": True}
    return trial_context(folder / "trial-01", table, check=check)


def unreadable(context: TrialContext, name: str = "watcher") -> list[tuple[str, str]]:
    """What trial.json says could not be read, and why."""
    assert context.facts.monitor is not None
    return [(item["what"], item["why"]) for item in context.facts.monitor["unreadable"] if item["name"] == name]


@pytest.mark.process
def test_devices_are_sampled_before_and_during_the_trial_and_a_refused_reading_is_reported_once(
    tmp_path: Path, driver: None
) -> None:
    context = trial(tmp_path, "cuda", "cuda:1", sample_s=0.05)
    watch = MonitorProcess(context)
    watch.first_sample()
    facts = json.loads((context.folder / "trial.json").read_text())["monitor"]
    watch.name("eager-0", os.getpid(), arm="eager")
    sampled(context, "device", 6)
    held = sampled(context, "process", 2)
    watch.stop()
    assert {name: device["uuid"] for name, device in facts["devices"].items()} == {"cuda:0": "GPU-0", "cuda:1": "GPU-1"}
    assert [(row["name"], row["foreign_processes"]) for row in facts["before"]] == [("cuda:0", 1), ("cuda:1", 0)]
    (note,) = context.status.notes
    assert all(word in note for word in ("cuda:0 (NVIDIA H200)", "4.0 GiB", "1 process of others"))
    assert held[-1]["device_memory_bytes"] == 7
    row = next(row for row in sampled(context, "device") if row["name"] == "cuda:0")
    assert (row["foreign_processes"], row["foreign_memory_bytes"]) == (1, 4 * GIB)
    assert (row["throttle"], row["power_w"]) == ([], None)
    assert unreadable(context, "cuda:0") == [("power_w", "Not Supported")]


def test_a_driver_that_does_not_show_the_devices_in_time_is_not_asked_again(
    tmp_path: Path, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_FIRST_LOOK_S", 0.0)
    context = trial(tmp_path, "cuda", "cuda:1")
    watch = MonitorProcess(context)
    watch.first_sample()
    watch.stop()
    assert [what for what, _ in unreadable(context)] == ["samples"]
    assert len(context.status.notes) == 1


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])  # the latter as in a call that does not come back
def test_a_watcher_that_dies_or_hangs_leaves_a_whole_table_a_note_and_a_recorded_gap_also_on_a_full_disk(
    fault: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_STOP_GRACE_S", 0.2)
    context = trial(tmp_path, sample_s=0.05)
    watch = MonitorProcess(context)
    sampled(context, "host")
    monkeypatch.setattr(TrialContext, "write_facts", Mock(side_effect=OSError(28, "No space left on device")))
    os.kill(watch.child.pid, fault)
    watch.name("load", os.getpid())
    watch.stop()
    [(what, why)] = unreadable(context)
    assert (what, "SIGKILL" in why) == ("samples", True)
    table, truncated = read_table(context.folder / "machines.arrow", MACHINES)
    assert table.num_rows
    assert not truncated  # what is missing is recorded as a gap
    (note,) = context.status.notes
    assert "SIGKILL" in note


def test_a_device_that_is_not_idle_is_named_with_its_load() -> None:
    card, h200 = {"name": "cuda:0"}, {"name": "NVIDIA H200"}
    assert busy_text(card, h200) == busy_text({**card, "memory_bytes": 300 << 20, "foreign_processes": 0}, h200) == ""
    assert busy_text({**card, "memory_bytes": 2 * GIB}, h200).startswith("cuda:0 (NVIDIA H200) is not idle")
    assert "0.0 GiB in use and 2 processes of others on it:" in busy_text({**card, "foreign_processes": 2}, {})


# Ready at once, and measures when asked; a library prints the line between.
MEASURES = """
import json, os, sys, time
print(json.dumps({"Ready": {}}), flush=True)
sys.stdin.readline()
start = time.monotonic()
print("a library greets", flush=True)
time.sleep(0.05)
values = {"device_asked": sys.argv[2], "seconds_asked": float(sys.argv[4]), "start": start, "end": time.monotonic(),
    "threads": os.environ.get("OMP_NUM_THREADS")}
print(json.dumps({"Measured": {"at_ns": 5, "values": values}}), flush=True)
"""
SLOW_TO_COME_UP = "import time; time.sleep(0.3 * (__import__('sys').argv[2] == 'cuda:1'));" + MEASURES
REFUSES = """
import time
from tailgate.servers.processes import Measured, say
say(Measured(at_ns=time.time_ns(), values={}, error="CUDA-capable device(s) is/are busy or unavailable"))
"""
DIES = "import os, sys; print('the driver fell off', file=sys.stderr, flush=True); os._exit(7)"
SILENT = "import time; time.sleep(60)"


def measure(context: TrialContext, program: str, when: When) -> None:
    measure_references(context, when, command=[sys.executable, "-c", program])


def reference_rows(context: TrialContext) -> list[dict[str, Any]]:
    written = json.loads((context.folder / "trial.json").read_text())["references"]
    assert written == context.facts.references
    return context.facts.references


def test_each_device_is_measured_once_with_its_arms_threads(tmp_path: Path) -> None:
    context = trial(tmp_path)
    measure(context, MEASURES, "before")
    (row,) = reference_rows(context)
    expected = {"device": "cpu", "when": "before", "at_ns": 5, "error": None}
    assert expected.items() <= row.items()
    assert (row["device_asked"], row["seconds_asked"], row["threads"]) == ("cpu", 2.0, "3")
    assert (context.logs / "reference-before-cpu.log").read_text() == "a library greets\n"


def test_devices_are_measured_in_order_and_backwards_after_the_trial(tmp_path: Path) -> None:
    context = trial(tmp_path, "cuda", "cuda:1", "cuda:0")
    began = time.monotonic()
    measure(context, SLOW_TO_COME_UP, "before")
    measure(context, SLOW_TO_COME_UP, "after")
    assert [(row["device"], row["when"]) for row in reference_rows(context)] == [
        *(("cuda:0", "before"), ("cuda:1", "before")),
        *(("cuda:1", "after"), ("cuda:0", "after")),
    ]
    for first, second in (reference_rows(context)[:2], reference_rows(context)[2:]):
        assert began + 0.3 < first["start"] < first["end"] < second["start"], "all start before one measures"


@pytest.mark.parametrize(
    ("program", "start_s", "words"),
    [
        (REFUSES, 30.0, "busy or unavailable"),
        (DIES, 30.0, "exit code 7: the driver fell off"),
        (SILENT, 0.3, "0.3 s"),
        (f"print('{{\"Ready\": {{}}}}', flush=True); {SILENT}", 30.0, "0.2 s"),
    ],
)
def test_a_device_that_cannot_be_measured_is_a_row_and_a_note(
    program: str, start_s: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_MEASURE_S", 0.1)
    monkeypatch.setattr(machines, "START_TIMEOUT_S", start_s)
    context = trial(tmp_path, reference_s=0.01)
    measure(context, program, "after")
    (row,) = reference_rows(context)
    assert words in row["error"]
    assert row["at_ns"] > 1.6e18
    (note,) = context.status.notes
    assert note.startswith("cpu was not measured after the trial")


def test_references_of_0_s_are_not_measured(tmp_path: Path) -> None:
    context = trial(tmp_path, reference_s=0)
    measure(context, DIES, "before")
    assert (context.facts.references, context.logs.exists()) == ([], False)


def test_an_interruption_ends_the_measurement_and_its_processes(tmp_path: Path) -> None:
    def stop() -> None:
        raise StopRequestedError

    context = trial(tmp_path, check=stop)
    before = set(processes._children)
    with pytest.raises(StopRequestedError):
        measure(context, SILENT, "before")
    assert processes._children == before
    assert reference_rows(context) == []
