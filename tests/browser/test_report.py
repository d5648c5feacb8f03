"""The page in a real browser: charts draw, no label is cut, hostile text does nothing. Skipped where there is none."""

from __future__ import annotations

import copy
import html
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.report.html import html_report
from analysis.summary.summary import analyze
from tests.analysis.foresight.test_costs import searched
from tests.analysis.report.conftest import BROWSER
from tests.fakes.beds import FakeBed, Trouble
from tests.fakes.runs import FakeRun, write_run

Summary = dict[str, Any]
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000", "--dump-dom"),
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no page was tested, because Chromium is absent: apt-get install chromium"
)


@pytest.fixture
def opened(tmp_path: Path, read_page: Callable[[str], Any]) -> Callable[[Summary], Any]:
    def open_page(summary: Summary) -> Any:
        file = tmp_path / "report.html"
        file.write_text(html_report(summary), encoding="utf-8")
        assert BROWSER is not None
        ran = subprocess.run(
            [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in ran.stderr, ran.stderr
        return read_page(ran.stdout)

    return open_page


def test_every_chart_draws_without_an_error(demo: Summary, opened: Callable[[Summary], Any]) -> None:
    page = opened(demo)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert len(page.find("svg", class_="plot")) == 4
    bars = [
        found for found in page.find("g", role="button") if "recompile of compiled-naive" in (found["aria-label"] or "")
    ]
    assert len(bars) == len(demo["events"])
    assert [bar["tabindex"] for bar in bars] == ["0"] + ["-1"] * (len(bars) - 1)


def test_a_search_draws_latency_energy_and_cost_against_load(tmp_path: Path, opened: Callable[[Summary], Any]) -> None:
    summary = analyze(searched(tmp_path))
    page = opened(summary)
    assert page.find("p", class_="broken") == []
    marks = [found["aria-label"] or "" for found in page.find("g", role="img")]
    assert sum("J a token at" in mark for mark in marks) == len(summary["frontier"]["energy"]["steps"])
    assert sum("requests/s, interval" in mark for mark in marks) == len(summary["frontier"]["latency"]["steps"])
    assert sum("for a million tokens at" in mark for mark in marks) > 0


@pytest.fixture(scope="module")
def bedded(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run on a disturbed test bed, whose chart has all its panels and lanes."""
    troubles = (
        *(Trouble(what="throttle", share=0.3), Trouble(what="foreign", place="cuda:0", share=0.1)),
        *(Trouble(what="steal", place="host", size=0.1), Trouble(what="memory_pressure", place="host", size=0.1)),
    )
    run = FakeRun(bed=FakeBed(locked=False, troubles=troubles), trials=2, duration_s=120.0, rate=2.0)
    return analyze(write_run(tmp_path_factory.mktemp("bedded") / "run", run))


def test_the_test_bed_is_drawn_on_one_axis_with_the_latency(bedded: Summary, opened: Callable[[Summary], Any]) -> None:
    page = opened(bedded)
    assert page.find("p", class_="broken") == []
    charts = [found["aria-label"] or "" for found in page.find("svg", class_="plot")]
    (drawn,) = (said for said in charts if said.startswith("The test bed over time, trial 1"))
    assert "p99 E2E by 5\u00a0s, SM clock, Power, Temperature, Utilisation, Host." in drawn
    marks = [found for found in page.find("g", role="img") if "cuda:" in (found["aria-label"] or "")]
    said = [mark["aria-label"] for mark in marks]
    assert any("Throttled: cuda:1 (compiled), from 60" in (text or "") for text in said)
    assert any("Processes of others: cuda:0 (eager), from" in (text or "") for text in said)
    assert [mark["tabindex"] for mark in marks] == ["0"] + ["-1"] * (len(marks) - 1)


def test_the_load_of_an_external_arm_is_drawn_below_the_latency(
    demo: Summary, opened: Callable[[Summary], Any]
) -> None:
    summary = copy.deepcopy(demo)
    times = [float(second) for second in range(60)]
    columns = {"running": [8.0] * 60, "waiting": times, "cache_pct": [None] * 60, "preemptions": [0.0] * 59 + [3.0]}
    row = {"trial": 1, "arm": "compiled-naive", "replica": None, "t_s": times, **columns}
    summary["server_load"] = {"bin_s": 1.0, "arms": [{"arm": "compiled-naive"}], "rows": [row]}
    page = opened(summary)
    assert page.find("p", class_="broken") == []
    charts = [found["aria-label"] or "" for found in page.find("svg", class_="plot")]
    (drawn,) = (said for said in charts if said.startswith("The load of external arms over time, trial 1"))
    assert "p99 E2E by 1\u00a0s, Running, Waiting, Preemptions." in drawn


def test_allocations_in_need_are_marked_in_their_arms_colour(demo: Summary, opened: Callable[[Summary], Any]) -> None:
    summary = copy.deepcopy(demo)
    need = {"trial": 1, "at_ns": 0, "replica": "<b>-0", "kind": "allocator retry", "count": 2, "offset_s": 30.0}
    summary["memory"] = {"events": [need | {"arm": arm} for arm in ("eager", "compiled-naive", "unheard of")]}
    page = opened(summary)
    assert page.find("p", class_="broken") == []
    marks = [mark for mark in page.find("path") if "need-mark" in (mark.get("class") or "")]
    assert len(marks) == 2
    assert "Triangles on top: allocations in need." in page.text
    assert page.find("b") == []
    assert not any("need-mark" in (mark.get("class") or "") for mark in opened(demo).find("path"))


def test_a_stall_that_no_compile_event_explains_is_marked(demo: Summary, opened: Callable[[Summary], Any]) -> None:
    stall = {"trial": 1, "offset_s": 20.0, "seconds": 2.04, "cause": "unknown", "explained": False}
    arms = [
        {
            **arm,
            "blackbox": {**arm["blackbox"], "stalls": [stall, stall | {"explained": True}, stall | {"cause": "host"}]},
        }
        if arm["name"] == "compiled-naive"
        else arm
        for arm in demo["arms"]
    ]
    page = opened({**demo, "arms": arms})
    assert page.find("p", class_="broken") == []
    assert len([mark for mark in page.find("rect") if "stall-mark" in (mark.get("class") or "")]) == 1
    assert "compiled-naive stood still at 20 s for 2.04 s, no compile event" in page.text
    assert "Dashed boxes: stalls that no compile event explains." in page.text
    assert "Dashed boxes" not in opened(demo).text


def test_hostile_text_runs_nothing_in_a_browser(hostile: Summary, opened: Callable[[Summary], Any]) -> None:
    page = opened(hostile)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert page.find("img") == []
    assert len(page.find("script")) == 2
    assert page.text.startswith("FAIL · </script>")  # The title is the summary's own, not "pwned".


@pytest.mark.parametrize("emptied", [True, False])
def test_charts_without_data_say_so(nulls: Summary, emptied: bool, opened: Callable[[Summary], Any]) -> None:
    page = opened({} if emptied else nulls)
    assert page.find("html", data_ready="yes")
    assert page.find("p", class_="broken") == []
    assert "NaN" not in page.text
    assert "No arm was compared with the control." in page.text


# Every label lies inside its chart and over no other one, whichever figures are chosen; no reason is scrolled away.
MEASURE = """
const faults = [];
function measure(state) {
  document.querySelectorAll("svg.plot").forEach((plot, number) => {
    const frame = plot.getBoundingClientRect();
    const labels = [...plot.querySelectorAll("text")].filter((node) => node.textContent.trim());
    const boxes = labels.map((node) => [node.textContent, node.getBoundingClientRect()]);
    boxes.forEach(([text, box], i) => {
      const out = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
      if (Math.max(...out) > 1) faults.push(`${state}, chart ${number}: "${text}" is cut by ${Math.max(...out)} px`);
      for (const [other, beside] of boxes.slice(i + 1)) {
        const across = Math.min(box.right, beside.right) - Math.max(box.left, beside.left);
        const down = Math.min(box.bottom, beside.bottom) - Math.max(box.top, beside.top);
        if (across > 1 && down > 2) faults.push(`${state}, chart ${number}: "${text}" lies over "${other}"`);
      }
    });
  });
}
addEventListener("load", () => setTimeout(() => {
  measure("as opened");
  for (const input of document.querySelectorAll(".chart .segments input")) { input.click(); measure(input.value); }
  for (const table of document.querySelectorAll("table.gates, table.checks")) {
    const room = table.parentElement.clientWidth;
    if (table.scrollWidth > room + 1) faults.push(`${table.className} is ${table.scrollWidth} px wide in ${room} px`);
  }
  if (document.documentElement.scrollWidth > innerWidth + 1) {
    const right = (node) => node.getBoundingClientRect().right;
    const scrolls = (node) => node && (getComputedStyle(node).overflowX === "auto" || scrolls(node.parentElement));
    const nodes = [...document.querySelectorAll("main *")];
    const free = nodes.filter((node) => !node.closest("svg") && !scrolls(node.parentElement));
    const most = free.reduce((a, b) => (right(b) > right(a) ? b : a));
    faults.push(`the page is wider than its window: ${most.outerHTML.slice(0, 80)} ends at ${right(most)}`);
  }
  document.body.append(Object.assign(document.createElement("pre"), { id: "faults", textContent: faults.join("\\n") }));
}, 200));
"""


# What of the verdict, the remedies that are not folded away and the arms' figures ends below a screen of 900 px.
FIRST_SCREEN = """
addEventListener("load", () => {
  const all = [...document.querySelectorAll(".verdict p, .facts dd, .cards dd")];
  const shown = all.filter((one) => one.checkVisibility());
  const below = shown.filter((one) => one.getBoundingClientRect().bottom > 900).map((one) => one.textContent);
  document.body.append(Object.assign(document.createElement("pre"), { id: "faults", textContent: below.join("\\n") }));
});
"""


def _faults(page: str, folder: Path, width: int, *, measure: str = MEASURE) -> list[str]:
    """What is cut or covered in the page, in a window so wide."""
    measured = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    file = folder / "measured.html"
    file.write_text(measured.replace("</body>", f"<script>{measure}</script></body>"), encoding="utf-8")
    assert BROWSER is not None
    ran = subprocess.run(
        [BROWSER, *QUIET, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="faults">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found, ran.stderr
    return html.unescape(found[1]).split("\n") if found[1] else []


@pytest.fixture
def crowded(demo: Summary) -> Summary:
    """The demo with long names, long figures and wide intervals."""
    summary = copy.deepcopy(demo)
    name = "an-arm-whose-name-has-as-many-characters-as-a-name-may-have-here"

    def stretched(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name if item == "compiled-naive" else item: stretched(value[item], item) for item in value}
        if isinstance(value, list):
            if key == "ecdf":
                return [[row[0], *(item and item * 99_991 for item in row[1:])] for row in value]
            return [stretched(item, key) for item in value]
        if isinstance(value, float) and key in (
            "p50_ms",
            "p99_ms",
            "edges_ms",
            "e2e_p99_ms",
            "ttft_p99_ms",
            "e2e_max_ms",
        ):
            return value * 99_991
        return name if value == "compiled-naive" else value

    summary = stretched(summary)
    for row in summary["comparisons"]:
        row |= {key: row[key] ** 3 * 40 for key in ("ratio", "high") if row[key] is not None}
    for row, waste in zip(summary["arms"], (0.0694, 12.3456, 99.987), strict=True):
        row["padding"] |= {"waste_pct": waste, "prefill_waste_pct": waste / 3, "decode_waste_pct": waste / 700}
    return summary


@pytest.fixture
def mapped(demo: Summary) -> Summary:
    """The demo with a map of shapes that has all the cells that it may have, each with a long count and both marks."""
    spans = [[2**octave // 2 + 1, 2**octave] for octave in range(16)]
    counted = {"requests": 123_456, "shapes": 99, "new": 98, "compiles": 7}
    cells = [{"batch": batch, "length": length, **counted} for batch in range(16) for length in range(16)]
    arms = [{"arm": arm["name"], "requests": 1, "unknown": 0, "cells": cells} for arm in demo["arms"]]
    return demo | {"shapes": {"batches": spans, "lengths": spans, "arms": arms}}


@pytest.mark.parametrize("width", [520, 800, 1280])
@pytest.mark.parametrize("name", ["demo", "rollout", "crowded", "bedded", "mapped"])
def test_no_label_is_cut_or_covered(name: str, width: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert _faults(html_report(request.getfixturevalue(name)), tmp_path, width) == []


@pytest.mark.parametrize("name", ["demo", "crowded", "bedded", "mapped"])
def test_no_label_is_cut_in_print(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # A4 less its margins. The styles of print are shown on the screen, where they can be measured.
    page = html_report(request.getfixturevalue(name))
    page = page.replace("@media screen", "@media not all").replace("@media print", "@media all")
    assert _faults(page, tmp_path, 718) == []


def test_the_verdict_the_first_remedy_and_the_figures_of_all_arms_are_on_the_first_screen(
    demo: Summary, tmp_path: Path
) -> None:
    remedy = (
        "All 3 compiles while serving were for steps that its start had not warmed up. First failed guard: tensor "
        "'input_ids' size mismatch at index 1. expected 5, actual 192. Warm up every planned step (compile.warmup = "
        '"shapes", not "minimal"), plan its shapes (preset compiled-bucketed) or mark what varies, with bounds (preset '
        "compiled-dynamic). Try without traffic: `tailgate inspect experiment.toml --arm compiled-naive --shapes "
        '"prefill 1x192, decode 1@193, decode 2@194"`.'
    )
    failed = ("compiled-naive", "compiled-padded")
    demo["advice"]["remedies"] = [{"arm": arm, "gates": [], "text": remedy} for arm in failed]
    slower = "The host launched small work 44.8 % slower before trial 1 than after it; the processor multiplied "
    slower += "matrices 17.2 % slower before trial 1 than after it."
    demo["headline"] = (
        "compiled-naive must not replace eager: 3 recompiles while serving, longest 13.7 s, limit 0; 106 of 378 "
        f"requests waited. This run cannot decide whether compiled-padded may replace eager. {slower}"
    )
    demo["bed"] = {"verdict": "disturbed", "line": f"Disturbed: {slower}"}
    page = html_report(demo)
    assert "<summary>Also: to mend compiled-padded, to decide what is open, what several gates share</summary>" in page
    assert _faults(page, tmp_path, 1280, measure=FIRST_SCREEN) == []
    assert _faults(page.replace('class="fold others"', "open"), tmp_path, 1280, measure=FIRST_SCREEN)
