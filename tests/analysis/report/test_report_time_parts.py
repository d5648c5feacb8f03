"""Where time goes: bars on one scale a quantile, and the same in figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.time_parts import BAR_WIDTH, PARTS, bars, table

Summary = dict[str, Any]


def parts(quantile: float, **ms: float) -> dict[str, Any]:
    whole = {f"{part}_ms": ms.get(part, 0.0) for part in PARTS}
    return {"quantile": quantile, "requests": 9, "e2e_ms": sum(whole.values()), **whole}


def run_of(**arms: list[dict[str, Any]]) -> Summary:
    return {"arms": [{"name": name, "control": name == "eager", "time_parts": rows} for name, rows in arms.items()]}


def test_bars_of_a_quantile_share_a_scale_and_the_control_is_first() -> None:
    summary = run_of(
        compiled=[parts(0.5, prefill=20.0, decode=30.0), parts(0.99, stall=900.0, decode=100.0)],
        eager=[parts(0.5, prefill=40.0, decode=60.0)],
    )
    drawn = bars(summary)
    assert list(drawn) == ["p50 E2E", "p99 E2E"]
    assert [bar.arm for bar in drawn["p50 E2E"]] == ["eager", "compiled"]
    lengths = [bar.segments[-1][1] + bar.segments[-1][2] for group in drawn.values() for bar in group]
    assert lengths == pytest.approx([BAR_WIDTH, BAR_WIDTH / 2, BAR_WIDTH])


def test_the_table_says_every_part() -> None:
    [row] = table(run_of(eager=[parts(0.99, queue=5.0, stall=1500.0)])).rows
    assert (row["Around"], row["E2E"], row["Queue"], row["Compile stall"]) == ("p99 E2E", "1.5 s", "5 ms", "1.5 s")


@pytest.mark.parametrize("row", [{}, parts(0.5) | {"queue_ms": None}, {"quantile": 0.5}])
def test_what_is_not_known_is_not_drawn(row: dict[str, Any]) -> None:
    assert bars(run_of(eager=[row])) == {}


def test_requests_that_took_no_time_are_drawn_without_length() -> None:
    assert [width for _, _, width in bars(run_of(eager=[parts(0.5)]))["p50 E2E"][0].segments] == [0.0] * 5


def test_the_page_says_each_bar_in_words(demo: Summary, read_page: Callable[[str], Any]) -> None:
    page = read_page(html_report(demo))
    said = [found["aria-label"] or "" for found in page.find("svg", class_="parts")]
    assert len(said) == 2 * len(demo["arms"])
    assert all(
        text.split(": ")[0] in {arm["name"] for arm in demo["arms"]} and "compile stall" in text for text in said
    )
    assert "### Where time goes" in markdown_report(demo)


def test_a_run_without_such_times_does_not_speak_of_them(demo: Summary) -> None:
    for arm in demo["arms"]:
        arm.pop("time_parts")
    assert "Where time goes" not in html_report(demo) + markdown_report(demo)
