from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.outside import SCENARIOS, agreements, experiment, kept_runs, trace
from loadtests.experiments.reading import load

KEPT = kept_runs()
CALLED = {"h100-from-outside": {"longer": 16, "batches": 4}, "cpu-from-outside": {"longer": 3}}


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_all_compiles_of_a_real_run_are_seen_and_nothing_is_called_that_is_none(kept: Path) -> None:
    rows = {row["arm"]: row for row in agreements(kept)}
    assert rows["eager"]["telemetry"] == rows["eager"]["unexplained"] == rows["eager"]["extra"] == 0
    for arm in ("naive", "lengths", "steps"):
        assert rows[arm]["seen"] == rows[arm]["telemetry"] >= 1
        assert rows[arm]["extra"] == 0
        assert rows[arm]["onset_error_ms"] < 50
    assert rows["steps"]["called"] == CALLED[kept.parent.name].get(kept.name, 0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_is_an_experiment_with_its_trace(scenario: str, tmp_path: Path) -> None:
    limits = {"seconds": 60.0, "rate": 3.0, "most_prompt": 192, "most_answer": 48, "seed": 1}
    rows = list(trace(scenario, **limits))  # type: ignore[arg-type]
    assert rows == sorted(rows)
    assert rows == list(trace(scenario, **limits))  # type: ignore[arg-type]
    assert max(prompt for _, prompt, _ in rows) <= 192
    assert max(answer for _, _, answer in rows) <= 48
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00.0,5,5\n2026-01-01 00:01:01.0,5,5\n")
    options = argparse.Namespace(model="random:tiny", devices=["cpu"], slots=8, **limits)
    (tmp_path / "outside.toml").write_text(experiment(scenario, options, path))
    arms = load(tmp_path / "outside.toml").own_arms
    assert [arm.name for arm in arms] == ["eager", "naive", "lengths", "steps"]
    assert arms[3].config.shapes.kind == "buckets"
