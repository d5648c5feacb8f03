from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from analysis.report.junit import junit_xml

Summary = dict[str, Any]
# The schema of Jenkins' xUnit plug-in (junit-10.xsd) as far as this report uses it: attributes that must and that may
# be there, and children.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"time", "skipped", "timestamp", "hostname"},
        {"testcase", "system-out"},
    ),
    "testcase": ({"name"}, {"time", "classname"}, {"skipped", "error", "failure", "system-out"}),
    "failure": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}


def _check(element: ET.Element) -> None:
    required, optional, children = SCHEMA[element.tag]
    assert required <= set(element.attrib) <= required | optional, element.attrib
    assert {child.tag for child in element} <= children
    for name in ("tests", "failures", "errors", "skipped"):
        assert re.fullmatch(r"\d+", element.get(name, "0"))
    assert re.fullmatch(r"\d*(\.\d*)?", element.get("time", "0"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", element.get("timestamp", "2025-11-21T08:00:00"))
    for child in element:
        _check(child)


@pytest.mark.parametrize("name", ["demo", "rollout", "hostile", "nulls"])
def test_the_xml_keeps_to_the_common_schema(name: str, request: pytest.FixtureRequest) -> None:
    _check(ET.fromstring(junit_xml(request.getfixturevalue(name))))


def test_every_gate_is_one_case_of_its_arm(demo: Summary) -> None:
    root = ET.fromstring(junit_xml(demo))
    for arm in ("compiled-padded", "compiled-naive"):
        suite = root.find(f"testsuite[@name='demo.{arm}']")
        assert suite is not None
        assert len(suite.findall("testcase")) == sum(gate["arm"] == arm for gate in demo["gates"])


def test_fail_is_a_failure_inconclusive_is_skipped_and_pass_is_neither(demo: Summary) -> None:
    root = ET.fromstring(junit_xml(demo))
    gates = root.findall("testsuite[@name!='demo.validity']/testcase")
    for verdict, tag in (("FAIL", "failure"), ("INCONCLUSIVE", "skipped")):
        assert sum(case.find(tag) is not None for case in gates) == sum(
            gate["verdict"] == verdict for gate in demo["gates"]
        )
    skipped = root.find(".//skipped")
    assert skipped is not None
    assert skipped.attrib["message"].startswith("INCONCLUSIVE: ")
    assert root.attrib["failures"] == "4"


def test_totals_are_the_sums_of_the_suites(demo: Summary) -> None:
    root = ET.fromstring(junit_xml(demo))
    for name in ("tests", "failures", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in root)


def test_a_gate_without_a_verdict_never_counts_as_passed(demo: Summary) -> None:
    demo["gates"] = [{"arm": "compiled-naive", "gate": "recompiles", "verdict": None}]
    case = ET.fromstring(junit_xml(demo)).find("testsuite/testcase")
    assert case is not None
    assert case.find("skipped") is not None


def test_characters_that_xml_forbids_are_dropped(demo: Summary) -> None:
    demo["gates"][0]["reason"] = "bad \x00\x1b[31m\ufffe text"
    assert "bad [31m text" in junit_xml(demo)


def test_an_empty_summary_is_valid_xml() -> None:
    _check(ET.fromstring(junit_xml({})))
