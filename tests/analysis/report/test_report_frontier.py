"""Which policy to ship, in every report."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest

from analysis.report.frontier import answer, costs, holdings, pairs, picture
from analysis.report.html import html_report
from analysis.report.markdown import markdown_report, prose
from analysis.report.terminal import frontier_words, verdict_table
from analysis.report.values import rate
from analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import FakeRun, write_run

KNEES = {"eager": 17.0, "<new>": 33.0}
RATES = [[4, 8, 16, 18, 32, 64], [8, 14, 18, 30, 36, 40], [8, 15, 17.5, 32, 34, 40], [9.5, 16, 18, 31, 35, 50]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_search(tmp_path_factory.mktemp("frontier") / "run", KNEES, RATES)


@pytest.fixture(scope="module")
def summary(searched: Path) -> dict[str, Any]:
    return analyze(searched)


def test_a_search_ends_in_an_answer(summary: dict[str, Any]) -> None:
    lines = answer(summary)
    assert lines[0].endswith("nothing is gained in load by compiling.")
    assert "p90 TTFT ≤ 500 ms and 90 % of the requests within every limit" in lines[0]
    assert any(line.startswith("For more load than one replica holds, <new>") for line in lines)
    assert summary["frontier"]["highest"] == "<new>"
    for row, knee in zip(summary["frontier"]["arms"], KNEES.values(), strict=True):
        assert row["low_rps"] < knee < row["high_rps"]


def test_every_report_has_it(summary: dict[str, Any]) -> None:
    html, markdown, terminal = html_report(summary), markdown_report(summary), verdict_table(summary, width=200)
    assert 'id="ship"' in html
    assert "### Which policy to ship" in markdown
    assert "which to ship: Up to" in terminal
    assert "<new>" not in html
    assert "&lt;new&gt;: surely holds" in html, "the picture can be read aloud"
    for shown in (markdown, terminal):
        assert "What is said of loads is true all at once, but for a chance of 5 %." in shown


@pytest.mark.parametrize(
    ("stop", "said"),
    [("nothing is <open>", "It ended after 8 of 10 minutes: nothing is <open>."), ("", "It was cut off after 8 of 10")],
)
def test_every_report_says_how_the_search_ended(stop: str, said: str, summary: dict[str, Any]) -> None:
    search = {"budget_s": 600.0, "spent_s": 480.0, "stop": stop}
    summary = {**summary, "frontier": {**summary["frontier"], "search": search}}
    assert f"<p>Search: {escape(said)}" in html_report(summary)
    assert f"Search: {prose(said)}" in markdown_report(summary)
    assert f"search: {said}" in verdict_table(summary, width=200)


def test_a_search_shows_at_a_glance_what_each_arm_holds_and_no_latency_of_its_overload(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    def cards(summary: dict[str, Any]) -> str:
        return html_report(summary).partition('class="cards"')[2].partition("</section>")[0]

    shown = cards(summary)
    assert shown.count("<dt>Surely holds</dt>") == shown.count("<small>4 starts</small>") == len(KNEES)
    assert "p99 TTFT" not in shown
    assert "p99 TTFT" in cards(analyze(write_run(tmp_path / "run", FakeRun(duration_s=60)))), (
        "of a run that is no search"
    )


def test_a_search_that_nobody_asked_verdicts_of_has_none_above_it(summary: dict[str, Any]) -> None:
    def reports(*, gated: bool, overall: str) -> tuple[str, str]:
        searched = summary["frontier"] | {"search": {"gated": gated}}
        shown = summary | {"frontier": searched, "overall": overall}
        return html_report(shown), markdown_report(shown)

    html, markdown = reports(gated=False, overall="INCONCLUSIVE")
    assert '<h1 id="verdict-title">Which policy to ship</h1>' in html
    assert markdown.startswith("## Which policy to ship · search")
    cards = html.partition('<section class="cards"')[2].partition("</section>")[0]
    assert cards
    assert "INCONCLUSIVE" not in cards
    assert "| verdict | control | – |" in markdown.lower()
    for html, _ in (reports(gated=True, overall="INCONCLUSIVE"), reports(gated=False, overall="FAIL")):
        assert '<h1 id="verdict-title">Which policy to ship</h1>' not in html


def test_a_run_without_a_search_says_nothing(tmp_path: Path) -> None:
    plain = analyze(write_run(tmp_path, FakeRun(duration_s=60, trials=2, rate=2, gates={"draws": 99})))
    assert "frontier" not in plain
    assert answer(plain) == []
    assert picture(plain) is None
    assert "Which policy" not in markdown_report(plain)
    assert 'id="ship"' not in html_report(plain)


def test_the_picture_shows_what_is_held_and_what_is_open(summary: dict[str, Any]) -> None:
    drawn = picture(summary)
    assert drawn is not None
    eager, new = drawn.bars
    assert drawn.left < eager.held < (eager.seen or 0) < eager.open < drawn.width
    assert eager.held < new.held
    assert [label for _, label in drawn.ticks] == sorted((label for _, label in drawn.ticks), key=float)


def test_ends_that_are_open_reach_the_edge_of_the_picture() -> None:
    rows = [
        {"arm": "eager", "low_rps": None, "seen_rps": None, "high_rps": 9.0},
        {"arm": "new", "low_rps": 4.0, "seen_rps": 5.0, "high_rps": None},
    ]
    drawn = picture({"frontier": {"arms": rows}})
    assert drawn is not None
    assert (drawn.bars[0].held, drawn.bars[1].open) == (drawn.left, drawn.width)
    assert drawn.bars[0].seen is None
    assert picture({"frontier": {"arms": [{"arm": "eager", "low_rps": None}]}}) is None


def test_tables_name_arms_pairs_and_gpus(summary: dict[str, Any]) -> None:
    assert [row["Arm"] for row in holdings(summary).rows] == ["eager", "<new>"]
    (pair,) = pairs(summary).rows
    assert (pair["Holds more"], pair["Than"], pair["Order"]) == ("<new>", "eager", "surely")
    table = costs(summary).rows
    assert table[0].keys() == {"Load", "GPUs, eager", "GPUs, <new>"}
    assert table[-1]["GPUs, <new>"].endswith(" *")
    assert table[0]["GPUs, <new>"] == "1"


def test_loads_that_a_late_generator_leaves_open_are_not_claimed(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", KNEES, RATES)
    for number in range(1, len(RATES) + 1):
        account = {"worker": 0, "lag_ms": {"p50": 1.0, "p99": 400.0, "max": 900.0}, "complete": True}
        (folder / f"trial-{number:02}" / "generator-0.json").write_text(json.dumps(account))
    late = analyze(folder)["frontier"]
    assert "generator lag" in late["blocked_by"]
    assert late["answer"][0].startswith("Nothing is known of any load, for ")
    assert all(row["low_rps"] is None and row["high_rps"] is None for row in late["arms"])
    assert late["highest"] is None


def test_replicas_share_the_load_of_their_arm(tmp_path: Path) -> None:
    folder = write_search(tmp_path / "run", KNEES, RATES)
    for path in folder.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        info["arms"][1]["replicas"] = ["<new>-0", "<new>-1"]
        path.write_text(json.dumps(info))
    one, two = (row["seen_rps"] for row in analyze(folder)["frontier"]["arms"])
    assert one == pytest.approx(17.0, rel=0.1)
    assert two == pytest.approx(16.5, rel=0.1)


def test_the_terminal_says_of_a_search_what_would_decide_it_and_which_runs_it_joins(summary: dict[str, Any]) -> None:
    summary = {
        **summary,
        "overall": "INCONCLUSIVE",
        "advice": {"text": "Run six trials or more."},
        "joined": {"runs": [{}, {}], "machines": [{}]},
        "design": {**summary["design"], "trials": 1, "pressure": "Under pressure: it had 1 processor."},
    }
    for gated in (False, True):
        shown = " ".join(frontier_words(summary, gated=gated).split())
        assert "to decide: Run six trials or more." in shown
        assert "judged together: 2 runs, 1 trial, 1 machine" in shown
        assert "under pressure: it had 1 processor." in shown


def test_the_terminal_shows_what_each_arm_of_a_search_holds_and_no_latency_of_its_overload(
    summary: dict[str, Any],
) -> None:
    shown = verdict_table(summary)
    assert "p99" not in shown.split("limited by")[0].split("which to ship")[0].split("arm ")[1]
    held = summary["frontier"]["arms"][0]
    assert rate(held["low_rps"]) in shown.partition("not above")[2]
