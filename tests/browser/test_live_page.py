"""The page in a real browser: it shows the run, says what changes, and becomes the report. Skipped where there is
none."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import write_document
from analysis.report.html import html_report
from loadtests.experiments.writing import to_toml
from tests.fakes.browser import CHROMIUM, Browser, Tab
from tests.fakes.locust_process import start_locust
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.fakes.watched import WatchedRun
from tests.fakes.whole_run import FAKE_ARM, experiment
from tests.loadtests.page.conftest import Serve

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no page was tested, because Chromium is absent: apt-get install chromium"
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "demo" / "summary.json"
HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\"><b>bold</b>\"'`&amp;"
READY = "document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs here say something when a test lets them."""
    monkeypatch.setattr("loadtests.page.state._LONGEST_SILENCE_S", 3600.0)


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    return WatchedRun(folder=tmp_path / "20260101T000000Z-canary", notes=["cuda:1 is not idle"])


@pytest.fixture
def open_page(browser: Browser, serve: Serve) -> Any:
    def opened(run: WatchedRun, **window: Any) -> Tab:
        tab = browser.open(serve(run.folder).url("127.0.0.1"), **window)
        tab.wait_for(READY)
        return tab

    return opened


def test_values_that_no_axis_holds_are_left_out(run: WatchedRun, open_page: Any) -> None:
    run.minutes(2)
    gates = [
        {
            "arm": "eager",
            "gate": f"g{number}{unit}",
            "unit": unit,
            "limit": limit,
            "value": value,
            "low": low,
            "high": None,
        }
        for number, (limit, value, low) in enumerate(
            ((0, 0, None), (-1, -2.5, -9), (1e300, 1e-300, 0), (None, None, 1))
        )
        for unit in ("ratio", "ms", "count", "", "parsecs")
    ]
    for seconds in (180.0, 240.0):
        with (run.folder / "looks.jsonl").open("a") as file:
            file.write(json.dumps({"look": 3, "seconds": seconds, "gates": gates, "arms": {"eager": None}}) + "\n")
    tab = open_page(run)
    assert tab.evaluate("document.querySelectorAll('.tile').length") == len(gates)
    assert tab.evaluate("document.querySelector('main').innerHTML.match(/NaN|undefined|Infinity/g)?.length ?? 0") == 0
    assert tab.complaints == []


def test_one_look_tells_the_state_of_the_run(run: WatchedRun, open_page: Any) -> None:
    run.compiled(20.0, phase="warmup", arm="compiled-padded")
    run.minutes(9)
    tab = open_page(run)
    state = tab.text("#state")
    assert state.startswith("Under load 9:00 of 15:00 of traffic. 0 of 2 arms decided. Likely decided in about 4 min.")
    assert "As it stands, compiled-naive fails 3 gates." in state
    assert "Generator lag 3.1 ms p99, of 50 ms" in state
    assert tab.evaluate("document.querySelector('progress').value") == pytest.approx(0.6)
    assert tab.evaluate("document.title") == "9:00 · canary · tailgate"
    assert tab.evaluate("document.querySelectorAll('.tile').length") == 12
    assert tab.text(".tile").startswith("non-inferiority p99 TTFT INCONCLUSIVE limit ×1.100 ×0.8")
    assert tab.evaluate(
        "[...document.querySelectorAll('.tile svg.plot')].every((plot) => plot.querySelector('.limit'))"
    )
    assert "near its limit generator lag" in tab.text("#checks")
    assert "recompile 5.39 s 16 prefill 4×475" in tab.text("#compiles")
    assert "cuda:1 1,980 MHz" in tab.text("#bed")
    assert "cuda:1 is not idle" in tab.text("#notes")
    assert tab.complaints == []


def test_commands_in_remedies_notes_and_errors_are_code(tmp_path: Path, open_page: Any) -> None:
    run = WatchedRun(folder=tmp_path / "run", notes=["see `nvidia-smi`, and one ` alone"])
    run.minutes(9)
    run.status("stopped", ended={"complete": False, "error": "start `tailgate worker`"})
    tab = open_page(run)
    assert tab.text("#checks .reason").endswith("Let it run on; tailgate plan says how long.")
    assert tab.text("#notes").endswith("see nvidia-smi, and one ` alone")
    for place, named in (("#checks", "tailgate plan"), ("#notes", "nvidia-smi"), ("#state", "tailgate worker")):
        assert tab.text(f"{place} code") == named
    assert tab.complaints == []


def test_vectors_have_no_first_token(tmp_path: Path, open_page: Any) -> None:
    run = WatchedRun(folder=tmp_path / "run", streams=False)
    run.minutes(1)
    tab = open_page(run)
    tab.wait_for("document.querySelector('[data-chart=latency] svg .line')")
    assert "p99 E2E" in tab.text(".cards")
    assert "TTFT" not in tab.text(".cards") + tab.text("#latency")


def test_a_run_that_is_judged_at_its_end_shows_its_gates_and_no_decision(run: WatchedRun, open_page: Any) -> None:
    run.minutes(3, decided=True)
    (run.folder / "looks.jsonl").rename(run.folder / "preview.jsonl")
    tab = open_page(run)
    assert tab.text("h1") == "Under load"
    assert "3:00 of 15:00 of traffic. It is judged once, at its end." in tab.text("#state")
    assert "The run itself is judged once, at its end" in tab.text("#gates")
    assert "for good" not in tab.text("#gates")
    assert tab.evaluate("document.querySelectorAll('.tile').length") == 12
    assert tab.text(".card.arm-1 .chip") == "not decided"
    assert "Decision in 12 min once, when the traffic has ended" in tab.text("#state")
    run.status("judging")
    tab.wait_for("document.querySelector('[data-facts]').innerText.includes('at the end')")
    assert tab.complaints == []


def test_an_arm_that_died_is_said_where_one_looks_first(tmp_path: Path, open_page: Any) -> None:
    run = WatchedRun(folder=tmp_path / "run", naive="compiled")  # as compiled-padded begins
    run.minutes(1)
    tab = open_page(run)
    run.dead = ("compiled-padded",)
    run.second()
    run.status()
    tab.wait_for("document.querySelector('[data-headline]').innerText.includes('compiled-padded-0 is dead.')")
    tab.wait_for("document.querySelector('[data-said]').textContent.includes('compiled-padded-0 is dead.')")
    assert tab.text(".card.arm-1 .warned") == "dead"
    assert tab.text(".card.arm-2 div:last-child dd") == "ready"
    assert tab.complaints == []


def test_axes_of_counts_have_whole_numbers_each_once(run: WatchedRun, open_page: Any) -> None:
    run.minutes(3)
    tab = open_page(run)
    labels = tab.evaluate(
        """[...document.querySelectorAll("svg.plot")].map((plot) =>
          [...plot.querySelectorAll("text[text-anchor=end]")].map((node) => node.textContent))"""
    )
    assert len(labels) >= 14
    assert all(len(set(texts)) == len(texts) for texts in labels), labels


def test_what_has_the_focus_and_what_is_open_stay_while_the_page_goes_on(run: WatchedRun, open_page: Any) -> None:
    run.minutes(2)
    run.compiled(2.0)
    run.status()
    tab = open_page(run, width=500)
    places = ("#checks details summary", "#bed .scroll", "#compiles .scroll", "[data-events] .scroll")
    tab.wait_for(f"{json.dumps(places)}.every((place) => document.querySelector(place))")
    tab.evaluate("document.querySelector('#checks details').open = true")
    tab.evaluate("document.querySelector('#bed .scroll').scrollLeft = 40")
    moved = tab.evaluate("document.querySelector('#bed .scroll').scrollLeft")
    assert moved > 0
    for place in places:
        tab.evaluate(f"document.querySelector({place!r}).focus()")
        part = place.split()[0]
        before = tab.evaluate(f"document.querySelector({part!r}).innerHTML")
        run.compiled(1.0)
        for _ in range(30):
            run.second()
        run.look(run.at_s // 30)
        run.status()
        tab.wait_for(f"document.querySelector({part!r}).innerHTML !== {json.dumps(before)}")
        assert tab.evaluate(f"document.querySelector({place!r}) === document.activeElement"), place
    assert tab.evaluate("document.querySelector('#checks details').open")
    assert tab.evaluate("document.querySelector('#bed .scroll').scrollLeft") == moved
    assert tab.complaints == []


def test_a_run_that_says_nothing_is_not_shown_as_live(run: WatchedRun, open_page: Any) -> None:
    run.minutes(1)
    tab = open_page(run)
    tab.wait_for("document.querySelector('.link').innerText === 'live'")
    at_s = time.time() - 7200
    os.utime(run.folder / "status.json", (at_s, at_s))
    tab.wait_for("document.querySelector('h1').innerText === 'Silent'")
    assert tab.text(".link") == "silent"
    assert re.search(r"The run has said nothing for 2 h: it may be stopped", tab.text("#state"))
    run.second()
    run.status()
    tab.wait_for("document.querySelector('h1').innerText === 'Under load'")
    assert tab.text(".link") == "live"


def test_a_page_that_hears_nothing_from_the_start_does_not_go_on_connecting(
    run: WatchedRun, browser: Browser, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtests.page.feed.MOST_LISTENERS", 0)
    tab = browser.open(serve(run.folder).url("127.0.0.1"))
    tab.wait_for("document.querySelector('h1').innerText === 'No connection'")
    assert tab.text(".link") == "no connection"
    assert "The run does not answer" in tab.text("#state")
    monkeypatch.setattr("loadtests.page.feed.MOST_LISTENERS", 1)
    run.minutes(1)
    tab.wait_for("document.querySelector('h1').innerText === 'Under load'")
    assert tab.text(".link") == "live"


def test_a_decision_is_shown_at_once(run: WatchedRun, open_page: Any) -> None:
    run.minutes(2)
    tab = open_page(run)
    assert tab.text("h1") == "Under load"
    for _ in range(60):
        run.second()
    run.look(3, decided=True)
    run.status()
    tab.wait_for("document.querySelector('h1').innerText === 'FAIL'")
    assert "2 of 2 arms decided, compiled-naive failed." in tab.text("#state")
    assert "Decided for good after 3 min." in tab.text("#gates")
    assert tab.text(".card.arm-1 .chip") == "PASS"


def test_what_is_compiled_now_stands_above_what_was(run: WatchedRun, open_page: Any) -> None:
    run.minutes(1)
    run.compiling = 12.0
    run.status()
    tab = open_page(run)
    tab.wait_for("document.querySelector('[data-under-way]').innerText")
    assert tab.text("[data-under-way]") == "Compiling now: compiled-naive since 12 s prefill 4×50"
    run.compiling = None
    run.second()
    run.status()
    tab.wait_for("!document.querySelector('[data-under-way]').innerText")


def test_only_changes_of_state_are_said_aloud(run: WatchedRun, open_page: Any) -> None:
    run.minutes(1)
    tab = open_page(run)
    tab.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.querySelector('[data-said]').textContent))"
        ".observe(document.querySelector('[data-said]'), { childList: true })"
    )
    for _ in range(3):
        before = tab.text(".facts div:nth-child(2)")
        run.second()
        run.status()
        tab.wait_for(
            f"document.querySelector('.facts div:nth-child(2)').innerText.replace(/\\s+/g, ' ') !== {before!r}"
        )
    assert tab.evaluate("said") == []
    run.status("judging")
    tab.wait_for("said.length")
    assert tab.evaluate("said[0]").startswith("Judging.")
    live = "[...document.querySelectorAll('[aria-live]')].map((node) => node.getAttribute('aria-live'))"
    assert set(tab.evaluate(live)) == {"polite"}


def test_the_page_has_landmarks_headings_and_words_for_every_chart(run: WatchedRun, open_page: Any) -> None:
    run.minutes(2)
    tab = open_page(run)
    assert tab.evaluate("document.querySelectorAll('main, header.top, footer, nav[aria-label]').length") == 4
    headings = tab.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((node) => Number(node.tagName[1]))")
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    tab.wait_for("document.querySelectorAll('svg.plot[aria-label]').length >= 14")
    labels = tab.evaluate("[...document.querySelectorAll('svg.plot')].map((plot) => plot.getAttribute('aria-label'))")
    assert any(text.startswith("TTFT by arm over time, now eager p50 ") for text in labels)
    assert any(re.match(r"Requests in flight by arm over time, now eager \d+, of which 4 run", text) for text in labels)
    assert any(
        re.match(r"non-inferiority p99 E2E: ×0\.\d+ \[0\.\d+, 1\.\d+\], limit ×1\.100, INCONCLUSIVE", text)
        for text in labels
    )


def test_a_chart_is_walked_by_keyboard_and_keeps_the_focus_while_it_grows(run: WatchedRun, open_page: Any) -> None:
    run.minutes(2)
    tab = open_page(run)
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.wait_for("document.querySelector('[data-chart=latency] svg .line')")
    tab.evaluate("document.querySelector('[data-chart=latency] svg').focus()")
    tab.press("End")
    newest = tab.text(".tip")
    assert re.match(r"1:59 eager ?\d+ ms / \d+ ms compiled-padded", newest.replace("\u00a0", " ")), newest
    tab.press("ArrowLeft")
    assert tab.text(".tip").startswith("1:58")
    for _ in range(3):
        run.second()
    run.status()
    tab.wait_for("[...document.querySelectorAll('[data-facts] dd')].some((node) => node.innerText.startsWith('3:03'))")
    assert tab.evaluate("document.activeElement.closest('[data-chart]')?.dataset.chart") == "latency"
    tab.press("Escape")
    assert tab.evaluate("document.querySelector('.tip').hidden")


def test_weights_are_changed_by_keyboard_with_the_token(tmp_path: Path, browser: Browser, serve: Serve) -> None:
    asked: list[dict[str, Any]] = []
    errors = [{"error": "the splitter does not answer <b>"}]

    def answer(weights: dict[str, Any]) -> dict[str, Any]:
        asked.append(weights)
        return errors.pop() if errors else {"weights": weights}

    run = WatchedRun(folder=tmp_path / "run", weights=True)
    run.minutes(1)
    token = "0123456789abcdef"
    tab = browser.open(serve(run.folder, answer=answer, change=token).url("127.0.0.1"))
    tab.wait_for(READY)
    tab.wait_for("!document.querySelector('[data-weight-form]').hidden")
    values = "[...document.querySelectorAll('[data-weight-fields] input')].map((input) => input.value)"
    assert tab.evaluate(values) == ["1", "1", "1"]
    assert tab.text("[data-weight-fields]") == "eager 33.3 % compiled-padded 33.3 % compiled-naive 33.3 %"
    type_into = "document.querySelector({0}).focus(); document.execCommand('selectAll')"
    tab.evaluate(type_into.format("'[data-weight-fields] label:nth-child(3) input'"))
    tab.write("0")
    for words, said in (
        ("not-the-token-at-all", "That is not the token: the terminal of the run shows it."),
        (token, "the splitter does not answer <b>"),
    ):
        tab.evaluate(type_into.format("'[data-weight-token]'"))
        tab.write(words)
        tab.press("Enter")
        tab.wait_for(f"document.querySelector('[data-weight-said]').textContent === {json.dumps(said)}")
        run.second()
        run.status()  # what is typed stays while the page goes on
        assert tab.evaluate(values) == ["1", "1", "0"]
    tab.press("Enter")
    tab.wait_for("document.querySelector('[data-weight-said]').textContent.startsWith('From now on')")
    assert tab.text("[data-weight-said]") == "From now on: eager 50 %, compiled-padded 50 %, compiled-naive 0 %."
    assert tab.evaluate("document.querySelector('[data-weight-token]').value") == ""
    assert (
        tab.evaluate("location.href + document.cookie + JSON.stringify({...localStorage, ...sessionStorage})").count(
            token
        )
        == 0
    )
    assert asked == [{"eager": 1, "compiled-padded": 1, "compiled-naive": 0}] * 2
    lines = [
        {"at_ns": run.now_ns() - 30 * 10**9, "weights": {"eager": 1, "compiled-padded": 1, "compiled-naive": 1}},
        {"at_ns": run.now_ns(), "weights": {"eager": 1, "compiled-padded": 1, "compiled-naive": 0}, "why": "asked for"},
    ]
    (run.folder / "weights.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab.wait_for("document.querySelector('[data-chart=weights] svg .line')")
    assert tab.text("[data-weight-why]") == "Since 1:01: asked for."
    label = tab.evaluate("document.querySelector('[data-chart=weights] svg').getAttribute('aria-label')")
    assert "now eager 50" in label.replace("\u00a0", " ")
    assert "Share 50 % of the traffic" in tab.text(".card.arm-0")
    run.status("judging")
    tab.wait_for("document.querySelector('[data-weight-form]').hidden")
    assert [one for one in tab.complaints if "401" not in one and "409" not in one] == []


def test_a_search_shows_what_is_tried_and_what_each_arm_holds(run: WatchedRun, open_page: Any) -> None:
    run.search(1, "eager")
    run.minutes(0)
    for _ in range(30):
        run.second()
    run.search(3, "compiled-padded")
    run.second()
    run.status()
    tab = open_page(run)
    state = tab.text("#state")
    assert "1:31 of 10:00 of the budget. Trial 3 tries compiled-padded at 4, 10.1, 64 requests/s." in state
    assert "0:31 of 15:00 of traffic." in state
    assert "Time left 8 min of 10 min" in state
    assert tab.evaluate("document.querySelector('progress').value") == pytest.approx(91 / 600)
    assert tab.text("#gates h2") == "What each arm holds"
    assert tab.evaluate("document.querySelectorAll('.tile').length") == 3
    assert tab.text(".tile").startswith("eager waits 30 /s [24 /s, 120 /s]")
    assert "tried now" in tab.text(".card.arm-1")
    assert tab.evaluate("document.querySelector('#checks').hidden")
    run.search(4, stop="nothing is open")
    run.status("stopping")
    tab.wait_for("document.querySelector('#state').innerText.includes('The search has ended: nothing is open.')")
    assert tab.complaints == []


@pytest.mark.parametrize("searching", [False, True])
def test_hostile_text_is_text(tmp_path: Path, open_page: Any, searching: bool) -> None:
    run = WatchedRun(folder=tmp_path / "run", naive=HOSTILE, text=HOSTILE, notes=[HOSTILE])
    run.minutes(2, decided=True)
    if searching:
        (run.folder / "looks.jsonl").unlink()
        run.search(3, HOSTILE)
        run.status()
    line = {"at_ns": run.now_ns(), "weights": {HOSTILE: 5}, "why": HOSTILE}
    (run.folder / "weights.jsonl").write_text(json.dumps(line) + "\n")
    tab = open_page(run)
    tab.wait_for("document.querySelector('[data-chart=weights] svg .line')")
    assert tab.evaluate("document.querySelectorAll('img, b:not([class]) b, main script').length") == 0
    assert tab.evaluate("document.title").endswith("tailgate")
    words = " ".join(HOSTILE.split())
    tab.evaluate("document.querySelectorAll('#checks details').forEach((fold) => (fold.open = true))")
    for place in (".run", ".cards", "#gates", *([] if searching else ["#checks"]), "#compiles", "#notes", "#state"):
        assert words in tab.text(place), place
    assert tab.complaints == []


@pytest.mark.parametrize("width", [360, 800, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window_and_no_label_is_cut(
    tmp_path: Path, width: int, dark: bool, open_page: Any
) -> None:
    long = "an-arm-whose-name-has-as-many-characters-as-a-name-may-have-here"
    run = WatchedRun(folder=tmp_path / "run", naive=long)
    run.minutes(9, decided=True)
    tab = open_page(run, width=width, dark=dark)
    tab.wait_for("document.querySelector('[data-chart=latency] svg .line')")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    faults = tab.evaluate(
        """[...document.querySelectorAll("svg.plot")].flatMap((plot) => {
          const frame = plot.getBoundingClientRect();
          return [...plot.querySelectorAll("text")].filter((node) => {
            const box = node.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
          }).map((node) => node.textContent);
        })"""
    )
    assert faults == []
    shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (shade == "rgb(15, 18, 22)") is dark


def test_five_browsers_see_the_run_and_then_its_report(run: WatchedRun, browser: Browser, serve: Serve) -> None:
    run.minutes(1)
    server = serve(run.folder)
    tabs = [browser.open(server.url("127.0.0.1")) for _ in range(5)]
    for tab in tabs:
        tab.wait_for(READY)
        assert tab.text("h1") == "Under load"
    assert server.feed.listeners == 5
    run.end(html_report(json.loads(GOLDEN.read_text(encoding="utf-8"))))
    finishing = threading.Thread(target=server.finish, args=(60.0,))
    finishing.start()
    finishing.join(70)
    assert not finishing.is_alive()
    server.shutdown()
    server.server_close()  # what was fetched is shown from the browser's own copy
    for tab in tabs:
        tab.wait_for("location.pathname === '/report.html' && document.documentElement.dataset.ready === 'yes'")
        assert tab.text("h1") == "FAIL"
        assert tab.complaints == []


def test_a_run_without_a_report_says_how_it_ended(run: WatchedRun, browser: Browser, serve: Serve) -> None:
    run.minutes(1)
    server = serve(run.folder)
    tab = browser.open(server.url("127.0.0.1"))
    tab.wait_for(READY)
    run.status("stopped", ended={"complete": False, "error": "every arm died: see logs"})
    server.finish(20.0)
    tab.wait_for("document.querySelector('h1').innerText === 'Broke'")
    assert "The run has ended. every arm died: see logs" in tab.text("#state")
    assert tab.text(".link") == "ended"


def test_a_page_that_ends_alone_does_not_say_that_the_run_has(run: WatchedRun, browser: Browser, serve: Serve) -> None:
    run.minutes(1)
    server = serve(run.folder)
    tab = browser.open(server.url("127.0.0.1"))
    tab.wait_for(READY)
    server.finish(20.0)
    tab.wait_for("document.querySelector('h1').innerText === 'No connection'")
    assert tab.text(".link") == "no connection"


def test_a_run_that_was_killed_leaves_the_page_saying_so(run: WatchedRun, browser: Browser) -> None:
    run.minutes(1)
    command = [sys.executable, "-P", "-m", "loadtests.page", str(run.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as page:
        assert page.stdout is not None
        tab = browser.open(json.loads(page.stdout.readline())["url"])
        tab.wait_for(READY)
        page.kill()
    tab.wait_for("document.querySelector('h1').innerText === 'No connection'")
    assert tab.text(".link") == "no connection"
    assert "The run does not answer" in tab.text("[data-said]")
    assert tab.text(".card.arm-0 h2") == "eager"  # what was known stays


def test_a_run_that_is_watched_ends_with_its_report_on_the_screen(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "small.toml").write_text(to_toml(experiment(traffic={"duration_s": 3})), encoding="utf-8")
    code = (
        "import sys; from loadtests.commands.main import main\n"
        f"sys.exit(main(['run', 'small.toml'], arm_command=[sys.executable, {str(FAKE_ARM)!r}]))"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stderr is not None
        addresses = (re.search(r"live page: (http://\S+)", line) for line in running.stderr)
        tab = browser.open(next(found[1] for found in addresses if found))
        tab.wait_for(READY)
        tab.wait_for("document.querySelector('h1').innerText === 'Under load'")
        assert "live page" not in running.stderr.read()  # said once
        assert running.wait(PATIENCE_S) == 99
    tab.wait_for("location.pathname === '/report.html' && document.documentElement.dataset.ready === 'yes'")
    assert tab.text("h1") == "FAIL"
    assert "naive must not replace eager" in tab.text("#verdict")
    assert tab.complaints == []


def test_locusts_own_page_and_the_live_page_lead_to_each_other(run: WatchedRun, browser: Browser, serve: Serve) -> None:
    run.minutes(1)
    live = serve(run.folder).url("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = f"http://127.0.0.1:{port}/"
    arguments = ["-f", "loadtests/chat.py", "--web-host", "127.0.0.1", "--web-port", str(port)]
    locust = start_locust(*arguments, "--live-page", str(run.folder))
    try:
        beside = browser.open(live)
        beside.wait_for(READY)
        wait_for(lambda: (run.folder / "locust-page.json").exists() and answers(own))
        tab = browser.open(own)
        tab.wait_for("document.querySelector('#root').innerText.includes('Start')")
        assert "live page" not in tab.text()  # the run serves none yet
        write_document(run.folder / "page.json", {"url": live})
        tab.send("Page.navigate", url=own)
        tab.wait_for("document.querySelector('body > p a')")
        assert tab.text("body > p") == "This load belongs to a run of tailgate: its live page"
        assert tab.evaluate("document.querySelector('body > p a').href") == live
        run.second()
        run.status()
        beside.wait_for("!document.querySelector('[data-locust]').hidden")
        assert beside.evaluate("document.querySelector('[data-locust] a').href") == own
        beside.send("Page.navigate", url=tab.evaluate("document.querySelector('body > p a').href"))
        beside.wait_for(READY)
        locust.send_signal(signal.SIGINT)
        output, _ = locust.communicate(timeout=PATIENCE_S)
        run.second()
        run.status()
        beside.wait_for("document.querySelector('[data-locust]').hidden")
    finally:
        locust.kill()
    assert "Traceback" not in output
    assert not (run.folder / "locust-page.json").exists()
    assert beside.complaints == []


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_the_token_leaves_the_address(run: WatchedRun, browser: Browser, serve: Serve) -> None:
    run.minutes(1)
    server = serve(run.folder, token="0123456789abcdef")
    tab = browser.open(f"{server.url('127.0.0.1')}?token=0123456789abcdef")
    tab.wait_for(READY)
    assert tab.evaluate("location.search") == ""
    assert tab.evaluate("document.cookie") == ""  # HttpOnly
    assert tab.text("h1") == "Under load"
    assert tab.complaints == []
