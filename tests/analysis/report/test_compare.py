"""Two runs compared: page, Markdown, JUnit and terminal have the same verdicts and run nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.compare.comparison import compare_runs
from analysis.report.compare import (
    compare_html,
    compare_junit,
    compare_markdown,
    compare_table,
    open_lines,
    write_compare_reports,
)
from analysis.settings.compare_limits import CompareLimits
from tests.analysis.report.conftest import HOSTILE
from tests.fakes.results import LEVELS, Build, run_of

BUILD = Build(counts={"recompiles": [0, 0, 0, 0]})
SLOW = replace(BUILD, levels={**LEVELS, "p50_tpot_ms": 24.0})


def compared(candidate: Build = SLOW, *, arm: str = "compiled", **how: Any) -> dict[str, Any]:
    earlier, later = run_of(BUILD, day=0, seed=2, arm=arm), run_of(candidate, day=1, seed=2, arm=arm, **how)
    return compare_runs(earlier, later, arms={arm: arm}, limits=CompareLimits())


@pytest.mark.parametrize("arm", ["compiled", HOSTILE], ids=["plain", "hostile"])
def test_the_page_fetches_nothing_and_runs_nothing(arm: str, read_page: Callable[[str], Any]) -> None:
    document = compared(arm=arm)
    text = compare_html(document)
    page = read_page(text)
    assert page.find("script") == page.find("img") == []
    assert "default-src &#39;none&#39;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<img" not in compare_markdown(document)


def test_all_four_reports_stand_in_the_folder(tmp_path: Path) -> None:
    shown = write_compare_reports(compared(), tmp_path / "out")
    assert shown.name == "compare.html"
    assert {path.suffix for path in shown.parent.iterdir()} == {".html", ".json", ".md", ".xml"}


def test_every_report_has_the_verdict_of_every_gate() -> None:
    document = compared()
    judged = {row["label"]: row["verdict"] for row in document["figures"] if row["verdict"]}
    root = ET.fromstring(compare_junit(document))
    outcome = {
        case.get("name"): next((child.tag for child in case if child.tag != "system-out"), "passed")
        for case in root.iter("testcase")
    }
    expected = {"PASS": "passed", "FAIL": "failure", "INCONCLUSIVE": "skipped"}
    assert outcome == {name: expected[verdict] for name, verdict in judged.items()}
    assert root.get("failures") == str(list(judged.values()).count("FAIL"))
    table, page = compare_table(document, width=120), compare_markdown(document)
    assert all(label in table and label in page for label in judged)
    assert "✘ FAIL" in table
    assert page.startswith("## ❌ FAIL")
    ET.fromstring(compare_junit(compared(arm=HOSTILE)))


@pytest.mark.parametrize("width", [60, 72, 96, 140])
def test_no_line_of_the_table_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, compare_table(compared(), width=width).splitlines())) <= width


def test_doubt_that_opens_several_gates_is_said_once_and_a_machine_that_differs_is_on_the_page() -> None:
    assert "card and host were slower" in compare_html(compared(BUILD, slower=1.3))
    document = compared(replace(BUILD, doubts=("generator lag",)))
    (line,) = (line for line in open_lines(document) if "generator lag" in line)
    assert "p99 TTFT" in line
    assert "p99 E2E" in line
