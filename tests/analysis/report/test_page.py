"""report.html: sections, safety, charts and tables of comparisons, shapes and time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tailgate.analysis.report.brief import brief_of
from tailgate.analysis.report.html import SCRIPTS, bundle, chart_data, content_policy, html_report, script_json
from tailgate.analysis.report.rendering import template_text
from tailgate.analysis.summary.model import Summary as Model

Summary = dict[str, Any]
Reader = Callable[[str], Any]
SECTIONS = ("verdict", "gates", "timeline", "todo", "checks", "events", "spikes", "stalls", "comparison", "latency")
SECTIONS += ("arms", "startup", "conditions")


def first_screen(page: str) -> str:
    return page.partition('<details class="section"')[0].partition("<body>")[2]


def test_what_decides_comes_first_and_the_rest_is_folded(demo: Summary, read_page: Reader) -> None:
    demo["comparisons"][0]["ratio"] = 1.1
    page = read_page(html_report(demo))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [name for name in ids if name in SECTIONS] == list(SECTIONS)
    assert {fold["id"] for fold in page.find("details", class_="section")} >= set(SECTIONS[3:])
    assert not any("open" in fold for fold in page.find("details", class_="section"))


def test_sections_without_content_are_absent(demo: Summary, read_page: Reader) -> None:
    bare = {**demo, "events": [], "spikes": [], "comparisons": [], "rates": [], "series": {"bin_s": 1.0, "arms": {}}}
    ids = {attributes.get("id") for _, attributes in read_page(html_report(bare)).tags}
    assert not {"events", "spikes", "comparison", "timeline", "weights", "joined", "ship", "machines"} & ids


def test_the_first_screen_has_verdict_next_command_and_gates(demo: Summary, read_page: Reader) -> None:
    text = read_page(first_screen(html_report(demo))).text
    brief = brief_of(Model.of(demo))
    ratio = brief.arms[1].figures["p99 TTFT"][0]
    for part in ("FAIL", demo["headline"], brief.next, ratio, "8.95 s"):
        assert part in text
    assert demo["advice"]["text"] not in text


def test_failed_gates_come_before_open_ones_and_each_has_one_sentence(demo: Summary, read_page: Reader) -> None:
    gate = {"gate": "arm present", "kind": "error", "value": None, "limit": None, "unit": ""}
    gate |= {"verdict": "INCONCLUSIVE", "reason": "No record. Look at its log."}
    demo["gates"].append({"arm": "compiled-padded", **gate})
    text = read_page(first_screen(html_report(demo))).text
    failed, undecided = text.index("FAIL compiled-naive 4 gates"), text.index("INCONCLUSIVE compiled-padded 6 gates")
    assert failed < text.index("Compiles stalled a replica for 20.8 s of each minute") < undecided
    assert undecided < text.index("6 gates passed, 5 open gates of arms that failed")
    assert "longest compile stall 8.95 s – 1 s Compiles delayed a request by up to 8.95 s, limit 1 s." in text
    assert "Open: No record. No record. Look at its log." in text, "a sentence, and the whole reason folded below it"


def test_a_card_shows_the_ratio_and_interval_of_its_gate(rollout: Summary, read_page: Reader) -> None:
    text = read_page(first_screen(html_report(rollout))).text
    card, _, gates = text.partition("Gates")
    gate = next(row for row in rollout["gates"] if row["gate"] == "noninferiority p99_ttft")
    shown = f"×{gate['value']:.3f} [{gate['low']:.3f}, {gate['high']:.3f}]"
    assert shown in card
    assert shown in gates
    assert "Ratios (×) are of a typical block" in card, "where the table of quantiles is of the whole run"


def test_checks_that_limit_the_run_say_what_they_leave_open(demo: Summary, read_page: Reader) -> None:
    row = {"check": "stalls of unknown cause", "ok": False, "arm": "compiled-naive"}
    row |= {"reason": "It stopped.", "opens": ["longest compile stall"], "remedy": "See."}
    demo["validity"].append(row)
    text = read_page(html_report(demo)).text
    assert "18 usable blocks of 30 s after the cold start (gates.min_blocks); compiled-padded has 2. A PASS" in text
    assert "blocks (compiled-naive)" in text
    assert "It stopped. See. Leaves open: longest compile stall." in text
    failed = sum(not row["ok"] for row in demo["validity"])
    assert f"{failed} checks failed of {len(demo['validity'])}" in text


def test_events_have_rows_that_can_be_sorted_and_spikes_link_to_them(demo: Summary, read_page: Reader) -> None:
    demo["design"]["trial_names"] = {"1": "the candidate's trial"}
    page = read_page(html_report(demo))
    assert page.text.count("the candidate's trial") == len(demo["events"]) + len(demo["spikes"])
    bodies = [found for found in page.find("tbody") if "data-event" in found]
    assert [float(body["data-seconds"]) for body in bodies] == [event["seconds"] for event in demo["events"]]
    assert {body["data-kind"] for body in bodies} == {"recompile"}
    links = [link["href"] for link in page.find("a") if (link["href"] or "").startswith("#event-")]
    assert len(links) == len(demo["spikes"])
    assert all(page.find("tbody", id=link.removeprefix("#")) for link in links)
    events = {event["event_id"]: event for event in demo["events"]}
    for shown, spike in zip(chart_data(Model.of(demo))["spikes"], demo["spikes"], strict=True):
        event = events[spike["event_ids"][0]]
        assert shown["offset_s"] == spike["offset_s"]
        assert spike["offset_s"] <= event["offset_s"] + event["seconds"]


def test_the_data_of_charts_have_the_limits_of_gates_and_null_for_no_number(demo: Summary, read_page: Reader) -> None:
    demo["series"]["arms"]["eager"]["e2e_p99_ms"][0] = float("nan")
    data = json.loads(read_page(html_report(demo)).scripts[0])
    assert data["limits"] == {"p99_ttft_ms": 2000.0, "p99_e2e_ms": 9000.0}
    assert data["series"][0]["e2e_p99_ms"][0] is None


def test_the_page_asks_the_network_for_nothing(demo: Summary, read_page: Reader) -> None:
    source = html_report(demo)
    page = read_page(source)
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "data", "action", "poster", "background"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"url\((?!#)|@import|@font-face", template_text("report.css"))
    assert "default-src 'none'" in page.find("meta", http_equiv="Content-Security-Policy")[0]["content"]
    style = source[source.index("<style>") + 7 : source.index("</style>")]
    script = source[source.rindex("<script>") + 8 : source.rindex("</script>")]
    assert content_policy(style, script) in source.replace("&#39;", "'")
    assert " style=" not in source


def test_the_scripts_neither_fetch_nor_write_markup() -> None:
    forbidden = r"(inner|outer|insertAdjacent)HTML|document\.write|eval\(|fetch\(|XMLHttpRequest|import\(|</script"
    assert not re.search(forbidden, bundle(), re.IGNORECASE)
    assert all(template_text(name) for name in SCRIPTS)


def test_hostile_names_and_reasons_are_inert(hostile: Summary, demo: Summary, read_page: Reader) -> None:
    page, plain = read_page(html_report(hostile)), read_page(html_report(demo))
    assert len(page.find("script")) == len(plain.find("script")) == 2
    assert page.find("img") == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert json.loads(page.scripts[0])["arms"][2]["name"].startswith("</script>")
    assert '<script>document.title="pwned"' in page.text


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&lt;"])
def test_embedded_json_cannot_end_its_script_element(text: str) -> None:
    encoded = script_json({text: text})
    assert not re.search("[<>&]", encoded)
    assert json.loads(encoded) == {text: text}


NO_NUMBERS = r"\b(None|nan|NaN|inf|null|undefined|Undefined)\b"


def test_a_run_without_arms_and_unknown_numbers_make_a_sensible_page(
    demo: Summary, nulls: Summary, read_page: Reader
) -> None:
    text = read_page(html_report({**demo, "arms": [], "gates": [], "comparisons": []})).text
    assert "No arm" in text
    assert "No gate was judged" in text
    assert not re.search(NO_NUMBERS, text + read_page(html_report(nulls)).text)


def test_every_ratio_is_a_cell_and_those_that_a_gate_rests_on_are_framed(demo: Summary) -> None:
    def ratios() -> str:
        return html_report(demo).partition('<details class="section" id="comparison"')[2].partition("</details>")[0]

    assert ratios() == "", "too few blocks show no ratio"
    for row in demo["comparisons"]:
        row["ratio"] = 1.1
    for part in ("p50", "p90", "p95", "p99", "p99.9", "TTFT", "TPOT"):
        assert part in ratios()
    assert ratios().count('class="num gate gate-') == sum(row["gate"] for row in demo["comparisons"]) == 4
    row = next(row for row in demo["comparisons"] if row["gate"])
    demo["comparisons"] = [row]
    for low, high, tone in ((1.01, 1.2, "slower"), (0.8, 0.99, "faster"), (0.9, 1.1, ""), (None, None, "")):
        row |= {"low": low, "high": high}
        assert f'<span class="{tone}">' in ratios(), "only where its whole interval is"


def test_changes_of_weights_are_listed(demo: Summary, read_page: Reader) -> None:
    row = {"offset_s": 1260.0, "action": "set by hand", "reason": "to see <more>", "shadows_pct": {"new": 5.0}}
    demo["weights"] = [row | {"weights": {"eager": 90.0, "new": 10.0}}]
    text = read_page(html_report(demo)).text
    assert "21 min set by hand eager 90, new 10; copies in % new 5 to see <more>" in text
    assert "Weights: set by hand after 21 min: eager 90, new 10" in text
