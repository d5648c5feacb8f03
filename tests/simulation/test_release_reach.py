"""The reach of `tailgate compare`, from records to verdict: made-up runs whose days, starts and traffic scatter."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.releases.comparison import compare_releases
from analysis.releases.history import History
from analysis.releases.release import read_release
from analysis.settings.release_limits import ReleaseLimits
from tests.fakes.beds import referenced
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

ARM = FakeArm(name="compiled", ratio=0.8, memory_bytes={"process_peak": 600_000_000})
REFERENCES = {"python_ms": 10.0, "read_gb_per_s": 20.0, "matmul_tflops": 1.5}
RUN = FakeRun(
    trials=6,
    duration_s=180,
    rate=2.0,
    drift=0.02,
    start_spread=0.01,
    gates={"draws": 99},
    slo={"p99_e2e_ms": 5000},
    environment={"git_commit": "4b1f0c6e2a7d5f80"},
)


def released(folder: Path, *, seed: int, day: int, slower: float = 1.0, **changes: Any) -> Any:
    """A run on a day that has 1 % of its own, on a machine that is so much slower and says so, as far as 1 %."""
    rng = np.random.default_rng([seed, day])
    luck, noise = 0.01 * rng.standard_normal(), 0.01 * rng.standard_normal(3)
    signs = {"python_ms": 1.0, "read_gb_per_s": -1.0, "matmul_tflops": -1.0}
    references: Mapping[str, float] = {
        key: value * float(np.exp(signs[key] * np.log(slower) + by))
        for (key, value), by in zip(REFERENCES.items(), noise, strict=True)
    }
    run = replace(
        RUN,
        arms=(EAGER, replace(ARM, **changes)),
        seed=10 * seed + day,
        day=day,
        day_ratio=slower * float(np.exp(luck)),
        bed=referenced(**references),
    )
    return read_release(write_run(folder / f"{seed}-{day}", run))


def baselines(folder: Path) -> History:
    return History(releases=tuple(released(folder, seed=seed, day=7 * seed) for seed in range(5)))


def compared(folder: Path, history: History, *, seed: int, **changes: Any) -> dict[str, Any]:
    candidate = released(folder, seed=100 + seed, day=35, **changes)
    arms = {name: name for name in candidate.arms}
    return compare_releases(history, candidate, arms=arms, limits=ReleaseLimits())


def failed(document: dict[str, Any]) -> set[str]:
    return {row["figure"] for row in document["figures"] if row["verdict"] == "FAIL"}


def test_planted_faults_fail_and_equal_runs_of_another_day_do_not(tmp_path: Path) -> None:
    history = baselines(tmp_path)
    fat = {"process_peak": 780_000_000}
    slower = [compared(tmp_path / "slow", history, seed=seed, decode=1.1) for seed in range(5)]
    fatter = [compared(tmp_path / "fat", history, seed=seed, memory_bytes=fat) for seed in range(5)]
    equal = [compared(tmp_path / "equal", history, seed=seed)["overall"] for seed in range(10)]
    found = sum("p50_tpot_ms" in failed(document) for document in slower)
    found += sum("process_peak_bytes" in failed(document) for document in fatter)
    assert found >= 9
    assert equal.count("FAIL") == 0


def test_equal_runs_on_a_slower_machine_do_not_fail_and_name_it(tmp_path: Path) -> None:
    history = baselines(tmp_path)
    documents = [compared(tmp_path / "slow", history, seed=seed, slower=1.15) for seed in range(5)]
    assert [document["overall"] for document in documents].count("FAIL") == 0
    assert all("slower" in " ".join(document["notes"]) for document in documents)
