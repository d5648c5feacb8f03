from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.markdown import WORST_EVENTS, code, markdown_report, prose

Summary = dict[str, Any]


def _columns(line: str) -> int:
    """Cells of a table line as GitHub splits it: an escaped character never ends a cell."""
    return len(re.findall(r"\|", re.sub(r"\\.", "", line))) - 1


def test_verdict_gates_and_deciders_stand_before_the_numbers(demo: Summary) -> None:
    report = markdown_report(demo)
    places = [
        report.index(part)
        for part in ("❌ FAIL · demo", "### Gates", "### What would decide", "### Key numbers", "### Worst")
    ]
    assert places == sorted(places)
    assert demo["advice"]["text"] in report


def test_what_limits_all_gates_and_what_several_share_stand_once_above_them(sharing: Summary) -> None:
    report = markdown_report(sharing)
    shared = sharing["gates"][0]["reason"]
    assert report.count(shared) == 1
    assert report.index("### What limits this run") < report.index(shared) < report.index("| Arm | Verdict | Gate |")


def test_a_pass_asks_for_no_longer_run(rollout: Summary) -> None:
    report = markdown_report(rollout)
    assert report.startswith("## ✅ PASS · rollout\n")
    assert "What would decide" not in report
    assert "No compile while serving." in report


def test_only_the_worst_events_are_listed_longest_first(demo: Summary) -> None:
    demo["events"] = [{**demo["events"][0], "seconds": float(i)} for i in range(25)]
    report = markdown_report(demo)
    took = [float(found) for found in re.findall(r"\| recompile \| 6.31 s \| ([\d.]+) s", report)]
    assert took == [float(i) for i in range(24, 24 - WORST_EVENTS, -1)]
    assert "15 more in report.html." in report


@given(st.text())
def test_a_code_span_stays_in_its_cell_and_holds_no_markup(value: str) -> None:
    cell = code(value)
    assert "\n" not in cell
    assert _columns(f"| {cell} |") == 1
    if cell != "–":
        fence = re.match(r"`+", cell)
        assert fence is not None
        inner = cell[len(fence[0]) : -len(fence[0])]
        assert cell.endswith(fence[0])
        assert fence[0] not in re.findall(r"`+", inner)


@given(st.text())
def test_prose_stays_in_its_cell_and_holds_no_markup(value: str) -> None:
    cell = prose(value)
    assert "\n" not in cell
    assert _columns(f"| {cell} |") == 1
    assert "<" not in cell
    assert not re.search(r"@\w", cell)


def test_hostile_text_keeps_every_table_whole(hostile: Summary) -> None:
    report = markdown_report(hostile)
    for block in report.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert {_columns(line) for line in lines} == {_columns(lines[0])}
    outside_code = re.sub(r"\\.|(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", report)
    assert "<script" not in outside_code
    assert "<img" not in outside_code


@pytest.mark.parametrize("summary", [{}, {"arms": []}])
def test_an_empty_summary_reads_in_sentences(summary: Summary) -> None:
    report = markdown_report(summary)
    for said in (
        "This run has no verdict.",
        "No gate was judged.",
        "No arm sent a record.",
        "No compile while serving.",
    ):
        assert said in report


def test_nulls_read_as_dashes_in_markdown(nulls: Summary) -> None:
    assert not re.search(r"\b(None|nan|inf|null)\b", markdown_report(nulls))


def test_advice_keeps_its_code_as_code(demo: Summary) -> None:
    demo["advice"]["text"] = "Run `tailgate parity` on the_experiment."
    assert "- Run `tailgate parity` on the\\_experiment." in markdown_report(demo)
