"""Gates on compiles of an arm without telemetry, through the whole analysis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from benchmarks.simulation.detection import NOISE, TREATMENT
from benchmarks.simulation.records import write_requests
from benchmarks.simulation.scenario import Scenario, run
from tests.fakes.external_runs import write_external

GATES = ("recompiles", "longest stall", "stall per minute", "requests hit")
SHORT = {"draws": 99, "min_blocks": 2}


def judged(folder: Path, scenario: Scenario, seed: int = 1, **gates: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recompile gates of the external arm by name, and its row."""
    rng = np.random.default_rng(seed)
    summary = analyze(write_external(folder, run(scenario, rng), rng, gates={**SHORT, **gates}))
    found = {gate["gate"]: gate for gate in summary["gates"] if gate["arm"] == TREATMENT}
    row = next(row for row in summary["arms"] if row["name"] == TREATMENT)
    return {name: found[name] for name in GATES}, row


def test_an_arm_that_compiles_while_serving_fails_though_it_tells_nothing(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2)
    assert {gate["verdict"] for gate in gates.values()} == {"FAIL"}
    assert gates["recompiles"]["value"] == row["blackbox"]["compiles"] >= 5
    assert gates["longest stall"]["value"] == pytest.approx(3.0, abs=0.2)
    assert "Seen from outside: " in gates["recompiles"]["reason"]
    assert "had not met" in gates["recompiles"]["reason"]
    stall = row["blackbox"]["stalls"][0]
    assert stall["cause"] == "compile"
    assert stall["shape"] % 64 == 0
    assert stall["trigger"].endswith(TREATMENT)


def test_stalls_within_the_budget_pass_and_are_named(tmp_path: Path) -> None:
    budget = {"max_recompiles": 9, "max_stall_s": 5.0, "max_stall_s_per_min": 9.0, "max_requests_hit_pct": 50.0}
    gates, _ = judged(tmp_path, Scenario(step=64, duration_s=400.0, new_shapes=6, compile_s=3.0), seed=2, **budget)
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    assert "stalls began with a first-seen prompt length" in gates["recompiles"]["reason"]


def test_an_arm_that_never_stalls_passes_and_what_was_too_short_to_see_is_said(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=300.0, host_stalls=2))
    assert {gate["verdict"] for gate in gates.values()} == {"PASS"}
    assert gates["recompiles"]["value"] == 0.0
    shown = f"no stall from {row['blackbox']['detectable_s']:.2g} s on"
    assert shown in gates["recompiles"]["reason"]
    assert "that the others stood still too" in gates["recompiles"]["reason"]


def test_stalls_that_nobody_can_explain_leave_the_gates_open(tmp_path: Path) -> None:
    gates, row = judged(tmp_path, Scenario(step=64, duration_s=300.0, private_stalls=3))
    assert (row["blackbox"]["compiles"], row["blackbox"]["unexplained"]) == (0, 3)
    assert gates["recompiles"]["verdict"] == gates["longest stall"]["verdict"] == "INCONCLUSIVE"
    assert gates["recompiles"]["value"] is None
    assert "stood still 3 times" in gates["recompiles"]["reason"]
    assert "logs" in gates["recompiles"]["reason"]


def test_too_few_requests_to_see_anything_leave_the_gates_open(tmp_path: Path) -> None:
    gates, _ = judged(tmp_path, Scenario(step=64, duration_s=60.0, rate=0.15))
    assert {gate["verdict"] for gate in gates.values()} == {"INCONCLUSIVE"}


def test_noise_of_every_kind_is_no_compile(tmp_path: Path) -> None:
    _, row = judged(tmp_path, replace(NOISE, duration_s=300.0))
    assert row["blackbox"]["compiles"] == 0
    assert row["blackbox"]["host"] >= 1


def test_the_same_records_give_the_same_finding(tmp_path: Path) -> None:
    rows = [judged(tmp_path / str(number), Scenario(step=64, duration_s=200.0, private_stalls=2)) for number in (1, 2)]
    assert rows[0] == rows[1]


def test_tokens_of_a_request_whose_first_is_unknown_are_no_signs_of_life(tmp_path: Path) -> None:
    """Only the gaps between them are known then, and not when they came."""
    rng = np.random.default_rng(1)
    folder = write_external(tmp_path, run(Scenario(step=64, duration_s=300.0), rng), rng, gates=SHORT)
    table, _ = read_table(folder / "requests.arrow", REQUESTS)
    known = pa.array(np.arange(table.num_rows) % 2 == 0)

    def view(*unknown: str) -> dict[str, Any]:
        columns = [
            pc.if_else(known, column, pa.scalar(None, column.type)) if name in unknown else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        write_requests(folder / "requests.arrow", pa.table(columns, schema=REQUESTS))
        arm = next(arm for arm in analyze(folder)["arms"] if arm["name"] == TREATMENT)
        return {key: arm["blackbox"][key] for key in ("silences", "stalls", "unexplained", "compiles")}

    assert view("first_token_ns") == view("first_token_ns", "token_ns")
