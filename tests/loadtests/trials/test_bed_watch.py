from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from analysis.records.schemas import BED
from analysis.records.tables import read_table
from loadtests.trials import bed_watch
from loadtests.trials.bed_watch import BedWatch, not_idle
from loadtests.trials.context import TrialContext
from loadtests.trials.trial_facts import TrialFacts
from tests.fakes.patience import wait_for
from tests.fakes.trial_context import trial_context

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
H200 = {"name": "NVIDIA H200"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to import; tests of a limit set their own."""
    monkeypatch.setattr(bed_watch, "_FIRST_LOOK_S", 60.0)
    monkeypatch.setattr(bed_watch, "_STOP_GRACE_S", 60.0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, on the first of which process 1 works."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "pynvml.py").write_text(
        "import sys\nfrom tests.fakes.nvml import GIB, FakeCard, FakeNvml\n"
        "busy = FakeCard(uuid='GPU-0', bus=1, used=4 * GIB, utilisation=93, processes={1: 4 * GIB})\n"
        "sys.modules[__name__] = FakeNvml([busy, FakeCard(uuid='GPU-1', bus=2)])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'driver'}:{ROOT}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def trial(folder: Path, *devices: str, check: Any = lambda: None, **bed: float) -> TrialContext:
    names = ("eager", "compiled-padded", "compiled-bucketed")
    arms = [
        {"name": f"arm{number}", "preset": names[number], "control": not number, "model": {"device": device}}
        for number, device in enumerate(devices)
    ]
    return trial_context(folder, {"arms": arms, "bed": bed, "compare_models": True}, check=check)


def poll_until(watch: BedWatch, context: TrialContext, key: str) -> Any:
    """The trial's fact about the bed called `key`, once there is one."""

    def fact() -> Any:
        watch.poll()
        return (context.facts.bed or {}).get(key)

    return wait_for(fact)


def test_devices_are_looked_at_before_anything_is_on_them(tmp_path: Path, driver: None) -> None:
    context = trial(tmp_path / "trial-01", "cuda", "cuda:1")
    watch = BedWatch(context)
    watch.first_look()
    facts = json.loads((context.folder / "trial.json").read_text())["bed"]
    watch.stop()
    assert {name: device["uuid"] for name, device in facts["devices"].items()} == {"cuda:0": "GPU-0", "cuda:1": "GPU-1"}
    assert facts["arms"] == {"arm0": "cuda:0", "arm1": "cuda:1"}
    busy, idle = facts["before"]
    assert (busy["device"], [process["pid"] for process in busy["processes"]]) == ("cuda:0", [1])
    assert (idle["device"], idle["processes"]) == ("cuda:1", [])
    (note,) = context.status.notes
    assert note.startswith("cuda:0 (NVIDIA H200) is not idle before the trial: 4.0 GiB in use, 93 % busy, by ")
    assert "(pid 1): end what runs there, or give another device" in note


@pytest.mark.parametrize(
    ("devices", "reported", "places"),
    [
        (("auto", "cpu"), {}, {"arm0": "cuda:0", "arm1": "cpu"}),
        (("auto", "cuda:1"), {"arm0": {"device": "cpu"}, "arm1": H200}, {"arm0": "cpu", "arm1": "cuda:1"}),
    ],
)
def test_an_arm_is_where_it_goes_by_itself_or_where_its_replicas_say(
    devices: tuple[str, str], reported: dict[str, Any], places: dict[str, str], tmp_path: Path, driver: None
) -> None:
    context = trial(tmp_path / "trial-01", *devices)
    watch = BedWatch(context)
    watch.first_look()
    if reported:
        context.facts.startup = {arm: {"device": row.get("device", row.get("name"))} for arm, row in reported.items()}
        watch.place_arms()
    watch.stop()
    assert context.facts.bed is not None
    assert context.facts.bed["arms"] == places


def test_a_look_that_came_too_late_is_none_from_before(
    tmp_path: Path, driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bed_watch, "_FIRST_LOOK_S", 0.0)  # the run's own processes start at once
    context = trial(tmp_path / "trial-01", "cuda", "cuda:1")
    watch = BedWatch(context)
    watch.first_look()
    poll_until(watch, context, "machines")
    watch.stop()
    assert context.facts.bed is not None
    assert context.facts.bed["before"] == []
    why = "the driver took over 0 s to show the devices"
    (late,) = [item for item in context.facts.bed["unreadable"] if item["what"] == "before"]
    assert late == {"host": "run", "name": "devices", "what": "before", "why": why}
    assert context.status.notes == [f"what ran on the devices before the trial is not known: {why}"]


def test_a_watcher_that_dies_leaves_a_whole_table_a_note_and_a_stated_gap(tmp_path: Path) -> None:
    context = trial(tmp_path / "trial-01", "cpu", "cpu", sample_s=0.05)
    watch = BedWatch(context)
    poll_until(watch, context, "machines")
    watch.name("load", os.getpid())
    path = context.folder / "bed.arrow"
    wait_for(lambda: path.exists() and read_table(path, BED)[0].num_rows > 0)
    watch.kill()
    (gap,) = poll_until(watch, context, "gaps")
    assert (gap["host"], "SIGKILL" in gap["why"]) == ("run", True)
    table, truncated = read_table(path, BED)
    assert table.num_rows
    assert not truncated  # what is missing is the gap, which is stated
    assert max(table.column("at_ns").to_pylist()) <= gap["at_ns"] <= time.time_ns()
    (note,) = context.status.notes
    assert "SIGKILL" in note
    watch.name("load", os.getpid())  # nobody listens, and the trial goes on
    watch.poll()
    watch.stop()
    assert len(context.status.notes) == 1
    assert json.loads((context.folder / "trial.json").read_text())["bed"]["gaps"] == [gap]


def test_a_watcher_that_hangs_is_a_stated_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed_watch, "_STOP_GRACE_S", 0.2)
    context = trial(tmp_path / "trial-01", "cpu", "cpu")
    watch = BedWatch(context)
    poll_until(watch, context, "machines")
    assert watch.pid is not None
    os.kill(watch.pid, signal.SIGSTOP)  # as in a call of the driver that does not come back
    watch.stop()
    watch.stop()
    (note,) = context.status.notes
    assert "0.2 s" in note
    assert context.facts.bed is not None
    assert [gap["at_ns"] for gap in context.facts.bed["gaps"]] == [None]


def test_a_table_that_cannot_be_written_is_a_note_with_the_reason(tmp_path: Path) -> None:
    context = trial(tmp_path / "trial-01", "cpu", "cpu")
    (context.folder / "bed.arrow.new").mkdir()  # where the table is begun
    watch = BedWatch(context)
    assert "bed.arrow.new" in poll_until(watch, context, "gaps")[0]["why"]
    watch.stop()
    assert len(context.status.notes) == 1


def test_a_stopped_watch_has_a_whole_table_and_says_what_it_cost(tmp_path: Path) -> None:
    context = trial(tmp_path / "trial-01", "cpu", "cpu", sample_s=0.05)
    watch = BedWatch(context)
    poll_until(watch, context, "machines")
    watch.stop()
    watch.stop()
    table, truncated = read_table(context.folder / "bed.arrow", BED)
    assert not truncated
    assert table.num_rows
    assert context.facts.bed is not None
    assert context.facts.bed["watcher"]["seconds"] > 0
    assert context.status.notes == []


def test_an_idle_device_is_not_worth_a_note() -> None:
    look = {"device": "cuda:0", "processes": [], "memory_bytes": 300 << 20, "utilisation_pct": 1, "sm_mhz": 345}
    assert not_idle(look, H200) == ""
    assert not_idle({**look, "processes": None, "memory_bytes": None, "utilisation_pct": None}, {}) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"utilisation_pct": 40}, "0.0 GiB in use, 40 % busy: end"),
        ({"memory_bytes": 2 * GIB}, "2.0 GiB in use, 0 % busy: end"),
        (
            {"processes": [{"pid": pid, "name": "x" if pid > 1 else None, "memory_bytes": 1} for pid in range(1, 6)]},
            "0 % busy, by a process (pid 1), x (pid 2), x (pid 3) and 2 more: end",
        ),
    ],
)
def test_a_device_that_is_not_idle_is_named_with_what_is_on_it(changes: dict[str, Any], expected: str) -> None:
    look = {"device": "cuda:0", "processes": [], "memory_bytes": 0, "utilisation_pct": 0, "sm_mhz": 345}
    assert expected in not_idle({**look, **changes}, H200)


def test_on_a_full_disk_the_watcher_ends_and_its_death_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = trial(tmp_path / "trial-01", "cpu", "cpu")
    watch = BedWatch(context)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialFacts, "write", full)
    poll_until(watch, context, "machines")
    watch.kill()
    assert len(poll_until(watch, context, "gaps")) == 1
    watch.stop()
    assert context.facts.bed is not None
    assert "the watcher ended" in context.facts.bed["gaps"][0]["why"]
