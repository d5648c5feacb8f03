"""Sections of reports: which policy to ship, start-up, accuracy, causes of slow requests, when compiling pays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.records.documents import write_document
from tailgate.analysis.report import html_report, markdown_report, verdict_table
from tailgate.analysis.report.values import rate
from tailgate.analysis.summary.summary import analyze
from tests.analysis.checks.test_telemetry import stopped
from tests.analysis.judging.test_load_steps import write_search

Summary = dict[str, Any]
KNEES = {"eager": 17.0, "<new>": 33.0}
RATES = [[4, 8, 16, 18, 32, 64], [8, 14, 18, 30, 36, 40], [8, 15, 17.5, 32, 34, 40], [9.5, 16, 18, 31, 35, 50]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return analyze(write_search(tmp_path_factory.mktemp("frontier") / "run", KNEES, RATES))


def search_of(searched: Summary, search: Summary, **more: Any) -> Summary:
    """The summary of the search with other facts."""
    return {**searched, "frontier": {**searched["frontier"], **search}, **more}


def test_the_answer_says_how_the_search_ended(searched: Summary, tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", KNEES, RATES)
    for stop, words in (
        ("it is <open>", "The search ended after 8 of 10 minutes: it is <open>."),
        ("", "The search was cut off after 8 of 10 minutes."),
    ):
        write_document(folder / "frontier.json", {"budget_s": 600.0, "spent_s": 480.0, "stop": stop, "left": []})
        summary = analyze(folder)
        assert escape(words) in html_report(summary)
        assert words in verdict_table(summary, width=200)


def cards(summary: Summary) -> str:
    shown = html_report(summary).partition('class="cards"')[2].partition("</section>")[0]
    return re.sub(r"</?abbr[^>]*>", "", shown)


def test_a_search_shows_first_what_each_arm_holds_and_no_latency_of_its_overload(
    searched: Summary, demo: Summary
) -> None:
    shown = cards(searched)
    assert shown.count("surely holds") == len(KNEES)
    assert "p99 TTFT" not in shown
    assert "p99 TTFT" in cards(demo), "of a run that is no search"
    terminal = verdict_table(searched)
    assert "p99" not in terminal.split("limited by")[0].split("arm ")[1]
    assert rate(searched["frontier"]["arms"][0]["low_rps"]) in terminal


def test_a_search_without_gates_has_no_verdict_above_its_answer(searched: Summary) -> None:
    for gated, overall, ship in ((False, "INCONCLUSIVE", True), (True, "INCONCLUSIVE", False), (False, "FAIL", False)):
        summary = search_of(searched, {"gated": gated}, overall=overall)
        assert ('<h1 id="verdict-title">Which policy to ship</h1>' in html_report(summary)) is ship
        assert markdown_report(summary).startswith("## Which policy to ship · search") is ship
        assert not (ship and overall in cards(summary))


def test_the_tables_show_what_is_held(searched: Summary, demo: Summary) -> None:
    page = html_report(searched).partition('aria-label="What each arm surely holds"')[2].partition("</table>")[0]
    assert page.index("eager") < page.index("&lt;new&gt;")
    assert all(rate(row["low_rps"]) in page for row in searched["frontier"]["arms"])
    assert "Which policy" not in markdown_report(demo) + html_report(demo)


def test_replicas_share_the_load_of_their_arm(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", KNEES, RATES)
    for path in folder.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        info["arms"][1]["replicas"] = ["<new>-0", "<new>-1"]
        path.write_text(json.dumps(info))
    assert [row["seen_rps"] for row in analyze(folder)["frontier"]["arms"]] == pytest.approx([17.0, 16.5], rel=0.1)


def test_the_terminal_says_what_would_decide_a_search(searched: Summary) -> None:
    summary = {**searched, "overall": "INCONCLUSIVE", "advice": {"needed_s": None, "text": "Run it again."}}
    for gated in (False, True):
        shown = " ".join(verdict_table(search_of(summary, {"gated": gated})).split())
        assert "to decide: Run it again." in shown
        assert shown.startswith("? INCONCLUSIVE") is gated


def test_every_known_part_of_the_start_has_a_row(demo: Summary, read_page: Callable[[str], Any]) -> None:
    text = read_page(html_report(demo)).text
    for row in (
        "Time to serving 5.23 s 19.8 s 16.5 s",
        "14.8 s 11.4 s",
        "disk cache – miss 2 miss 2",
        "host process, peak 576 MiB",
    ):
        assert row in text
    assert "artifact" not in text
    demo["arms"][1]["startup"]["artifact"] = "118b37521756ef99"
    assert "artifact – 118b37521756ef99 –" in read_page(html_report(demo)).text
    for arm in demo["arms"]:
        arm["startup"] = {}
    assert 'id="startup"' not in html_report(demo)


def test_a_stall_that_no_compile_event_explains_is_listed(tmp_path: Path, read_page: Callable[[str], Any]) -> None:
    text = read_page(html_report(stopped(tmp_path / "run", 100))).text
    assert re.search(r"Stalls that no compile event explains .* compiled 1 100 s [\d.]+ s unexplained", text)
