"""Two releases compared: page, Markdown, JUnit and terminal have the same verdicts and run nothing."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.releases.comparison import compare_releases
from analysis.releases.history import History
from analysis.report.release import (
    open_lines,
    release_html,
    release_junit,
    release_markdown,
    release_table,
    write_release_reports,
)
from analysis.report.trend_charts import HEIGHT, trend_charts
from analysis.settings.release_limits import ReleaseLimits
from tests.analysis.report.conftest import HOSTILE
from tests.fakes.results import LEVELS, Build, release

BUILD = Build(counts={"recompiles": [0, 0, 0, 0]})
SLOW = replace(BUILD, levels={**LEVELS, "p50_tpot_ms": 24.0})


def compared(candidate: Build = SLOW, *, days: int = 6, arm: str = "compiled", **how: Any) -> dict[str, Any]:
    earlier = tuple(release(BUILD, day=day, seed=2, arm=arm) for day in range(days))
    later = release(candidate, day=days, seed=2, arm=arm, **how)
    return compare_releases(History(releases=earlier), later, arms={arm: arm}, limits=ReleaseLimits())


@pytest.mark.parametrize("arm", ["compiled", HOSTILE], ids=["plain", "hostile"])
def test_the_page_fetches_nothing_and_runs_nothing(arm: str, read_page: Callable[[str], Any]) -> None:
    document = compared(arm=arm)
    text = release_html(document)
    page = read_page(text)
    assert page.find("script") == page.find("img") == []
    assert "default-src &#39;none&#39;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<img" not in release_markdown(document)


def test_all_four_reports_stand_in_the_folder(tmp_path: Path) -> None:
    shown = write_release_reports(compared(), tmp_path / "out")
    assert shown.name == "compare.html"
    assert {path.suffix for path in shown.parent.iterdir()} == {".html", ".json", ".md", ".xml"}


def test_every_report_has_the_verdict_of_every_gate() -> None:
    document = compared()
    judged = {row["label"]: row["verdict"] for row in document["figures"] if row["verdict"]}
    root = ET.fromstring(release_junit(document))
    outcome = {
        case.get("name"): next((child.tag for child in case if child.tag != "system-out"), "passed")
        for case in root.iter("testcase")
    }
    expected = {"PASS": "passed", "FAIL": "failure", "INCONCLUSIVE": "skipped"}
    assert outcome == {name: expected[verdict] for name, verdict in judged.items()}
    assert root.get("failures") == str(list(judged.values()).count("FAIL"))
    table, page = release_table(document, width=120), release_markdown(document)
    assert all(label in table and label in page for label in judged)
    assert "✘ FAIL" in table
    assert page.startswith("## ❌ FAIL")
    ET.fromstring(release_junit(compared(arm=HOSTILE)))


@pytest.mark.parametrize("width", [60, 72, 96, 140])
def test_no_line_of_the_table_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, release_table(compared(), width=width).splitlines())) <= width


def test_doubt_that_opens_several_gates_is_said_once_and_a_machine_that_differs_is_on_the_page() -> None:
    assert "card and host were slower" in release_html(compared(BUILD, slower=1.3))
    document = compared(replace(BUILD, doubts=("load generator",)))
    (line,) = (line for line in open_lines(document) if "load generator" in line)
    assert "p99 TTFT" in line
    assert "p99 E2E" in line


def test_a_trend_has_every_run_in_order_with_the_candidate_last() -> None:
    (chart,) = [chart for chart in trend_charts(compared()) if chart.name.startswith("decode time")]
    assert [mark.x for mark in chart.marks] == sorted({mark.x for mark in chart.marks})
    assert [mark.candidate for mark in chart.marks] == [False] * 6 + [True]
    assert chart.limit_y is not None
    assert chart.marks[-1].y < chart.limit_y < chart.marks[0].y  # slower is higher, beyond the limit


@pytest.mark.parametrize("factor", [0.5, 0.95, 1.0, 1.05, 1.051, 1.5])
def test_labels_and_marks_of_a_trend_keep_apart_and_inside(factor: float) -> None:
    build = replace(BUILD, levels={key: level * factor for key, level in LEVELS.items()})
    same = replace(BUILD, levels={"process_peak_bytes": 1.0}, counts={"recompiles": [0.0]})
    for chart in (*trend_charts(compared(build, days=1)), *trend_charts(compared(same))):
        heights = [label.y for label in chart.labels]
        assert all(later - earlier >= 11.9 for earlier, later in itertools.pairwise(heights))
        assert all(0.0 <= height <= HEIGHT for height in (*heights, *(mark.y for mark in chart.marks)))
