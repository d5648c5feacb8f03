"""The latency of each arm in every step of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.frontier.latencies import drawn_target, step_latencies
from analysis.records.run_records import read_run
from analysis.report.charts import chart_data
from analysis.report.frontier import costly, latencies
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import FakeRun, write_run

KNEES = {"eager": 17.0, "new": 33.0}
RATES = [[8, 16, 18, 32, 64], [8, 14, 18, 30, 36]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_search(tmp_path_factory.mktemp("latencies") / "run", KNEES, RATES)


def test_the_quantile_of_every_step_lies_within_its_interval(searched: Path) -> None:
    run = Run.of(read_run(searched))
    target = drawn_target(run)
    assert target is not None
    assert target.key == "p90_ttft_ms"
    steps = step_latencies(run, target)
    assert len(steps) == len(KNEES) * sum(map(len, RATES))
    for step in steps:
        assert step.ms == pytest.approx(50.0 if step.rate <= KNEES[step.arm] else 1000.0)
        assert step.low_ms is None or step.low_ms <= step.ms
        assert step.high_ms is None or step.ms <= step.high_ms
        assert step.compiles == 0


def test_a_search_by_goodput_alone_has_no_quantile_to_draw(tmp_path: Path) -> None:
    limits = "[goodput]\nttft = 500\nattainment_pct = 90\n"
    run = Run.of(read_run(write_search(tmp_path / "run", KNEES, RATES[:1], limits=limits)))
    assert drawn_target(run) is None


def test_the_charts_have_steps_limits_and_costs(searched: Path) -> None:
    summary = analyze(searched)
    assert latencies(summary) == "p90 TTFT"
    assert costly(summary)
    knees: dict[str, Any] = chart_data(summary)["knees"]
    assert (knees["label"], knees["limit_ms"]) == ("p90 TTFT", 500)
    assert {step["arm"] for step in knees["steps"]} == {0, 1}
    assert {cost["arm"] for cost in knees["costs"]} == {0, 1}
    assert all(cost["low"] <= cost["seen"] for cost in knees["costs"] if cost["low"] is not None)


def test_a_run_without_a_search_draws_nothing(tmp_path: Path) -> None:
    plain = analyze(write_run(tmp_path, FakeRun(duration_s=60, trials=2, rate=2, gates={"draws": 99})))
    assert latencies(plain) == ""
    assert chart_data(plain)["knees"] == {}
