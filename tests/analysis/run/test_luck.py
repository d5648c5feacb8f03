from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.records.run_records import read_run
from analysis.run.luck import luck_of_quantile, luck_of_share, searching_starts, start_spread
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
def test_each_compile_that_searches_has_a_variance_of_its_own(policy: dict[str, Any], tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", policy, (1, 2, 3))
    assert (searching_starts(run, "compiled"), searching_starts(run, run.control)) == (3, 0)
    assert start_spread(run, "compiled") == pytest.approx(((0.01**2 + 0.01**2 + 0.03**2) / 2) ** 0.5)
    assert startup_row(run, "compiled")["searching_starts"] == 3
    assert "searching_starts" not in startup_row(run, run.control)


def test_trials_that_share_one_search_do_not_average_its_variance(tmp_path: Path) -> None:
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
def test_starts_without_a_search_have_no_compile_to_compile_variance(
    policy: dict[str, Any], tuned: tuple[int, ...], phase: str, tmp_path: Path
) -> None:
    run = run_with(tmp_path / "run", policy, tuned, phase)
    assert searching_starts(run, "compiled") == 0
    assert start_spread(run, "compiled") == pytest.approx(0.01)


def test_noise_that_lasts_longer_than_a_block_widens_the_spread() -> None:
    rng = np.random.default_rng(3)
    block = np.repeat(np.arange(40), 100)
    noise = rng.standard_normal(4000)
    slow = np.repeat(rng.standard_normal(4), 1000)  # lasts for ten blocks
    brief = luck_of_quantile(np.exp(noise), block, 0.5, 1.0)
    lasting = luck_of_quantile(np.exp(noise + slow - np.median(slow)), block, 0.5, 1.0)
    assert brief.degrees == lasting.degrees == 5.0
    assert brief.spread is not None
    assert lasting.spread is not None
    # Forty blocks of independent requests, against four pieces of luck.
    assert brief.spread < 0.05
    assert lasting.spread > 0.3


@pytest.mark.parametrize(("blocks", "degrees"), [(2, 1.0), (3, 2.0), (20, 3.0), (120, 10.0)])
def test_a_longer_trial_says_more_surely_how_much_its_traffic_moved_it(blocks: int, degrees: float) -> None:
    block = np.repeat(np.arange(blocks), 50)
    hits = np.random.default_rng(1).random(len(block)) < 0.9
    luck = luck_of_share(hits, block)
    assert luck.degrees == degrees
    assert luck.spread == pytest.approx(np.sqrt(0.1 / 0.9 / len(block)), rel=1.5)


def test_one_block_has_no_spread() -> None:
    block = np.zeros(50, dtype=np.int64)
    assert luck_of_share(block == 1, block).spread is None
    assert luck_of_quantile(np.arange(1.0, 51.0), block, 0.5, 25.0).spread is None
