"""What trials tell of their traffic reaches the summary and every report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.judging.checks.traffic import check_open_loop, check_sample_ratio
from analysis.judging.gates import INCONCLUSIVE
from analysis.records.tables import RecordError
from analysis.report.html import html_report
from analysis.report.load import traffic
from analysis.report.markdown import markdown_report
from analysis.report.terminal import verdict_table
from analysis.run.slo import parse_goodput
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import FakeRun, write_run


def told(folder: Path, **facts: Any) -> Path:
    """A run whose trials say `facts` besides."""
    write_run(folder, FakeRun(duration_s=60, trials=2, rate=2, gates={"draws": 99}))
    for path in folder.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        path.write_text(json.dumps({**info, **facts, "number": info["trial"]}))
    return folder


def sentences(summary: dict[str, Any]) -> dict[str, str]:
    return dict(traffic(summary))


def test_lengths_over_the_limits_reach_every_report(tmp_path: Path) -> None:
    dropped = {"policy": "drop", "input_over": 7, "output_over": 2, "requests_dropped": 8, "turns_after_end": 3}
    summary = analyze(told(tmp_path, dropped=dropped))
    assert summary["traffic"]["over_limit"] == {
        "policy": "drop", "input_over": 14, "output_over": 4, "requests_dropped": 16, "turns_after_end": 6,
    }  # fmt: skip
    line = "14 prompts and 4 answers were longer: left out (16 requests left out)."
    assert sentences(summary)["Over the model's limits"] == line
    for report in (html_report(summary), markdown_report(summary), verdict_table(summary, width=200)):
        assert "14 prompts and 4 answers were longer" in report


def test_a_closed_loop_is_reported_and_decides_nothing_about_tails(tmp_path: Path) -> None:
    summary = analyze(told(tmp_path, loop="closed", concurrency=8, open_loop=False, planned={}))
    assert summary["design"]["open_loop"] is False
    assert "8 requests under way" in sentences(summary)["Closed loop"]
    estimates = [gate for gate in summary["gates"] if gate["kind"] in ("noninferiority", "slo")]
    assert estimates
    assert {gate["verdict"] for gate in estimates} == {INCONCLUSIVE}
    assert all("open loop" in gate["blocked_by"] for gate in estimates)


def test_the_open_loop_check_names_how_much_was_under_way() -> None:
    assert "at most 8 requests under way to each arm" in check_open_loop(False, True, 8).reason
    assert not check_open_loop(False, True, 8).ok
    assert check_open_loop(True, True, None).ok


def test_an_arm_of_weight_0_gets_no_session() -> None:
    check = check_sample_ratio({"eager": 500, "new": 3}, {"eager": 1, "new": 0})
    assert check is not None
    assert not check.ok
    assert "weight 0 and got 3 sessions" in check.reason
    assert check_sample_ratio({"eager": 500, "new": 0}, {"eager": 1, "new": 0}) is None


def test_goodput_limits_are_read_and_bad_ones_refused() -> None:
    targets, share = parse_goodput({"ttft": 200, "e2el": 900.0, "attainment_pct": 95})
    assert [(target.metric, target.limit) for target in targets] == [("ttft", 200.0), ("e2e", 900.0)]
    assert share == 0.95
    assert parse_goodput({}) == ((), None)
    for table in ({"ttft": 0}, {"ttft": "x"}, {"speed": 3}, {"e2e": 1, "e2el": 2}, {"attainment_pct": 90},
                  {"ttft": 1, "attainment_pct": 101}):  # fmt: skip
        with pytest.raises(RecordError, match="goodput"):
            parse_goodput(table)


def test_goodput_counts_the_limits_of_its_own_table(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", {"eager": 100, "new": 1}, [[16, 18]])
    arms = {arm["name"]: arm for arm in analyze(folder)["arms"]}
    assert arms["eager"]["goodput_rps"] == pytest.approx(17.0)
    assert arms["new"]["goodput_rps"] == 0.0
