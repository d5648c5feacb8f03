"""What a start costs, which shapes it warmed, searches for kernels, and compiles in the background."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.analysis.run.startup import searching_starts, start_spread, startup_row
from tailgate.analysis.statistics.unpaired import quantile_error
from tailgate.analysis.summary.summary import analyze
from tests.fakes.machines import tell
from tests.fakes.runs import SECOND, FakeArm, FakeRun, run_in, start_of, write_run

MINUTE = FakeRun(duration_s=60, rate=2)


def add_events(run: Path, *events: dict[str, Any], trial: int = 1) -> None:
    start = start_of(trial)
    with RecordWriter(run / f"trial-{trial:02}" / "compile_events-1.arrow", COMPILE_EVENTS) as writer:
        for number, event in enumerate(events):
            at, seconds = event.pop("at_s"), event.pop("seconds")
            row = {"event_id": f"x{number}", "trial": trial, "phase": "warmup"}
            row |= {"arm": "compiled", "replica": "compiled-0"}
            times = {"start_ns": start + int(at * SECOND), "end_ns": start + int((at + seconds) * SECOND)}
            writer.append({**row, **times, **event})


def test_a_start_counts_from_its_process_until_it_serves(tmp_path: Path) -> None:
    seconds = {
        "process": 1.0,
        "import": 3.0,
        "load": 2.0,
        "prefill 32": 10.0,
        "decode 4@256": 20.0,
        "capture decode 1@256": 0.5,
        "other": 0.1,
    }
    start = {"items_ns": {item: int(spent * SECOND) for item, spent in seconds.items()}, "memory_bytes": {"weights": 7}}
    directory = tell(write_run(tmp_path / "run", MINUTE), startup={"compiled": start})
    row = startup_row(run_in(directory), "compiled")
    assert row["serving_s"] == pytest.approx(sum(seconds.values()))
    assert (row["load_s"], row["warmup_s"], row["memory_bytes"]) == (2.0, 30.5, {"weights": 7})


SEARCHING = {"enabled": True, "mode": "default", "options": {"coordinate_descent_tuning": True}}
AUTOTUNE = {"enabled": True, "mode": "max-autotune"}
OPTION = {"enabled": True, "mode": "default", "options": {"max_autotune_gemm": True}}
PLAIN = {"enabled": True, "mode": "reduce-overhead", "options": {}}
ONE, TWO, THREE = 0.01**2, (2 * 0.01**2 + 3 * 0.03**2) / 2, (0.01**2 + 0.01**2 + 0.03**2) / 2


@pytest.mark.parametrize(
    ("policy", "tuned", "phase", "searching", "variance"),
    [
        *((policy, (1, 2, 3), "warmup", 3, THREE) for policy in (SEARCHING, AUTOTUNE, OPTION)),
        (SEARCHING, (1,), "warmup", 1, TWO),  # one search does not average its variance
        (SEARCHING, (), "warmup", 0, ONE),  # on a processor, or with an artifact
        (PLAIN, (1, 2, 3), "warmup", 0, ONE),  # a few settings, as always
        ({**SEARCHING, "enabled": False}, (1, 2, 3), "warmup", 0, ONE),
        (SEARCHING, (1, 2, 3), "serving", 0, ONE),
    ],
)
def test_each_compile_that_searches_has_a_variance_of_its_own(
    policy: dict[str, Any], tuned: tuple[int, ...], phase: str, searching: int, variance: float, tmp_path: Path
) -> None:
    arms = (FakeArm(name="eager", enabled=False), FakeArm(name="compiled", config={"compile": policy}))
    directory = write_run(tmp_path / "run", replace(MINUTE, trials=3, arms=arms))
    for number in tuned:
        event = {"at_s": -5, "seconds": 1, "kind": "autotune", "phase": phase, "shape": "x"}
        add_events(directory, event, trial=number)
    run = run_in(directory)
    assert (searching_starts(run, "compiled"), searching_starts(run, run.control)) == (searching, 0)
    assert start_spread(run, "compiled") == pytest.approx(variance**0.5)


@pytest.mark.parametrize(("blocks", "degrees"), [(2, 1.0), (3, 2.0), (20, 3.0), (120, 10.0)])
def test_a_longer_trial_knows_better_how_much_its_traffic_moved_it(blocks: int, degrees: float) -> None:
    block = np.repeat(np.arange(blocks), 50)
    values = np.exp(np.random.default_rng(1).standard_normal(len(block)))
    error = quantile_error(values, block, 0.5, float(np.median(values)))
    assert error is not None
    assert error.degrees == degrees
    one = np.zeros(50, dtype=np.int64)
    assert quantile_error(np.arange(1.0, 51.0), one, 0.5, 25.0) is None


def test_a_compile_in_the_background_holds_up_no_request(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", FakeRun(duration_s=120, rate=4))
    add_events(directory, {"kind": "background_compile", "phase": "serving", "at_s": 30.0, "seconds": 30.0})
    assert not run_in(directory).attribution.hit.any()
    eager, compiled = (arm["compile"] for arm in analyze(directory)["arms"])
    assert (compiled["recompiles"], compiled["background_s"], eager["background_s"]) == (0, 30.0, 0.0)
