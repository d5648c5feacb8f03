from __future__ import annotations

from dataclasses import replace

import pytest

from tests.analysis.releases.test_gates import BUILD, compared


@pytest.mark.parametrize("trials", [1, 2, 3, 6])
def test_equal_builds_fail_in_no_more_than_a_twentieth_of_days(trials: int) -> None:
    build = replace(BUILD, trials=trials)
    failed = [seed for seed in range(100) if compared(build, build, seed=seed)["overall"] == "FAIL"]
    assert len(failed) <= 5
