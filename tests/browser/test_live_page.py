"""The live page in a real browser: it shows the run, announces what changes, and becomes the report."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from http import HTTPStatus
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tailgate.loadtests.experiments.reading import to_toml
from tailgate.loadtests.page.server import PageServer
from tests.fakes.live_runs import WatchedRun
from tests.fakes.processes import PATIENCE_S
from tests.fakes.screens import Browser, Tab
from tests.fakes.whole_run import environment, experiment, tailgate
from tests.loadtests.page.conftest import Serve

STATE = (("tailgate.analysis.report", "plot.js"), ("tailgate.loadtests.page", "state.js"))
HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\"><b>bold</b>\"'`&amp;"
LONG = "an-arm-whose-name-has-as-many-characters-as-a-name-may-have-here"
READY = "document.documentElement.dataset.ready === 'yes'"
REPORT_READY = f"location.pathname === '/report.html' && {READY}"
LATENCY = "document.querySelector('[data-chart=latency] svg .line')"
Open = Callable[..., Tab]
MakeRun = Callable[..., WatchedRun]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def made(minutes: int = 1, *, decided: bool = False, **settings: Any) -> WatchedRun:
        run = WatchedRun(folder=tmp_path / "20260101T000000Z-canary", **settings)
        run.minutes(minutes, decided=decided)
        return run

    return made


@pytest.fixture
def run(make_run: MakeRun) -> WatchedRun:
    return make_run()


def address(server: PageServer) -> str:
    return f"http://127.0.0.1:{server.port}/"


@pytest.fixture
def open_page(browser: Browser, serve: Serve) -> Open:
    def opened(run: WatchedRun, **window: Any) -> Tab:
        tab = browser.open(address(serve(run.folder)), **window)
        tab.wait_for(READY)
        return tab

    return opened


def go_on(run: WatchedRun, seconds: int = 1) -> None:
    for _ in range(seconds):
        run.second()
    run.status()


def test_the_page_shows_the_state_of_the_run(make_run: MakeRun, open_page: Open) -> None:
    run = make_run(9, notes=["see `nvidia-smi`, and one ` alone"])
    run.compiled(20.0, phase="warmup", arm="compiled-padded")
    tab = open_page(run)
    state = tab.text("#state")
    for shown in (
        "9:00 of 15:00",
        "0 of 2 arms decided",
        "compiled-naive fails 3 gates",
        "lag 3.1 ms p99, limit 50 ms",
    ):
        assert shown in state
    assert tab.text(".tile .outlook") == "Likely not in this run: a decision takes about 58 min of traffic."
    assert tab.evaluate("document.querySelector('progress').value") == pytest.approx(0.6)
    assert tab.evaluate("document.title") == "9:00 · canary · tailgate"
    two_ticks = "text[text-anchor=end] ~ text[text-anchor=end]"
    assert tab.count(".tile") == tab.count(f".tile:has(svg.plot .limit):has({two_ticks})") == 12
    assert tab.text(".tile").startswith("non-inferiority p99 TTFT INCONCLUSIVE limit ×1.100 ×0.8")
    assert "limits blocks" in tab.text("#checks")
    assert "recompile 5.39 s 16 prefill 4×475" in tab.text("#compiles")
    assert "cuda:1 1,980 MHz" in tab.text("#machines")
    assert tab.text("#notes").endswith("see nvidia-smi, and one ` alone")
    assert (tab.text("#notes code"), tab.text("#checks code")) == ("nvidia-smi", "gates.min_blocks")
    assert tab.complaints == []


SCRIPTS = [(files(package) / "templates" / name).read_text() for package, name in STATE]


def known(browser: Browser, *messages: dict[str, Any]) -> dict[str, Any]:
    """What the page's script knows after the messages."""
    script = "".join(SCRIPTS)
    tab = browser.open("data:text/html,")
    result = (
        f"const {{ seen, learn }} = knowledge(); {json.dumps(messages)}.forEach(learn); return JSON.stringify(seen)"
    )
    return json.loads(tab.evaluate(f"(() => {{ const data = {{}};\n{script}\n{result}; }})()"))


ARMS = {"arms": [{"name": "eager", "control": True}, {"name": "a"}, {"name": "b"}]}


def test_all_arms_must_pass_and_one_failure_decides(browser: Browser) -> None:
    for decisions, decided in ((("PASS", "FAIL"), "FAIL"), (("PASS", "PASS"), "PASS"), (("PASS", None), None)):
        arms = {name: {"decision": each} for name, each in zip("ab", decisions, strict=True)}
        analysis = {"number": 1, "arms": {"eager": None, **arms}}
        assert known(browser, {"run": ARMS, "interim": [analysis], "now": {}})["now"]["decided"] == decided


def test_a_day_of_samples_stays_a_bounded_series_with_the_newest_and_starts_anew_with_a_connection(
    browser: Browser,
) -> None:
    load = [{"at_ns": s * 1e9} for s in range(86_400)]
    times = [one["at_ns"] / 1e9 for one in known(browser, {"load": load})["series"]["load"]]
    assert 450 <= len(times) <= 900
    assert (times[0], times[-1]) == (0, 86_399)
    gaps = {after - before for before, after in pairwise(times[:-1])}
    assert len(gaps) == 1
    seen = known(browser, {"load": load[:9]}, {"first": True, "load": load[:2]})
    assert len(seen["series"]["load"]) == 2


def test_a_run_that_is_judged_at_its_end_shows_no_gates(make_run: MakeRun, open_page: Open) -> None:
    run = make_run(3)
    (run.folder / "interim.jsonl").unlink()
    experiment = run.folder / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("sequential = true", "sequential = false"))
    tab = open_page(run)
    tab.wait_for(LATENCY)
    assert tab.evaluate("document.querySelector('#gates').hidden")
    assert tab.text(".card.arm-1 .chip") == "not decided"
    run.status("judging")
    tab.wait_for_text("[data-facts]", "at the end")
    assert tab.complaints == []


def test_a_compile_a_death_and_a_decision_are_shown_at_once(make_run: MakeRun, open_page: Open) -> None:
    run = make_run(naive="compiled")  # a name with which compiled-padded begins
    run.compiling = 12.0
    run.status()
    tab = open_page(run)
    assert tab.text("h1") == "Under load"
    tab.wait_for_text("[data-under-way]", "compiled since 12 s prefill 4×50")
    run.compiling, run.dead = None, ("compiled-padded",)
    go_on(run)
    for place in ("[data-headline]", "[data-said]"):
        tab.wait_for_text(place, "compiled-padded-0 is dead.")
    assert tab.text("[data-under-way]") == ""
    assert tab.text(".card.arm-1 .warned") == "dead"
    assert tab.text(".card.arm-2 div:last-child dd") == "ready"
    run.dead = ()
    run.analyse(2, decided=True)
    go_on(run, 60)
    tab.wait_for_text("h1", "FAIL")
    assert "2 of 2 arms decided, compiled failed." in tab.text("#state")
    assert tab.text(".card.arm-1 .chip") == "PASS"


def test_a_page_that_is_not_answered_says_so_and_recovers(
    run: WatchedRun, browser: Browser, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as refusing:
        refusing.setattr(
            "tailgate.loadtests.page.server._Handler._stream",
            lambda handler: handler.answer(HTTPStatus.SERVICE_UNAVAILABLE, ""),
        )
        tab = browser.open(address(serve(run.folder)))
        tab.wait_for_text("h1", "No connection")
        assert tab.text(".link") == "no connection"
    tab.wait_for_text("h1", "Under load")
    assert tab.text(".link") == "live"


def test_hostile_text_is_text(make_run: MakeRun, open_page: Open) -> None:
    run = make_run(2, decided=True, naive=HOSTILE, text=HOSTILE, notes=[HOSTILE])
    line = {"at_ns": run.now_ns(), "weights": {HOSTILE: 5}, "why": HOSTILE}
    (run.folder / "weights.jsonl").write_text(json.dumps(line) + "\n")
    tab = open_page(run)
    tab.wait_for("document.querySelector('[data-chart=weights] svg .line')")
    assert tab.count("img, b:not([class]) b, main script") == 0
    assert tab.evaluate("document.title").endswith("tailgate")
    words = " ".join(HOSTILE.split())
    tab.evaluate("document.querySelectorAll('#checks details').forEach((fold) => (fold.open = true))")
    for place in (".run", ".cards", "#gates", "#checks", "#compiles", "#notes", "#state"):
        assert words in tab.text(place), place
    assert tab.complaints == []


@pytest.mark.parametrize("width", [360, 800, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window_and_no_label_is_cut(
    make_run: MakeRun, width: int, dark: bool, open_page: Open
) -> None:
    tab = open_page(make_run(9, decided=True, naive=LONG), width=width, dark=dark)
    tab.wait_for(LATENCY)
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


@pytest.mark.parametrize(
    ("ended", "title", "link"),
    [
        ({"complete": False, "error": "every arm died: see `tailgate worker`"}, "Broke", "ended"),
        (None, "No connection", "no connection"),
    ],
)
def test_a_page_ends_as_its_run_did(
    run: WatchedRun, browser: Browser, serve: Serve, ended: dict[str, Any] | None, title: str, link: str
) -> None:
    server = serve(run.folder)
    tab = browser.open(address(server))
    tab.wait_for(READY)
    if ended:
        run.status("stopped", ended=ended)
    server.finish(20.0)
    tab.wait_for_text("h1", title)
    assert tab.text(".link") == link
    if ended:
        assert "every arm died: see tailgate worker" in tab.text("#state")
        assert tab.text("#state code") == "tailgate worker"


def test_a_watched_run_ends_with_its_report_on_the_screen(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "small.toml").write_text(to_toml(experiment(traffic={"duration_s": 3})), encoding="utf-8")
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(tailgate("run", "small.toml"), cwd=tmp_path, env=environment(), **pipes) as running:
        addresses = (re.search(r"live page: (http://\S+)", line) for line in running.stderr)
        tab = browser.open(next(found[1] for found in addresses if found))
        tab.wait_for(READY)
        tab.wait_for_text("h1", "Under load")
        assert "live page" not in running.stderr.read()  # it is printed once
        assert running.wait(PATIENCE_S) == 99
    tab.wait_for(REPORT_READY)
    assert tab.text("h1") == "FAIL"
    assert tab.complaints == []
