"""The sections on causes and on stalls seen from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.report import outside
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.summary.summary import analyze
from benchmarks.simulation.scenario import Scenario, run
from tests.analysis.judging.checks.test_telemetry import stopped
from tests.fakes.external_runs import write_external
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    made = run(Scenario(step=64, duration_s=300.0, new_shapes=5, compile_s=3.0), rng)
    return analyze(write_external(tmp_path_factory.mktemp("external"), made, rng, gates={"draws": 99, "min_blocks": 2}))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=100, seconds=5)]))
    folder = write_run(tmp_path_factory.mktemp("own"), FakeRun(arms=arms, duration_s=200.0, gates={"draws": 99}))
    return analyze(folder)


def test_stalls_of_an_external_arm_are_listed_with_their_shape(external: dict[str, Any]) -> None:
    lines = outside.stalls(external).rows
    assert 4 <= len(lines) <= 5
    assert {line["Cause"] for line in lines} == {"compile"}
    shape = "First-seen length"
    assert all(line["Took"].startswith("3") and line[shape].replace(",", "").isdigit() for line in lines)
    for report in (html_report(external), markdown_report(external)):
        assert "Stalls seen from outside" in report
        assert lines[0][shape] in report


def test_causes_and_their_limits_are_shown_for_arms_with_telemetry(own: dict[str, Any]) -> None:
    figures = {(row.group, row.name): row.values for row in outside.causes(own)}
    control, compiled = figures["Queued behind a compile", "requests"]
    assert control == "0"
    assert int(compiled) > 5
    assert "[" in figures["Without compiles", "share of p99 E2E explained, 95 % limits"][1]
    assert "[" in figures["Without compiles", "p99 E2E, for these requests"][1]
    assert figures["In the backlog of one", "then in their backlog"][0] == "0 s"
    assert figures["Steady traffic", "in a backlog of compiles"][1].startswith("0 of ")
    assert not any(name == "not known, since" for _, name in figures)
    for report in (html_report(own), markdown_report(own)):
        assert "What compiles did to requests" in report


def test_where_p99_without_compiles_is_withdrawn_the_reason_stands_in_its_place(
    tmp_path: Path,
) -> None:
    arms = (EAGER, FakeArm(name="compiled", compiles=[Compile(at_s=40, seconds=5)]))
    folder = write_run(tmp_path, FakeRun(arms=arms, duration_s=90.0, server_columns=False, gates={"draws": 99}))
    summary = analyze(folder)
    figures = {(row.group, row.name): row.values for row in outside.causes(summary)}
    assert figures["Without compiles", "p99 E2E, for these requests"][1] == "–"
    assert "queue_ns" in figures["Without compiles", "not known, since"][1]
    assert "queue_ns" in html_report(summary)


def test_agreement_is_shown_where_there_is_telemetry(own: dict[str, Any], external: dict[str, Any]) -> None:
    assert ("Beside telemetry", "missed") in {(row.group, row.name) for row in outside.outside(own)}
    assert not any(row.group == "Beside telemetry" for row in outside.outside(external))
    assert outside.stalls(own).rows == []


def test_a_stall_that_no_compile_event_explains_is_listed(tmp_path: Path) -> None:
    summary = stopped(tmp_path / "run", 100)
    (line,) = outside.stalls(summary).rows
    assert (line["Arm"], line["At"], line["Cause"]) == ("compiled", "100 s", "unexplained")
    for report in (html_report(summary), markdown_report(summary)):
        assert "Stalls that no compile event explains" in report


def test_a_summary_without_compiles_has_no_such_section() -> None:
    summary: dict[str, Any] = {"arms": [{"name": "eager", "compile": {}}]}
    assert outside.causes(summary) == outside.outside(summary) == outside.stalls(summary).rows == []
