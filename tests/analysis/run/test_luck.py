from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.records.run_records import read_run
from analysis.run.luck import searching_starts, start_spread
from analysis.run.run import Run
from analysis.run.startup import startup_row
from tests.analysis.run.test_startup import add_events
from tests.fakes.runs import FakeRun, write_run

TRIALS = FakeRun(trials=3, duration_s=60, rate=2)
SEARCHING: dict[str, Any] = {"enabled": True, "mode": "default", "options": {"coordinate_descent_tuning": True}}


def run_with(directory: Path, policy: dict[str, Any], tuned: tuple[int, ...], phase: str = "warmup") -> Run:
    """The run whose arm `compiled` has this policy, and tuned kernels in these trials."""
    write_run(directory, TRIALS)
    for number in range(1, 4):
        folder = directory / f"trial-{number:02}"
        info = json.loads((folder / "trial.json").read_text())
        for row in info["arms"]:
            if row["name"] == "compiled":
                row["config"] = {"compile": policy}
        (folder / "trial.json").write_text(json.dumps(info))
        if number in tuned:
            event = {"at_s": -5, "seconds": 1, "kind": "autotune", "phase": phase, "shape": "x"}
            add_events(folder, event, trial=number)
    return Run.of(read_run(directory))


@pytest.mark.parametrize(
    "policy",
    [
        SEARCHING,
        {"enabled": True, "mode": "max-autotune"},
        {"enabled": True, "mode": "default", "options": {"max_autotune_gemm": True}},
    ],
)
def test_each_compile_that_searches_has_a_luck_of_its_own(policy: dict[str, Any], tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", policy, (1, 2, 3))
    assert searching_starts(run, "compiled") == 3
    assert searching_starts(run, run.control) == 0
    assert start_spread(run, "compiled") == pytest.approx(((0.01**2 + 0.01**2 + 0.03**2) / 2) ** 0.5)
    assert startup_row(run, "compiled")["searching_starts"] == 3
    assert "searching_starts" not in startup_row(run, run.control)


def test_trials_that_share_what_one_search_found_do_not_average_its_luck(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", SEARCHING, (1,))
    assert start_spread(run, "compiled") == pytest.approx(((2 * 0.01**2 + 3 * 0.03**2) / 2) ** 0.5)


@pytest.mark.parametrize(
    ("policy", "tuned", "phase"),
    [
        (SEARCHING, (), "warmup"),  # on a processor, or with an artifact
        ({"enabled": True, "mode": "reduce-overhead", "options": {}}, (1, 2, 3), "warmup"),  # a few settings, as always
        ({**SEARCHING, "enabled": False}, (1, 2, 3), "warmup"),
        (SEARCHING, (1, 2, 3), "serving"),
    ],
)
def test_what_was_not_searched_for_at_a_start_is_no_luck_of_starts(
    policy: dict[str, Any], tuned: tuple[int, ...], phase: str, tmp_path: Path
) -> None:
    run = run_with(tmp_path / "run", policy, tuned, phase)
    assert searching_starts(run, "compiled") == 0
    assert start_spread(run, "compiled") == pytest.approx(0.01)
