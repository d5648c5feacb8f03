from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordWriter
from analysis.run.run import Run
from analysis.run.startup import compiler_facts, startup_row
from tests.fakes.runs import SECOND, FakeRun, start_of, write_run

MINUTE = FakeRun(duration_s=60, rate=2)
ITEMS = {
    "process": 1.0,
    "import": 3.0,
    "load": 2.0,
    "prefill batch 1 × length 32, context 32": 10.0,
    "decode batch 4 × length 1, context 256": 20.0,
    "decode batch 1 × length 1, context 256": 5.0,
    "capture decode batch 1 × length 1, context 256": 0.5,
    "other": 0.1,
}


def run_with(directory: Path, *starts: dict[str, float], run: FakeRun = MINUTE) -> Run:
    """The run with these start-up items, in s, for the arm `compiled` in each trial."""
    write_run(directory, run)
    for trial, items in enumerate(starts, start=1):
        path = directory / f"trial-{trial:02}" / "trial.json"
        info: dict[str, Any] = json.loads(path.read_text())
        info["startup"]["compiled"] = {
            "items_ns": {item: int(seconds * SECOND) for item, seconds in items.items()},
            "memory_bytes": {"weights": 7, "device_peak": 9},
        }
        path.write_text(json.dumps(info))
    return Run.of(read_run(directory))


def add_events(folder: Path, *events: dict[str, Any], trial: int = 1) -> None:
    start = start_of(trial)
    with RecordWriter(folder / "compile_events-1.arrow", COMPILE_EVENTS) as writer:
        for number, event in enumerate(events):
            at, seconds = event.pop("at_s"), event.pop("seconds")
            row = {"event_id": f"x{number}", "trial": trial, "phase": "warmup"}
            row |= {"arm": "compiled", "replica": "compiled-0"}
            times = {"start_ns": start + int(at * SECOND), "end_ns": start + int((at + seconds) * SECOND)}
            writer.append({**row, **times, **event})


def test_the_parts_of_a_start_add_up_to_the_time_to_serving(tmp_path: Path) -> None:
    row = startup_row(run_with(tmp_path / "run", ITEMS), "compiled")
    assert row["serving_s"] == pytest.approx(sum(ITEMS.values()))
    parts = ("process_s", "load_s", "prefill_s", "decode_s", "capture_s", "other_s")
    assert sum(row[part] for part in parts) == pytest.approx(row["serving_s"])
    assert (row["process_s"], row["load_s"], row["warmup_s"]) == (4.0, 2.0, 35.5)
    assert row["extend_s"] is None
    assert row["memory_bytes"] == {"weights": 7, "device_peak": 9}


def test_compiles_of_the_warm_up_have_their_backend_and_cache(tmp_path: Path) -> None:
    write_run(tmp_path / "run", MINUTE)
    add_events(
        tmp_path / "run" / "trial-01",
        {"kind": "recompile", "at_s": -3, "seconds": 2, "backend_ns": SECOND, "cache": "miss"},
        {"kind": "recompile", "at_s": -2, "seconds": 1.5, "backend_ns": SECOND, "cache": "hit"},
        {"kind": "graph_capture", "at_s": -0.4, "seconds": 0.25},
        {"kind": "autotune", "at_s": -4.0, "seconds": 3.5},
        {"kind": "jit", "at_s": -0.1, "seconds": 0.05},
        {"kind": "recompile", "at_s": 5, "seconds": 9, "cache": "miss", "phase": "serving"},
    )
    row = startup_row(Run.of(read_run(tmp_path / "run")), "compiled")
    assert row["compiles"] == 3
    assert row["compile_s"] == pytest.approx(5 + 2.5)  # two of them overlap by a second
    assert row["backend_s"] == 2.0
    assert row["recording_s"] == 0.25
    assert row["tuning_s"] == 3.5
    assert row["jit_s"] == 0.05
    assert row["cache"] == {"hit": 1, "miss": 1, "bypass": 0}


def test_facts_are_summed_over_replicas_and_trials(tmp_path: Path) -> None:
    for trial in (1, 2):
        folder = tmp_path / f"trial-{trial:02}"
        folder.mkdir()
        replica = {"arm": "a", "graph_breaks": {"x": 1, "y": trial}, "cudagraph_skips": {}}
        told = {"a-0": replica, "a-1": replica, "b-0": {**replica, "arm": "b", "graph_breaks": {"z": 9}}}
        (folder / "compiler.json").write_text(json.dumps(told))
    facts = compiler_facts([tmp_path], "a")
    assert facts == {"graph_breaks": {"y": 6, "x": 4}, "cudagraph_skips": {}}
    assert list(facts["graph_breaks"] or ()) == ["y", "x"]


@pytest.mark.parametrize("content", [None, "", "[1]", '{"a-0": 3}', '{"a-0": {"arm": "other"}}'])
def test_unreported_facts_are_unknown(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "compiler.json").write_text(content)
    assert compiler_facts([tmp_path], "a") == {"graph_breaks": None, "cudagraph_skips": None}
