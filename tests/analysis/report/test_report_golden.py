"""The golden files are what today's code writes.

After a wanted change run `python -m tests.golden.synthetic`, and read the diff.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.report import write_reports
from tests.golden.synthetic import GOLDEN, SUMMARIES, encoded


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_simulation_still_makes_the_golden_summary(name: str) -> None:
    assert encoded(SUMMARIES[name]()) == (GOLDEN / name / "summary.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SUMMARIES)
def test_reports_match_the_golden_files(name: str, tmp_path: Path) -> None:
    summary = json.loads((GOLDEN / name / "summary.json").read_text(encoding="utf-8"))
    written = write_reports(summary, tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "junit.xml"]
    for path in written[1:]:
        assert path.read_text(encoding="utf-8") == (GOLDEN / name / path.name).read_text(encoding="utf-8")


def test_the_same_summary_gives_the_same_bytes(tmp_path: Path) -> None:
    summary = SUMMARIES["demo"]()
    first = [path.read_bytes() for path in write_reports(summary, tmp_path)]
    assert [path.read_bytes() for path in write_reports(summary, tmp_path)] == first


def test_the_golden_summaries_hold_every_verdict() -> None:
    summaries = [make() for make in SUMMARIES.values()]
    assert {gate["verdict"] for summary in summaries for gate in summary["gates"]} == {"PASS", "FAIL", "INCONCLUSIVE"}
    assert {arm["verdict"] for summary in summaries for arm in summary["arms"]} == {
        "PASS",
        "FAIL",
        "INCONCLUSIVE",
        None,
    }
