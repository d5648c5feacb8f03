"""Reports in a real browser: charts draw, no label is cut, hostile text runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailgate.analysis.report.html import html_report
from tailgate.analysis.summary.summary import analyze
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.screens import Browser, Tab

Summary = dict[str, Any]
Open = Callable[..., Tab]
READY = "document.documentElement.dataset.ready === 'yes'"
LONG = "an-arm-whose-name-has-as-many-characters-as-a-name-may-have-here"


@pytest.fixture
def open_report(tmp_path: Path, browser: Browser) -> Open:
    def opened(summary: Summary, **window: Any) -> Tab:
        file = tmp_path / "report.html"
        file.write_text(html_report(summary), encoding="utf-8")
        tab = browser.open(file.as_uri(), **window)
        tab.wait_for(READY)
        assert tab.count("p.broken") == 0
        assert tab.complaints == []
        return tab

    return opened


@pytest.fixture
def crowded(demo: Summary) -> Summary:
    """The demo with long names, long figures and wide intervals."""
    long_figures = ("p50_ms", "p99_ms", "edges_ms", "e2e_p99_ms", "ttft_p99_ms")

    def stretched(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {LONG if item == "compiled-naive" else item: stretched(value[item], item) for item in value}
        if isinstance(value, list):
            return [stretched(item, key) for item in value]
        if isinstance(value, float) and key in long_figures:
            return value * 99_991
        return LONG if value == "compiled-naive" else value

    summary: Summary = stretched(demo)
    for row in summary["comparisons"]:
        row |= {key: row[key] ** 3 * 40 for key in ("ratio", "high") if row[key] is not None}
    return summary


def test_charts_draw_every_compile_and_only_the_first_takes_the_tab_key(demo: Summary, open_report: Open) -> None:
    tab = open_report(demo)
    assert tab.count("svg.plot") == 2
    bars = "g[role=button][aria-label*='recompile of compiled-naive']"
    assert tab.count(bars) == len(demo["events"])
    assert (tab.count(f"{bars}[tabindex='0']"), tab.count(f"{bars}[tabindex='-1']")) == (1, len(demo["events"]) - 1)
    assert tab.count("rect.stall-mark") == 0


def test_a_search_draws_latency_against_load(tmp_path: Path, open_report: Open) -> None:
    directory = write_search(tmp_path / "run", {"eager": 20.0, "new": 50.0}, [[8, 16], [16, 32]])
    summary = analyze(directory)
    tab = open_report(summary)
    assert tab.count("g[role=img][aria-label*='requests/s, interval']") == len(summary["frontier"]["steps"])


def test_stalls_are_drawn_over_the_latency(demo: Summary, open_report: Open) -> None:
    stall = {"trial": 1, "offset_s": 20.0, "seconds": 2.04, "cause": "unknown", "requests": 3}
    for arm in demo["arms"]:
        if arm["name"] == "compiled-naive":
            arm["client_stalls"]["stalls"] = [stall, stall | {"cause": "compile"}, stall | {"cause": "host"}]
    tab = open_report(demo)
    assert tab.count("rect.stall-mark") == 1


def test_hostile_text_runs_nothing(hostile: Summary, open_report: Open) -> None:
    tab = open_report(hostile)
    assert (tab.count("img"), tab.count("script")) == (0, 2)
    assert tab.evaluate("document.title").startswith("FAIL · </script>")  # and not "pwned"


def test_a_page_without_data_has_no_chart_and_no_error(nulls: Summary, open_report: Open) -> None:
    tab = open_report(nulls | {"series": {"bin_s": 1.0, "arms": {}}, "distribution": {}})
    assert "NaN" not in tab.text()
    assert tab.count("[data-chart]") == 0


def test_a_link_to_something_folded_opens_it(demo: Summary, open_report: Open) -> None:
    tab = open_report(demo)
    assert not tab.evaluate("document.querySelector('#event-1').checkVisibility()")
    tab.evaluate("location.hash = '#event-1'")
    tab.wait_for("document.querySelector('#event-1').checkVisibility()")


# Every label lies inside its chart and over no other one, whichever figures are chosen; no table is scrolled.
MEASURE = """
(async () => {
const faults = [];
function measure(state) {
  document.querySelectorAll("svg.plot").forEach((plot, number) => {
    const frame = plot.getBoundingClientRect();
    const labels = [...plot.querySelectorAll("text")].filter((node) => node.textContent.trim());
    const boxes = labels.map((node) => [node.textContent, node.getBoundingClientRect()]);
    boxes.forEach(([text, box], i) => {
      const out = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
      if (Math.max(...out) > 1) faults.push(`${state}, chart ${number}: "${text}" is cut by ${Math.max(...out)} px`);
      for (const [other, next] of boxes.slice(i + 1)) {
        const across = Math.min(box.right, next.right) - Math.max(box.left, next.left);
        const down = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
        if (across > 1 && down > 2) faults.push(`${state}, chart ${number}: "${text}" lies over "${other}"`);
      }
    });
  });
}
measure("as opened");
document.querySelectorAll("details").forEach((fold) => (fold.open = true));
await new Promise((done) => setTimeout(done, 200));  // charts are drawn again at their width
measure("unfolded");
for (const input of document.querySelectorAll(".chart .segments input")) { input.click(); measure(input.value); }
for (const table of document.querySelectorAll("table.gates, table.checks")) {
  const space = table.parentElement.clientWidth;
  if (table.scrollWidth > space + 1) faults.push(`${table.className} is ${table.scrollWidth} px wide in ${space} px`);
}
const page = document.documentElement.scrollWidth;
if (page > innerWidth + 1) faults.push(`the page is ${page} px wide in ${innerWidth} px`);
return faults;
})()
"""


A4 = 718  # less its margins


@pytest.mark.parametrize("width", [520, 800, 1280, A4])
@pytest.mark.parametrize("name", ["demo", "rollout", "crowded"])
def test_no_label_is_cut_or_covered(name: str, width: int, request: pytest.FixtureRequest, open_report: Open) -> None:
    tab = open_report(request.getfixturevalue(name), width=width)
    if width == A4:
        tab.send("Emulation.setEmulatedMedia", media="print")
    assert tab.evaluate(MEASURE) == []


def test_the_verdict_the_figures_and_every_failed_gate_are_on_the_first_screen(
    demo: Summary, open_report: Open
) -> None:
    slower = "The host launched small work 44.8 % slower before trial 1 than after it. " * 2
    demo["headline"] = (
        "compiled-naive must not replace eager: 3 recompiles while serving, longest 13.7 s, limit 0; 106 of 378 "
        f"requests waited. This run cannot decide whether compiled-padded may replace eager. {slower}"
    )
    tab = open_report(demo)
    below = """
    [...document.querySelectorAll(".verdict p, .cards dd, .gates tbody:first-of-type th")]
      .filter((node) => node.checkVisibility() && node.getBoundingClientRect().bottom > 900)
      .map((node) => node.textContent)
    """
    assert tab.evaluate(below) == []
    assert tab.evaluate("document.querySelector('#timeline').getBoundingClientRect().bottom") < 1800
    assert tab.evaluate("document.documentElement.scrollHeight") < 2500
