"""Markdown, terminal and JUnit say the same verdict for the same reasons, and numbers read well."""

from __future__ import annotations

import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tailgate.analysis.report import html_report, values, verdict_table, write_reports
from tailgate.analysis.report.brief import bounds_of, brief_of, limit_of, sentence_of, value_of
from tailgate.analysis.report.rendering import code, junit_xml, markdown_report, prose
from tailgate.analysis.settings.metrics import gate_label
from tailgate.analysis.summary.model import Summary as Model
from tailgate.analysis.summary.model import plain
from tailgate.analysis.wording import counted
from tests.golden.recorded import GOLDEN, RUNS, encoded, golden, summary_of

Summary = dict[str, Any]
SUMMARIES = ("demo", "rollout", "hostile", "nulls")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", RUNS)
def test_the_recorded_runs_still_have_the_golden_summaries(name: str, tmp_path: Path) -> None:
    expected = (GOLDEN / name / "summary.json").read_text(encoding="utf-8")
    assert encoded(summary_of(name, tmp_path)) == expected


@pytest.mark.parametrize("name", RUNS)
def test_reports_match_the_golden_files_and_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    written = write_reports(golden(name), tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "junit.xml"]
    for path in written[1:]:
        assert path.read_text(encoding="utf-8") == (GOLDEN / name / path.name).read_text(encoding="utf-8")
    first = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_reports(golden(name), tmp_path)] == first


# The schema of Jenkins' xUnit plug-in (junit-10.xsd) as far as this report uses it: attributes that must and that may
# be there, and children.
COUNTS = {"name", "tests", "failures", "errors"}
MESSAGE: tuple[set[str], set[str], set[str]] = (set(), {"type", "message"}, set())
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), COUNTS | {"time"}, {"testsuite"}),
    "testsuite": (COUNTS, {"time", "skipped", "timestamp", "hostname"}, {"testcase", "system-out"}),
    "testcase": ({"name"}, {"time", "classname"}, {"skipped", "error", "failure", "system-out"}),
    "failure": MESSAGE,
    "skipped": MESSAGE,
    "system-out": (set(), set(), set()),
}


def checked(element: ET.Element) -> ET.Element:
    """The element, which keeps to the schema, as all below it."""
    required, optional, children = SCHEMA[element.tag]
    assert required <= set(element.attrib) <= required | optional, element.attrib
    assert {child.tag for child in element} <= children
    for name in ("tests", "failures", "errors", "skipped"):
        assert re.fullmatch(r"\d+", element.get(name, "0"))
    assert re.fullmatch(r"\d*(\.\d*)?", element.get("time", "0"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", element.get("timestamp", "2025-11-21T08:00:00"))
    for child in element:
        checked(child)
    return element


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_xml_keeps_to_the_common_schema_and_its_totals_are_sums(name: str, request: pytest.FixtureRequest) -> None:
    root = checked(ET.fromstring(junit_xml(request.getfixturevalue(name))))
    for count in ("tests", "failures", "errors"):
        assert int(root.attrib[count]) == sum(int(suite.attrib[count]) for suite in root)


def gate(name: str, reason: str, *, verdict: str = "INCONCLUSIVE", **more: Any) -> Summary:
    row = {"arm": "compiled-padded", "gate": name, "kind": "slo", "value": 1.0, "limit": 2.0, "unit": "ms"}
    return row | {"verdict": verdict, "reason": reason} | more


def brief_with(demo: Summary, *gates: Summary, **more: Any) -> Any:
    return brief_of(Model.of({**demo, "gates": list(gates), "overall": "INCONCLUSIVE", **more}))


def test_a_gate_has_one_sentence_and_failed_gates_come_first(demo: Summary) -> None:
    caveat = "It would be PASS, but a check failed: machines drift."
    (_, padded, *_) = brief_with(
        demo,
        gate("slo p99_ttft_ms", "Fine. In every block."),
        gate("errors", f"None failed. {caveat}", caveat=caveat),
        gate("deaths", "It died.", verdict="FAIL"),
    ).arms
    assert [(row.title, sentence_of(row)) for row in padded.gates] == [
        ("deaths", "It died."),
        ("SLO p99 TTFT", "Open: Fine."),
        ("errors", caveat),
    ]


def test_the_next_step_is_that_of_a_remedy_of_the_first_fault_or_a_longer_run(demo: Summary) -> None:
    assert brief_of(Model.of(demo)).next == "tailgate inspect experiment.toml --arm compiled-naive"
    assert all("run of about 15 minutes" in text for text in (demo["headline"], demo["advice"]["text"])), "one length"
    advice = {"needed_s": 900.0, "text": "Longer.", "remedies": []}
    undecided = gate("errors", "?")
    design = demo["design"] | {"trials": 2}
    brief = brief_with(demo, undecided, advice=advice, design=design)
    assert brief.next == "tailgate run experiment.toml --duration 8m", "in whole minutes of each trial"
    brief = brief_with(demo, undecided, advice=advice, design=design, interim="")
    assert brief.next == "tailgate run experiment.toml --until-decided --at-most 15m", "of all trials"
    ramp = {
        "candidate": "compiled-padded",
        "outcome": "hold",
        "reason": "?",
        "exposed": 9,
        "hurt": 0,
        "rollback_s": None,
    }
    assert brief_with(demo, undecided, advice=advice, interim="", ramp=ramp).first_step == "Longer."
    for text, step in (
        ("See `tailgate doctor`. More.", "tailgate doctor"),
        ("Cool it. Run `tailgate parity`.", "Cool it. Run `tailgate parity`."),
    ):
        brief = brief_with(demo, undecided, advice={"needed_s": None, "text": text, "remedies": []})
        assert (brief.next or brief.first_step) == step
    assert brief_with(demo, gate("errors", "?", verdict="PASS"), advice=advice, overall="PASS").next == ""


def test_figures_show_on_which_side_of_the_limit_they_lie(demo: Summary) -> None:
    for high, shown in ((1.098, "×0.900 [0.824, 1.098] ×1.100"), (1.0997, "×0.9000 [0.8240, 1.0997] ×1.1000")):
        ratio = {"kind": "memory", "unit": "ratio", "value": 0.9, "limit": 1.1, "low": 0.824, "high": high}
        (_, padded, *_) = brief_with(demo, gate("memory ratio", "?", **ratio)).arms
        assert " ".join(show(padded.gates[0]) for show in (value_of, bounds_of, limit_of)) == shown


@pytest.mark.parametrize("name", RUNS)
def test_what_a_pull_request_shows_unfolded_has_at_most_300_words(name: str) -> None:
    visible = re.sub(r"<details>.*?</details>", "", markdown_report(golden(name)), flags=re.DOTALL)
    assert len(re.findall(r"\S*\w\S*", visible)) <= 300


def columns(line: str) -> int:
    """Cells of a table line as GitHub splits it: an escaped character never ends a cell."""
    return len(re.findall(r"\|", re.sub(r"\\.", "", line))) - 1


@given(st.text())
@settings(max_examples=50)
def test_texts_stay_in_their_cell_and_hold_no_markup(value: str) -> None:
    for cell in (code(value), prose(value)):
        assert "\n" not in cell
        assert columns(f"| {cell} |") == 1
    assert "<" not in cell
    assert not re.search(r"@\w", cell)
    fence = re.match(r"`+", code(value))
    if fence is not None:
        inner = code(value)[len(fence[0]) : -len(fence[0])]
        assert code(value).endswith(fence[0])
        assert fence[0] not in re.findall(r"`+", inner)


def test_hostile_text_keeps_every_table_whole(hostile: Summary) -> None:
    report = markdown_report(hostile)
    for block in report.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert {columns(line) for line in lines} == {columns(lines[0])}
    outside_code = re.sub(r"\\.|(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", report)
    assert not re.search("<script|<img", outside_code)


@pytest.mark.parametrize("report", [markdown_report, verdict_table])
def test_what_is_not_known_is_a_dash(nulls: Summary, report: Any) -> None:
    assert "no arm" in report({**nulls, "arms": [], "gates": [], "comparisons": []}).lower()
    assert not re.search(r"\b(None|nan|inf|null)\b", report(nulls))


@pytest.mark.parametrize("name", SUMMARIES)
@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_asked(name: str, width: int, request: pytest.FixtureRequest) -> None:
    shown = verdict_table(request.getfixturevalue(name), width=width)
    assert max(map(cell_len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_arm_and_every_gate_that_did_not_pass_is_shown_uncut(demo: Summary, width: int) -> None:
    shown = verdict_table(demo, width=width)
    assert shown.startswith("✘ FAIL  demo\n")
    arms = words(shown.split("limited by:")[0])
    for part in ("eager", "compiled-padded", "compiled-naive", "longest", "8.95 s", "? INCONCLUSIVE"):
        assert part in arms
    for part in (
        "Compiles stalled a replica for 20.8 s of each minute",
        "errors (0 %, limit 0.5 %)",
        "limited by: tail",
        "to decide: ",
        "next:",
    ):
        assert part in words(shown)


def test_every_report_names_the_check_that_asks_for_the_command(demo: Summary) -> None:
    text = "Stop other work (`tailgate doctor` measures it)."
    busy = {"check": "other work", "ok": False, "arm": None, "reason": "Busy.", "remedy": text}
    asked = demo | {"validity": [busy], "advice": {**demo["advice"], "text": text, "remedies": []}}
    why = "ext, since the check other work failed"
    assert f"\nn{why}: tailgate doctor\n" in verdict_table(asked)
    assert f"\nN{why}: `tailgate doctor`\n" in markdown_report(asked)
    assert f"<span>N{why}</span> <code>tailgate doctor</code>" in html_report(asked)


def test_only_a_terminal_without_no_color_gets_colour(demo: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert "\x1b" not in verdict_table(demo)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[1;31m✘ FAIL" in verdict_table(demo)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in verdict_table(demo)


def test_markup_and_escape_codes_in_a_name_are_not_obeyed_and_no_reason_is_repeated(demo: Summary) -> None:
    demo["arms"][0]["name"] = "[red]eager[/red]\x1b[2J"
    failed = next(row for row in demo["validity"] if not row["ok"])
    demo["headline"] = f"No verdict. {failed['reason']}"
    assert words(verdict_table(demo)).count(failed["reason"]) == 1
    shown = verdict_table(demo)
    assert "\x1b" not in shown
    assert "[red]eager" in re.sub(r"\s", "", shown)


SHOWN = [
    (values.milliseconds, {0: "0 ms", 0.8412: "0.841 ms", 84.25: "84.2 ms", 999.7: "1 s", 8412.3: "8.41 s"}),
    (values.span, {90: "90 s", 125: "2 min 5 s", 1260: "21 min", 5400: "1 h 30 min"}),
    (gate_label, {"noninferiority p99_ttft": "non-inferiority p99 TTFT", "slo p99_9_max_itl": "SLO p99.9 max ITL"}),
    (plain, {"\x1b[31mred\x07\ud800": "[31mred", "com\u202epiled\u2066": "compiled"}),
    (values.ratio, {1.0034: "×1.003", 0.9996: "×1.000", 12.3: "×12.3"}),
    (lambda low: values.interval(low, None), {0.5: "[0.500, –]", None: "–"}),
    (lambda count: counted(count, "process"), {0: "0 processes", 1: "1 process", 2: "2 processes"}),
    (lambda count: counted(count, "entry", "{:.2g}".format), {1.02: "1 entry", 2: "2 entries"}),
]


@pytest.mark.parametrize(("show", "value", "shown"), [(show, *case) for show, cases in SHOWN for case in cases.items()])
def test_values_read_well(show: Any, value: Any, shown: str) -> None:
    assert show(value) == shown


@given(
    st.recursive(st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
@settings(max_examples=30)
def test_a_document_holds_only_what_json_can_hold(value: object) -> None:
    json.dumps(plain(value), allow_nan=False)
