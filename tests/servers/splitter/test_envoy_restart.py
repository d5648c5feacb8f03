from __future__ import annotations

import time

import pytest

from servers.splitter.envoy import Envoy
from servers.splitter.statistics import SAME_START_S, ArmStatistics, read_statistics
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import Build


@pytest.mark.process
def test_another_start_shows_although_counters_may_have_grown(build: Build) -> None:
    house = build({"eager": 1})
    earlier = read_statistics(house.envoy.admin)["eager"]
    assert abs(read_statistics(house.envoy.admin)["eager"].envoy_start_s - earlier.envoy_start_s) < SAME_START_S
    house.envoy.stop()
    wait_for(lambda: earlier_by(earlier) > SAME_START_S + 2)
    house.envoy = Envoy.start(house.config, log_path=house.work_dir / "again.log", work_dir=house.work_dir)
    house.envoy.wait_ready(PATIENCE_S)
    assert read_statistics(house.envoy.admin)["eager"].envoy_start_s - earlier.envoy_start_s > SAME_START_S


def earlier_by(statistics: ArmStatistics) -> float:
    """How long ago it started, in s."""
    return time.monotonic() - statistics.envoy_start_s
