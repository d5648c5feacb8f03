"""Releases that really ran, with a fault that is known: real Locust, real Envoy, paced fake arms, `tailgate compare`.

The same with a real model is `python benchmarks/releases.py`, for a machine that is quiet.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.settings.release_limits import ReleaseLimits
from benchmarks.releases import KINDS, Plan, outcomes, shares

FAKE_ARM = Path(__file__).resolve().parents[1] / "fakes" / "arm.py"


@pytest.mark.timeout(1200)
def test_planted_decode_time_and_memory_fail_and_equal_runs_do_not(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path,
        trials=4,
        seconds=8.0,
        rate=6.0,
        # Sleep paces its tokens, so that a busy machine changes little, whatever its generator or references say.
        lag_ms=5000.0,
        arm_command=(sys.executable, str(FAKE_ARM), "--token-s", "0.04", "--memory-bytes", "500000000"),
        # Other tests beside it would be called what they are: foreign work on a busy host.
        more="[bed]\nsample_s = 0\nreference_s = 0\n",
        limits=ReleaseLimits(need_references=False),
    )
    # One run cannot promise what nine of ten find: 10 % is for made-up runs (tests/simulation/test_error_rates.py). A
    # trial of 8 s that a busy machine slows by a fifth leaves 25 % open, as it should: seen.
    kinds = [replace(kind, planted="decode=1.5") if kind.name == "decode" else kind for kind in KINDS]
    rows = outcomes(plan, kinds, 1, lambda row: None)
    assert [line["met"] for line in shares(rows, kinds)] == [True] * len(kinds), rows
