"""Arms without telemetry: what the client and a log show of their compiles, and what stays unknown."""

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
from tests.fakes.simulated import write_external, write_logged

SECOND = 10**9
ONCE = "vLLM warns once for each kernel"
QUIET = Scenario(step=64, duration_s=300.0)
STALLING = Scenario(step=64, duration_s=300.0, private_stalls=3)
THIN = Scenario(step=64, duration_s=60.0, rate=0.15)


def written(folder: Path, scenario: Scenario, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    return write_external(folder, run(scenario, rng), rng, gates={"draws": 99, "min_blocks": 2})


def gates_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["gate"]: gate for gate in summary["gates"] if gate["kind"] == "recompile"}


def row_of(summary: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in summary["arms"] if row["name"] == TREATMENT)


def judged(folder: Path, scenario: Scenario, seed: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recompile gates of the external arm by name, and its row."""
    summary = analyze(written(folder, scenario, seed))
    return gates_of(summary), row_of(summary)


def test_an_arm_that_compiles_while_serving_fails_without_reporting_it(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2)
    assert {gate["verdict"] for gate in gates.values()} == {"FAIL"}
    assert gates["recompiles"]["value"] == row["blackbox"]["compiles"] >= 5
    assert gates["longest stall"]["value"] == pytest.approx(3.0, abs=0.2)
    assert row["blackbox"]["stalls"][0]["cause"] == "compile"


def test_an_arm_that_never_stalls_passes_with_the_shortest_stall_that_would_show(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=300.0, host_stalls=2))
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    assert gates["recompiles"]["value"] == 0.0
    assert set(row["padding"].values()) == {None}, "what has no telemetry is unknown and not zero"
    shown = f"no stall from {row['blackbox']['detectable_s']:.2g} s on"
    assert shown in gates["recompiles"]["reason"]


def test_unexplained_stalls_leave_the_gates_open(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, STALLING)
    assert (row["blackbox"]["compiles"], row["blackbox"]["unexplained"]) == (0, 3)
    assert gates["recompiles"]["verdict"] == gates["longest stall"]["verdict"] == "INCONCLUSIVE"
    assert gates["recompiles"]["value"] is None
    assert "3 times" in gates["recompiles"]["reason"]


def at(folder: Path, second: float, took: float = 0.0, **columns: Any) -> dict[str, Any]:
    start_ns = min(read_table(folder / "requests.arrow", REQUESTS)[0]["sent_ns"].to_pylist())
    end = start_ns + int(second * SECOND)
    return {"start_ns": end - int(took * SECOND), "end_ns": end, "phase": "serving", **columns}


def test_compiles_in_a_log_fail_an_arm_whose_clients_saw_none(tmp_path: Path) -> None:
    folder = written(tmp_path, QUIET)
    summary = analyze(write_logged(folder, [at(folder, 100, 0.2), at(folder, 200, 0.2)], blind_spots=[ONCE]))
    gate = gates_of(summary)["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("FAIL", 2)
    assert "By its log: 2 recompiles" in gate["reason"]
    # The log may leave compiles out, so what clients see decides the other gates.
    assert "no stall from" in gates_of(summary)["longest stall"]["reason"]
    others = {gate["gate"] for gate in summary["gates"] if gate["arm"] == TREATMENT}
    assert "errors" in others
    assert "deaths" not in others
    compiled = row_of(summary)["compile"]
    assert (compiled["recompiles"], compiled["jit_compiles"], compiled["blind_spots"]) == (2, 2, [ONCE])
    assert len(summary["events"]) == 2


def test_a_complete_log_passes_an_arm_with_too_few_requests_to_see_compiles(tmp_path: Path) -> None:
    folder = written(tmp_path, THIN)
    alone = gates_of(analyze(folder))["recompiles"]
    assert alone["verdict"] == "INCONCLUSIVE"
    gate = gates_of(analyze(write_logged(folder, [])))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("PASS", 0)


def test_an_incomplete_log_passes_no_arm(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [], blind_spots=[ONCE])
    gate = gates_of(analyze(folder))["recompiles"]
    assert (gate["verdict"], gate["value"]) == ("INCONCLUSIVE", None)
    assert ONCE in gate["reason"]
    assert any(ONCE in note for note in row_of(analyze(folder))["external"]["notes"])


def test_stalls_that_the_log_does_not_explain_leave_the_gates_open(tmp_path: Path) -> None:
    gate = gates_of(analyze(write_logged(written(tmp_path, STALLING), [])))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "3 times" in gate["reason"]


def test_a_trial_without_the_facts_of_its_log_leaves_the_gates_open(tmp_path: Path) -> None:
    folder = write_logged(written(tmp_path, THIN), [])
    arms = [{"name": name} for name in (CONTROL, TREATMENT)]
    (folder / "trial.json").write_text(json.dumps({"trial": 1, "complete": True, "arms": arms}))
    gate = gates_of(analyze(folder))["recompiles"]
    assert gate["verdict"] == "INCONCLUSIVE"
    assert "trial 1" in gate["reason"]


def test_a_logged_compile_without_a_length_lasts_as_long_as_its_stall(tmp_path: Path) -> None:
    folder = written(tmp_path, STALLING)
    stall, *_ = sorted(row_of(analyze(folder))["blackbox"]["stalls"], key=lambda stall: stall["start_ns"])
    inside = {"start_ns": stall["start_ns"], "end_ns": stall["start_ns"], "kind": "recompile"}
    summary = analyze(write_logged(folder, [inside, at(folder, 1.0, frame="of no stall")], blind_spots=[ONCE]))
    rows = {row["event_id"]: row for row in summary["events"]}
    logged, elsewhere = rows["1-log-0"], rows["1-log-1"]
    assert (logged["start_ns"], logged["end_ns"]) == (stall["start_ns"], stall["end_ns"])
    assert logged["requests_hit"] >= 1
    assert elsewhere["seconds"] == 0
    assert gates_of(summary)["longest stall"]["verdict"] == "FAIL"
