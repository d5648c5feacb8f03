"""`tailgate compare` on releases that really ran with a known fault, and on equal ones: Locust, Envoy, paced fake arms.

The same with a real model is `python benchmarks/releases.py`, for a machine that is quiet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from analysis.releases.history import History
from analysis.releases.release import read_release
from analysis.settings.release_limits import ReleaseLimits
from benchmarks.releases import Plan, compared, run_dir
from tests.fakes.whole_run import FAKE_ARM

FIGURES = ("p50_tpot_ms", "process_peak_bytes")


@pytest.mark.timeout(600)
def test_planted_decode_time_and_memory_fail_and_an_equal_run_passes(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path,
        trials=3,
        seconds=6.0,
        rate=6.0,
        lag_ms=5000.0,  # the arms sleep, so that a busy machine changes little
        arm_command=(sys.executable, str(FAKE_ARM), "--token-s", "0.04", "--memory-bytes", "500000000"),
        more="[bed]\nsample_s = 0\nreference_s = 0\n",
        limits=ReleaseLimits(need_references=False, limits={"p50_tpot_ms": 0.25}),
    )
    baseline = History(releases=(read_release(run_dir(plan, "baseline", seed=1000, planted="")),))
    for seed, (planted, verdict) in enumerate({"decode=1.5,memory=1.3": "FAIL", "": "PASS"}.items()):
        candidate = run_dir(plan, f"candidate-{seed}", seed=2000 + seed, planted=planted)
        rows = compared(plan, baseline, candidate)["figures"]
        found = {(row["arm"], row["figure"]): row["verdict"] for row in rows if row["figure"] in FIGURES}
        assert found == {(arm, figure): verdict for arm in ("eager", "padded") for figure in FIGURES}, rows
