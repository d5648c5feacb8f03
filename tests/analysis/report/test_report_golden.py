"""The golden files are what today's code writes.

After a wanted change run `python -m tests.golden.recorded`, and read the diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.report import write_reports
from tests.golden.recorded import GOLDEN, RUNS, encoded, summary_of


def golden(name: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((GOLDEN / name / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.mark.parametrize("name", RUNS)
def test_the_recorded_runs_still_have_the_golden_summaries(name: str, tmp_path: Path) -> None:
    expected = (GOLDEN / name / "summary.json").read_text(encoding="utf-8")
    assert encoded(summary_of(name, tmp_path)) == expected


@pytest.mark.parametrize("name", RUNS)
def test_reports_match_the_golden_files(name: str, tmp_path: Path) -> None:
    written = write_reports(golden(name), tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "junit.xml"]
    for path in written[1:]:
        assert path.read_text(encoding="utf-8") == (GOLDEN / name / path.name).read_text(encoding="utf-8")


def test_the_same_summary_gives_the_same_bytes(tmp_path: Path) -> None:
    summary = golden("demo")
    first = [path.read_bytes() for path in write_reports(summary, tmp_path)]
    assert [path.read_bytes() for path in write_reports(summary, tmp_path)] == first


def test_the_golden_summaries_hold_every_verdict() -> None:
    summaries = [golden(name) for name in RUNS]
    assert {gate["verdict"] for summary in summaries for gate in summary["gates"]} == {"PASS", "FAIL", "INCONCLUSIVE"}
    assert {arm["verdict"] for summary in summaries for arm in summary["arms"]} == {
        "PASS",
        "FAIL",
        "INCONCLUSIVE",
        None,
    }
