"""Gates on compiles of an arm whose log tells of some, through the whole analysis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from benchmarks.simulation.detection import CONTROL, TREATMENT
from benchmarks.simulation.scenario import Scenario, run
from tests.fakes.external_runs import write_external, write_logged

SECOND = 10**9
ONCE = "vLLM warns once for each kernel"
QUIET = Scenario(step=64, duration_s=300.0)
STALLING = Scenario(step=64, duration_s=300.0, private_stalls=3)
THIN = Scenario(step=64, duration_s=60.0, rate=0.15)


def written(folder: Path, scenario: Scenario, **gates: float) -> Path:
    rng = np.random.default_rng(1)
    return write_external(folder, run(scenario, rng), rng, gates={"draws": 99, "min_blocks": 2, **gates})


def start_of(folder: Path) -> int:
    return min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())


def gates_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["kind"] == "recompile"}


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in summary["arms"] if row["name"] == TREATMENT)


def at(folder: Path, second: float, took: float = 0.0, **columns: Any) -> dict[str, Any]:
    end = start_of(folder) + int(second * SECOND)
    return {"start_ns": end - int(took * SECOND), "end_ns": end, "phase": "serving", **columns}


def test_what_a_log_tells_fails_an_arm_that_shows_nothing_outside(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    summary = analyze(write_logged(folder, [at(folder, 100, 0.2), at(folder, 200, 0.2)], blind_spots=[ONCE]))
    gate = gates_of(summary)["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("FAIL", 2)
    assert gate["reason"].startswith("By its log: 2 recompiles while serving (2 of them JIT compiles of kernels)")
    # The others are within their limits by the log, which may leave compiles out: from outside nothing was seen.
    assert gates_of(summary)["longest stall"]["reason"].startswith("Seen from outside: no stall from")
    compiled = row_of(summary)["compile"]
    assert (compiled["recompiles"], compiled["jit_compiles"], compiled["blind_spots"]) == (2, 2, [ONCE])
    assert len(summary["events"]) == 2


def test_a_log_that_tells_all_passes_an_arm_that_could_not_be_watched_from_outside(tmp_path: Path) -> None:
    folder = written(tmp_path, THIN)
    alone = gates_of(analyze(folder))["recompiles"]
    assert alone["verdict"] == "INCONCLUSIVE"
    gate = gates_of(analyze(write_logged(folder, [])))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("PASS", 0)
    assert "By its log, which tells of kernels: 0 recompiles while serving, limit 0." in gate["reason"]


def test_a_log_that_leaves_out_passes_nobody(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [], blind_spots=[ONCE])
    gate = gates_of(analyze(folder))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("INCONCLUSIVE", None)
    assert gate["reason"].endswith(f"Its log may leave compiles out: {ONCE}.")
    assert any(ONCE in note for note in row_of(analyze(folder))["external"]["notes"])


def test_what_shows_from_outside_decides_where_the_log_leaves_out_and_says_so(tmp_path: Path) -> None:
    gate = gates_of(analyze(write_logged(written(tmp_path, QUIET), [], blind_spots=[ONCE])))["recompiles"]
    assert gate["verdict"] == "PASS"
    assert gate["reason"].endswith(f"Its log may leave compiles out: {ONCE}.")


def test_stalls_that_neither_explains_leave_the_gates_open_whatever_the_log_says(tmp_path: Path) -> None:
    gate = gates_of(analyze(write_logged(written(tmp_path, STALLING), [])))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "stood still 3 times" in gate["reason"]


def test_compiles_that_show_from_outside_fail_an_arm_whose_log_does_not_tell_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    made = run(Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), rng)
    folder = write_external(tmp_path, made, rng, gates={"draws": 99, "min_blocks": 2})
    gate = gates_of(analyze(write_logged(folder, [])))["recompiles"]
    assert gate["verdict"] == "FAIL"
    assert (
        gate["reason"].endswith("Its log, which tells of kernels, shows fewer. Stalls")
        or "shows fewer" in gate["reason"]
    )


def test_a_trial_that_does_not_say_what_its_log_told_leaves_all_out(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [])
    arms = [{"name": name} for name in (CONTROL, TREATMENT)]
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    gate = gates_of(analyze(folder))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "trial 1 does not say what its log told" in gate["reason"]


def test_events_that_cannot_be_placed_are_said(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    summary = analyze(write_logged(folder, [at(folder, 100, kind="jitt")]))
    check = next(check for check in summary["validity"] if check["check"] == "placed compile events" and check["arm"])
    assert not check["ok"]
    assert gates_of(summary)["recompiles"]["verdict"] == "INCONCLUSIVE"


def test_a_compile_whose_length_nobody_tells_lasts_as_long_as_the_stall_around_it(tmp_path: Path) -> None:
    folder = written(tmp_path, STALLING)
    stalls = sorted(row_of(analyze(folder))["blackbox"]["stalls"], key=lambda stall: stall["start_ns"])
    first, second = stalls[0], stalls[1]
    events = [
        {"start_ns": first["end_ns"] + SECOND // 5, "end_ns": first["end_ns"] + SECOND // 5, "frame": "Triton _fwd"},
        {"start_ns": second["start_ns"], "end_ns": second["start_ns"], "kind": "recompile"},
        at(folder, 1.0, frame="of no stall"),
        {"start_ns": stalls[2]["start_ns"], "end_ns": stalls[2]["start_ns"], "kind": "limit_hit"},
    ]
    summary = analyze(write_logged(folder, events, blind_spots=[ONCE]))
    rows = {row["event_id"]: row for row in summary["events"]}
    for name, stall in (("1-log-0", first), ("1-log-1", second)):
        assert (rows[name]["start_ns"], rows[name]["end_ns"]) == (stall["start_ns"], stall["end_ns"])
        assert rows[name]["length_from"] == "stall"
        assert rows[name]["requests_hit"] >= 1
    for name in ("1-log-2", "1-log-3"):
        assert rows[name]["seconds"] == 0
        assert "length_from" not in rows[name]
    gate = gates_of(summary)["longest stall"]
    longest = max(first["seconds"], second["seconds"])
    assert (gate["verdict"], gate["value"] > gate["limit"]) == ("FAIL", True)
    assert row_of(summary)["compile"]["longest_event_s"] == pytest.approx(longest, rel=1e-6)
    # A spike is joined to the compile that the log tells of.
    joined = {name for spike in summary["spikes"] for name in spike["event_ids"]}
    assert joined >= {"1-log-0", "1-log-1"}
