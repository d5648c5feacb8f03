"""Where time went: parts that add up, of the requests around a quantile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.run_records import read_run
from analysis.run.run import Run
from analysis.run.time_parts import ends, split, time_parts
from tests.fakes.runs import Compile, FakeArm, FakeRun, write_run

SHORT = FakeRun(arms=(FakeArm(name="eager", enabled=False), FakeArm(name="compiled")), duration_s=60.0, rate=5.0)
times = st.lists(st.floats(0, 1e5), min_size=5, max_size=5)


def of(*row: float) -> list[float]:
    return split(*(np.array([value], dtype=np.float64) for value in row))[:, 0].tolist()


def test_what_the_server_does_not_name_is_the_rest() -> None:
    assert of(100.0, 10.0, 20.0, 60.0, 0.0) == [10.0, 20.0, 60.0, 0.0, 10.0]


def test_a_stall_is_taken_out_of_the_longest_part_and_then_of_the_next() -> None:
    assert of(100.0, 5.0, 70.0, 20.0, 50.0) == [5.0, 20.0, 20.0, 50.0, 5.0]
    assert of(100.0, 5.0, 70.0, 20.0, 75.0) == [5.0, 0.0, 15.0, 75.0, 5.0]


def test_parts_longer_than_the_request_are_shortened_in_proportion() -> None:
    assert of(50.0, 20.0, 20.0, 60.0, 0.0) == [10.0, 10.0, 30.0, 0.0, 0.0]


@given(times)
def test_parts_add_up_and_none_is_negative(row: list[float]) -> None:
    parts = of(*row)
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(row[0], abs=1e-6)


def test_requests_around_a_quantile_are_a_share_of_all_and_a_few_at_least() -> None:
    values = np.arange(1001.0)
    assert ends(values, 0.5, 0.025) == (475.0, 525.0)
    assert ends(values, 0.99, 0.005) == (985.0, 995.0)
    assert ends(values[:51], 0.99, 0.005) == (48.0, 50.0)
    assert ends(values[:1], 0.99, 0.005) == (0.0, 0.0)


def test_the_middle_and_the_tail_of_a_stalled_arm_differ_by_the_stall(tmp_path: Path) -> None:
    stalled = FakeArm(name="compiled", compiles=(Compile(at_s=20.0, seconds=3.0),))
    run = Run.of(read_run(write_run(tmp_path / "run", replace(SHORT, arms=(SHORT.arms[0], stalled)))))
    middle, tail = time_parts(run, "compiled")
    assert (middle.quantile, tail.quantile) == (0.5, 0.99)
    assert middle.stall_ms < 100 < 1000 < tail.stall_ms
    for item in (middle, tail, *time_parts(run, "eager")):
        assert item.queue_ms == pytest.approx(1.0)
        parts = (item.queue_ms, item.prefill_ms, item.decode_ms, item.stall_ms, item.rest_ms)
        assert sum(parts) == pytest.approx(item.e2e_ms)
    assert [item.stall_ms for item in time_parts(run, "eager")] == [0.0, 0.0]
