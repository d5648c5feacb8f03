from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from analysis.report.charts import script_json
from analysis.report.html import SCRIPTS, bundle, content_policy, html_report, template_text

Summary = dict[str, Any]
Reader = Callable[[str], Any]
SECTIONS = ("verdict", "gates", "timeline", "distribution", "padding", "comparison", "events", "spikes")
SECTIONS += ("arms", "startup", "environment")


def test_every_section_stands_in_the_page_and_in_its_contents(demo: Summary, read_page: Reader) -> None:
    page = read_page(html_report(demo))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert [name for name in SECTIONS if name not in ids] == []
    linked = {attributes["href"] for attributes in page.find("a") if (attributes["href"] or "").startswith("#")}
    assert {f"#{name}" for name in SECTIONS} <= linked
    assert len(ids) == len(set(ids))


def test_the_verdict_its_headline_and_the_facts_come_first(demo: Summary, read_page: Reader) -> None:
    text = read_page(html_report(demo)).text
    before_gates = text[: text.index("An arm passes when")]
    for said in ("FAIL", demo["headline"], "mirrored", "90 s", "540", "AMD EPYC 7R13", demo["advice"]["text"]):
        assert said in before_gates


def test_a_ramp_shows_how_far_it_came_and_no_figure_that_no_arm_has(demo: Summary, read_page: Reader) -> None:
    demo["ramp"] = {
        **{"candidate": "compiled-naive", "outcome": "rollback", "exposed": 31, "hurt": 2, "reason": "it died"},
        "changes": [{"weights": weights} for weights in ({"eager": 95, "compiled-naive": 5}, {"eager": 100})],
    }
    del demo["environment"], demo["created"]
    for arm in demo["arms"]:
        arm["goodput_rps"] = None
        arm["metrics"]["itl"] = {"n": 0}
        for metric in arm["cold"].values():
            metric["n"] = 0
    text = read_page(html_report(demo)).text
    assert "Share reached 5 % rolled back Exposed 31 2 hurt" in text
    first_screen = text[: text.index("An arm passes when")]
    for unknown in ("–", "Machine", "Goodput"):
        assert unknown not in first_screen
    assert "goodput –" not in text
    assert text.count("No request.") == len(demo["arms"])


def test_every_gate_shows_its_verdict_value_limit_and_reason(demo: Summary, read_page: Reader) -> None:
    text = read_page(html_report(demo)).text
    for gate in demo["gates"]:
        assert gate["reason"] in text
    assert "FAIL longest stall 8.95 s 1 s Compiles held up one request for 8.9 s, limit 1 s." in text
    assert text.count("INCONCLUSIVE non-inferiority p99 TTFT ×") == 2


def test_what_limits_all_gates_and_what_several_share_stand_once_above_them(
    sharing: Summary, read_page: Reader
) -> None:
    text = read_page(html_report(sharing)).text
    shared = sharing["gates"][0]["reason"]
    assert text.count(shared) == 1
    assert text.index(sharing["headline"]) < text.index(shared) < text.index("What limits this run")


def test_what_failed_checks_turned_is_said_once_on_the_first_screen(demo: Summary, read_page: Reader) -> None:
    caveat = "That would be a PASS, but for the check that failed: bed drift."
    for gate in demo["gates"]:
        if gate["kind"] == "slo":
            reason = f"{gate['gate']} of {gate['arm']}."
            gate |= {"verdict": "INCONCLUSIVE", "reason": f"{reason} {caveat}", "caveat": caveat}
    text = read_page(html_report(demo)).text
    assert text.count(caveat) == 1
    whose = "compiled-padded, compiled-naive: SLO p99 TTFT, SLO p99 E2E"
    assert text.index(f"{whose} {caveat}") < text.index("What limits this run")
    assert text.count("slo p99_ttft_ms of compiled-naive.") == 1


def test_every_event_has_a_row_with_what_sorting_and_filtering_need(demo: Summary, read_page: Reader) -> None:
    bodies = [found for found in read_page(html_report(demo)).find("tbody") if "data-event" in found]
    assert [float(body["data-seconds"]) for body in bodies] == [event["seconds"] for event in demo["events"]]
    assert {body["data-kind"] for body in bodies} == {"recompile"}


def test_spikes_link_to_the_events_that_explain_them(demo: Summary, read_page: Reader) -> None:
    page = read_page(html_report(demo))
    links = [link["href"] for link in page.find("a") if (link["href"] or "").startswith("#event-")]
    assert len(links) == len(demo["spikes"])
    assert all(page.find("tbody", id=link.removeprefix("#")) for link in links)


def test_the_page_asks_the_network_for_nothing(demo: Summary, read_page: Reader) -> None:
    source = html_report(demo)
    page = read_page(source)
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "data", "action", "poster", "background"):
            assert name not in attributes, (tag, name)
        assert (attributes.get("href") or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"url\((?!#)|@import|@font-face", template_text("report.css"))
    assert "default-src 'none'" in page.find("meta", http_equiv="Content-Security-Policy")[0]["content"]


def test_the_scripts_neither_fetch_nor_write_markup() -> None:
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
        "XMLHttpRequest",
        "import(",
    ):
        assert word not in bundle()
    assert "</script" not in bundle().lower()


def test_the_policy_admits_this_style_and_script_alone(demo: Summary) -> None:
    source = html_report(demo)
    style = source[source.index("<style>") + 7 : source.index("</style>")]
    script = source[source.rindex("<script>") + 8 : source.rindex("</script>")]
    assert content_policy(style, script) in source.replace("&#39;", "'")
    assert " style=" not in source


def test_hostile_names_and_reasons_are_inert(hostile: Summary, demo: Summary, read_page: Reader) -> None:
    page, plain = read_page(html_report(hostile)), read_page(html_report(demo))
    assert len(page.find("script")) == len(plain.find("script")) == 2
    assert page.find("img") == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert json.loads(page.scripts[0])["arms"][2]["name"].startswith("</script>")
    assert '<script>document.title="pwned"' in page.text


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "\u2028", "&lt;"])
def test_embedded_json_cannot_end_its_script_element(text: str) -> None:
    encoded = script_json({text: text})
    assert not re.search("[<>&\u2028]", encoded)
    assert json.loads(encoded) == {text: text}


def test_nulls_read_as_dashes(nulls: Summary, read_page: Reader) -> None:
    page = read_page(html_report(nulls))
    assert "–" in page.text
    assert not re.search(r"\b(None|nan|NaN|inf|null|undefined|Undefined)\b", page.text)


@pytest.mark.parametrize(
    "summary", [{}, {"arms": [], "events": [], "gates": []}, {"arms": None, "series": None, "design": 3}]
)
def test_an_empty_summary_still_makes_a_sensible_page(summary: Summary, read_page: Reader) -> None:
    text = read_page(html_report(summary)).text
    for said in (
        "No verdict",
        "No arm sent a record",
        "No gate was judged",
        "Nothing compiled while serving",
        "No spike was found",
    ):
        assert said in text
    assert not re.search(r"\b(None|nan|undefined)\b", text)


def test_not_a_number_becomes_null_in_the_charts_data(demo: Summary, read_page: Reader) -> None:
    demo["comparisons"][0]["high"] = float("inf")
    demo["series"]["arms"]["eager"][0]["e2e_p99_ms"] = float("nan")
    data = json.loads(read_page(html_report(demo)).scripts[0])
    assert data["comparisons"][0]["high"] is None
    assert data["series"][0]["e2e_p99_ms"][0] is None


def test_an_arm_that_only_gates_name_still_shows(demo: Summary, read_page: Reader) -> None:
    demo["gates"].append(
        {"arm": "lost", "gate": "arm present", "kind": "error", "verdict": "INCONCLUSIVE", "reason": "no record"}
    )
    assert "lost" in read_page(html_report(demo)).text


def test_the_slo_line_of_a_chart_comes_from_its_gate(demo: Summary, read_page: Reader) -> None:
    assert json.loads(read_page(html_report(demo)).scripts[0])["limits"] == {
        "ttft_p99_ms": 2000.0,
        "e2e_p99_ms": 6000.0,
    }


def test_every_script_is_in_the_package() -> None:
    assert all(template_text(name) for name in SCRIPTS)


def test_the_ratio_beside_an_overall_quantile_is_that_of_all_traffic(demo: Summary, read_page: Reader) -> None:
    steady, overall = (
        next(
            row
            for row in demo["comparisons"]
            if (row["arm"], row["phase"], row["metric"], row["quantile"]) == ("compiled-naive", phase, "ttft", 0.99)
        )
        for phase in ("steady", "all")
    )
    text = read_page(html_report(demo)).text
    assert f"p99 TTFT 8.03 s ×{overall['ratio']:.1f}" in text
    assert f"p99 TTFT 8.03 s ×{steady['ratio']:.2f}" not in text


def test_checks_that_limit_the_run_say_what_they_leave_open(demo: Summary, read_page: Reader) -> None:
    text = read_page(html_report(demo)).text
    assert "The run has 3 blocks of 30 s; 18 are needed. Leaves open: SLO." in text
    assert "blocks (compiled-naive)" in text
    passed = sum(row["ok"] for row in demo["validity"])
    assert 0 < passed < len(demo["validity"])
    assert f"{passed} of {len(demo['validity'])} checks passed" in text


def test_a_stall_of_unknown_cause_stands_beside_what_compiles_held_up(demo: Summary, read_page: Reader) -> None:
    row = {
        "check": "stalls of unknown cause",
        "ok": False,
        "arm": "compiled-naive",
        "value": 2.04,
        "limit": 1.0,
        "reason": "It stood still.",
        "affects": ["recompile"],
        "gates": ["longest stall"],
        "remedy": "See.",
    }
    text = read_page(html_report({**demo, "validity": [*demo["validity"], row]})).text
    assert "It stood still. See. Leaves open: longest stall." in text
    assert text.count("2.04 s unexplained") == 1


def test_a_spike_reads_from_its_trials_start(demo: Summary, read_page: Reader) -> None:
    data = json.loads(read_page(html_report(demo)).scripts[0])
    events = {event["event_id"]: event for event in demo["events"]}
    for shown, spike in zip(data["spikes"], demo["spikes"], strict=True):
        event = events[spike["event_ids"][0]]
        expected = event["offset_s"] + (spike["start_ns"] - event["start_ns"]) / 1e9
        assert shown["start_s"] == pytest.approx(expected, rel=1e-4)


def test_what_stands_between_backticks_is_code_and_no_markup(demo: Summary) -> None:
    demo["advice"]["text"] = "Run `tailgate parity <x>` & look."
    failed = demo["validity"][0]
    failed |= {"ok": False, "remedy": "Stop what else runs (`nvidia-smi` lists it)."}
    page = html_report(demo)
    assert "</strong> Run <code>tailgate parity &lt;x&gt;</code> &amp; look.</p>" in page
    assert "Stop what else runs (<code>nvidia-smi</code> lists it)." in page
