"""The test bed in the reports: a line on the first screen of each, a section where there was one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.report.html import html_report
from analysis.report.markdown import markdown_report
from analysis.report.terminal import verdict_table
from analysis.summary.summary import analyze
from tests.fakes.beds import FIGURES, FakeBed, Trouble
from tests.fakes.runs import FakeRun, write_run

Summary = dict[str, Any]
DISTURBED = FakeBed(
    locked=False,
    troubles=(
        Trouble(what="throttle", share=0.3, trials=(1,)),
        Trouble(what="foreign", place="cuda:0", size=2, share=0.2, trials=(2,)),
        Trouble(what="slow", size=0.88),
        Trouble(what="unreadable", place="cuda:0", column="power_w"),
    ),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Summary]:
    def make(bed: FakeBed | None, trials: int = 2) -> Summary:
        folder: Path = tmp_path_factory.mktemp("bed")
        return analyze(write_run(folder / "run", FakeRun(bed=bed, trials=trials, duration_s=120.0, rate=2.0)))

    return make


def test_every_report_says_in_a_line_whether_the_bed_was_quiet(made: Callable[..., Summary]) -> None:
    summary = made(FakeBed())
    line = "Quiet: 2 × NVIDIA H200, clocks 1,980 MHz throughout, steal 0.0 %"
    assert line in " ".join(verdict_table(summary).split())
    assert f"**Test bed**: {line}" in markdown_report(summary).split("### Gates")[0]
    assert line in html_report(summary).split('<section id="gates"')[0]


def test_what_the_headline_says_of_the_bed_is_not_said_again_below_it(demo: Summary) -> None:
    why = "the host beside cuda:1 ran Python 43.1 % slower before trial 5 than after trial 4"
    demo["bed"] = {"verdict": "disturbed", "line": f"Disturbed: {why}."}
    for headline, note in (
        (f"It cannot decide. {why.capitalize()}.", "Disturbed, as said above."),
        ("It cannot decide.", f"Disturbed: {why}."),
    ):
        demo["headline"] = headline
        for report in (html_report, markdown_report, verdict_table):
            first = re.split(r'<section id="gates"|### Gates', report(demo))[0]
            assert note in " ".join(first.split())
            assert " ".join(first.split()).lower().count(why.lower()) == 1


def test_a_run_that_nobody_watched_has_the_sentence_and_no_section(
    demo: Summary, read_page: Callable[[str], Any]
) -> None:
    page = read_page(html_report(demo))
    assert "Not watched: nobody recorded how the machines of this run behaved." in page.text
    assert not page.find("section", id="bed")
    assert not page.find("div", data_chart="testBed")
    assert "test bed: Not watched" in verdict_table(demo)


def test_a_summary_of_before_the_test_bed_still_renders(demo: Summary, read_page: Callable[[str], Any]) -> None:
    del demo["bed"]
    page = read_page(html_report(demo))
    assert not page.find("section", id="variation")
    assert "Test bed" not in page.text
    assert "Test bed" not in markdown_report(demo)


def test_a_pass_on_a_disturbed_bed_says_that_gates_allowed_for_it(made: Callable[..., Summary]) -> None:
    summary, allowed = made(DISTURBED), "Every gate passed with that allowed for."
    passed, quiet = {**summary, "overall": "PASS"}, {**made(FakeBed()), "overall": "PASS"}
    for report in (html_report, markdown_report, verdict_table):
        assert allowed not in " ".join(report(summary).split())
        assert allowed in " ".join(report(passed).split())
        assert allowed not in " ".join(report(quiet).split())
    assert allowed in html_report(passed).split('<section id="gates"')[0]
    assert allowed in markdown_report(passed).split("### Gates")[0]


def test_what_a_verdict_allowed_for_is_not_called_a_limit(demo: Summary) -> None:
    drift = {"check": "bed drift", "ok": False, "reason": "The host drifted.", "affects": ["slo"], "shift": 0.2}
    demo["validity"] = [drift]
    assert "allowed for: bed drift: The host drifted." in verdict_table(demo)
    assert "What limits this run" not in html_report(demo)
    apart = {"check": "bed apart", "arm": "compiled-naive", "ok": False, "reason": "It was slow.", "shift": 0.1}
    both = {**demo, "validity": [drift, apart]}
    both["gates"] = [{**gate, "blocked_by": ["bed apart"] * (gate["arm"] != "eager")} for gate in demo["gates"]]
    assert "allowed for: bed drift" in verdict_table(both)
    assert "limited by: bed apart (compiled-naive): It was slow." in verdict_table(both)
    demo["gates"][0]["blocked_by"] = ["bed drift"]
    assert "limited by: bed drift: The host drifted." in verdict_table(demo)
    assert "allowed for: bed drift: The host drifted." in verdict_table({**demo, "overall": "PASS"})
    drift["remedy"] = "Let the machine settle."
    assert "Let the machine settle." in html_report(demo)
    for report in (html_report, markdown_report):
        assert "What limits this run" in report(demo)
        passed = report({**demo, "overall": "PASS"})
        assert "What the verdict allows for" in passed
        assert "What limits this run" not in passed
        assert "Let the machine settle." not in passed, "nothing is to be mended"


def test_a_disturbed_bed_names_each_trouble_and_what_it_leaves_open(
    made: Callable[..., Summary], read_page: Callable[[str], Any]
) -> None:
    page = read_page(html_report(made(DISTURBED)))
    assert "cuda:1 was throttled for 36 s of the 120 s of trial 1 (heat, by the hardware). compiled" in page.text
    assert "heat, by the hardware 36 s" in page.text
    assert "2 for 24 s" in page.text
    assert "which the arms' changing places balances" in page.text
    assert "cuda:0 power_w Not Supported" in page.text
    assert "To lock them: sudo nvidia-smi -i 0 -lgc 1980,1980" in page.text


def test_the_reference_shows_before_and_after_with_the_change(made: Callable[..., Summary]) -> None:
    summary = made(FakeBed(card_noise=0.0, host_noise=0.0, troubles=(Trouble(what="slow_after", size=0.9),)))
    report = markdown_report(summary)
    assert "790 → 711 TFLOP/s (−10.0 %)" in report
    assert "790 → 790 TFLOP/s (+0.0 %)" in report


def test_the_reference_shows_how_unlike_the_processors_of_the_host_are(
    made: Callable[..., Summary],
) -> None:
    alike = {**FIGURES, "python_low_ms": 10.8, "python_high_ms": 11.2}
    unlike = {**FIGURES, "python_low_ms": 8.5, "python_high_ms": 16.9}
    for figures, shown in ((alike, "10.8 to 11.2 ms"), (unlike, "8.5 to 16.9 ms")):
        text = markdown_report(made(FakeBed(card_noise=0.0, host_noise=0.0, figures=figures)))
        assert shown in text
        assert "Python by processor" in text


def test_one_trial_says_that_nothing_is_known_of_the_variation(
    made: Callable[..., Summary], read_page: Callable[[str], Any]
) -> None:
    text = read_page(html_report(made(FakeBed(), 1))).text
    assert "One trial says nothing of how the figures vary from start to start: more trials would show it." in text
    text = read_page(html_report(made(FakeBed(), 2))).text
    assert "over 2 trials, each a fresh start. ▲ marks more than 5 %" in text
    assert "From 2 trials that is a guess, and the truth may be several times as large: run more." in text


def test_names_on_the_machines_are_data_and_no_markup(
    made: Callable[..., Summary], read_page: Callable[[str], Any]
) -> None:
    hostile = '</script><script>document.title="pwned"</script>|*_[a](javascript:1)'

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return hostile if isinstance(value, str) and value not in KEPT else value

    summary = made(DISTURBED)
    summary = {**summary, "bed": renamed(summary["bed"])}
    page = read_page(html_report(summary))
    assert len(page.scripts) == 2
    assert hostile in page.text
    assert "<script>" not in markdown_report(summary)


KEPT = {"device", "host", "arm", "eager", "compiled", "p99_ttft_ms", "before", "after"}


@pytest.mark.parametrize("part", ["devices", "hosts", "references", "series", "variation", "disturbances", "unknown"])
@pytest.mark.parametrize("value", [None, 3, "x", [None, 3, {}], {"rows": [{}]}, {"rows": [{"kind": "arm"}]}])
def test_a_broken_part_of_the_bed_breaks_no_report(
    made: Callable[..., Summary], part: str, value: object, shared: dict[str, Summary]
) -> None:
    summary = shared.setdefault("made", made(DISTURBED)) if not shared else shared["made"]
    broken = {**summary, "bed": {**summary["bed"], part: value}}
    for report in (html_report, markdown_report, verdict_table):
        assert "nan" not in report(broken).lower().split("<style>")[0]


@pytest.fixture(scope="module")
def shared() -> dict[str, Summary]:
    return {}
