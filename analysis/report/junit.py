"""The gates as JUnit XML: a suite an arm, a case a gate. FAIL is a failure, INCONCLUSIVE is skipped with its reason.

INCONCLUSIVE is not an `<error>`: an error says that the test itself broke. Every reader of the format shows skipped
apart from passed, and the exit code 3 of `tailgate run` stops a pipeline that must not go on without a PASS.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from analysis.report.brief import CheckLine, GateLine, brief_of
from analysis.summary.model import Summary


def junit_xml(document: Mapping[str, Any]) -> str:
    """The whole junit.xml for the summary in `document`: a suite for each arm, then one for the checks of the run."""
    summary = Summary.of(document)
    brief = brief_of(summary)
    root = ET.Element("testsuites", {"name": f"tailgate {brief.name}"})

    def suite(title: str) -> ET.Element:
        stamp = {"timestamp": summary.created[:19]} if summary.created else {}
        return ET.SubElement(root, "testsuite", {"name": f"{brief.name}.{title}", **stamp})

    for arm in brief.arms:
        if arm.gates:
            element = suite(arm.name)
            for gate in arm.gates:
                _gate(_case(element, f"{brief.name}.{arm.name}", gate.name), gate)
    if brief.checks:
        element = suite("validity")
        for check in brief.checks:
            _check(_case(element, f"{brief.name}.validity", check.name), check)
    for element in (*root, root):
        _totals(element, _seconds(summary))
    del root.attrib["skipped"]  # The Jenkins schema (junit-10.xsd) knows it on a suite only.
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, classname: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", {"classname": classname, "name": name, "time": "0"})


def _gate(case: ET.Element, gate: GateLine) -> None:
    measured = f"value {gate.value}, limit {gate.limit}"
    if gate.verdict == "FAIL":
        failure = ET.SubElement(case, "failure", {"message": gate.reason, "type": gate.row.kind})
        failure.text = "\n".join(filter(None, (measured, gate.remedy)))
    elif gate.verdict == "INCONCLUSIVE":
        ET.SubElement(case, "skipped", {"message": f"INCONCLUSIVE: {gate.reason} ({measured})"})
    else:
        ET.SubElement(case, "system-out").text = f"{gate.reason} ({measured})"


def _check(case: ET.Element, check: CheckLine) -> None:
    if not check.row.ok:
        measured = f"value {check.value}, limit {check.limit}"
        ET.SubElement(case, "skipped", {"message": f"INCONCLUSIVE: {check.reason} ({measured})"})


def _totals(element: ET.Element, seconds: float) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", "0")
    element.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    element.set("time", f"{seconds:.3f}")


def _seconds(summary: Summary) -> float:
    return summary.design.duration_s * summary.design.trials
