"""The latency of each arm in every step of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.frontier.answer import answer
from analysis.frontier.holdings import Frontier
from analysis.frontier.latencies import StepLatency, drawn_target, latency_at_one_load, step_latencies
from analysis.frontier.search import Left
from analysis.records.run_records import read_run
from analysis.report.charts import chart_data
from analysis.report.frontier import costly, latencies
from analysis.run.run import Run
from analysis.summary.summary import analyze
from tests.analysis.frontier.test_answer import holding
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


def tried(arm: str, trial: int, rate: float, ms: float) -> StepLatency:
    return StepLatency(
        arm=arm, trial=trial, rate=rate, ms=ms, low_ms=None, high_ms=None, requests=100, compiles=0, compile_s=0.0
    )


def test_arms_are_seen_at_the_highest_load_that_the_control_and_another_one_had() -> None:
    steps = [
        *(tried("eager", 1, 2.0, 280), tried("eager", 2, 2.04, 300), tried("eager", 2, 2.9, 400)),
        *(tried("new", 3, 2.0, 100), tried("new", 3, 8.0, 200), tried("late", 4, 8.0, 90)),
    ]
    found = latency_at_one_load(steps, ("eager", "new", "late"), 3.0)
    assert found is not None, "nobody else was tried at 2.9"
    assert (found.rate, found.ms) == (2.04, {"eager": 290, "new": 100})
    assert found.starts == {"eager": 2, "new": 1}
    assert latency_at_one_load(steps, ("eager", "late"), 3.0) is None
    assert latency_at_one_load(steps, ("eager", "new"), 1.0) is None


def test_the_answer_says_what_requests_wait_where_the_control_holds_the_load(searched: Path) -> None:
    summary = analyze(searched)
    assert "As seen at 16 requests/s (one start each), p90 TTFT is 50 ms on eager and 50 ms on new." in " ".join(
        summary["frontier"]["answer"]
    )


def test_an_arm_that_the_answer_leaves_out_is_not_seen_either() -> None:
    frontier = Frontier(
        holdings=tuple(holding(arm, 2.0, 8.0) for arm in ("eager", "new", "late")), orders=(), alpha=0.05
    )
    steps = [tried(arm, 1, 2.0, ms) for arm, ms in (("eager", 280), ("new", 100), ("late", 90))]
    seen = "As seen at 2 requests/s (one start each), p99 TTFT is 280 ms on eager and 100 ms on new."
    dropped = [Left(arm="late", reason="no trial of it was recorded")]
    assert seen in answer(frontier, objective="", starts={}, dropped=dropped, latencies=steps, label="p99 TTFT")
