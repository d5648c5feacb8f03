"""Twenty runs in which something goes wrong, held against every promise; `make faults` makes hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import table
from tests.faults.live_run import carry_out
from tests.faults.plan import covering, plan
from tests.faults.promises import PROMISES, breaches

SEEDS = covering(20)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_goes_wrong_every_promise_holds(seed: int, tmp_path: Path) -> None:
    planned = plan(seed, quick=True)
    assert not breaches(carry_out(planned, tmp_path)), planned


def test_the_table_counts_each_promise_fault_and_verdict() -> None:
    rows = [
        {
            "seed": 4,
            "family": "safety",
            "truth": "good",
            "verdict": "PASS",
            "analyzed": None,
            "breaches": {},
            "faults": [],
        },
        {
            **{"seed": 5, "family": "liveness", "truth": "naive", "verdict": None, "analyzed": 3},
            "breaches": {"no wrong PASS": ["it did"]},
            "faults": [{"fault": "SIGKILL of page", "hit": "1 of page"}, {"fault": "SIGKILL of load", "hit": ""}],
        },
    ]
    lines = table(rows).splitlines()
    assert f"{'no wrong PASS':<36}{1:<6}{2:<6}5" in lines
    assert f"{'goes on once faults are lifted':<36}{1:<6}{1:<6}" in lines
    assert f"{'can be judged afterwards':<36}{1:<6}{1:<6}" in lines
    assert [line for line in lines if "SIGKILL" in line] == ["    1  SIGKILL of page"]
    assert "    1  good: PASS" in lines
    assert all(any(line.startswith(name) for line in lines) for name in PROMISES)
