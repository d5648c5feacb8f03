"""The gates as JUnit XML: a suite an arm, a case a gate. FAIL is a failure, INCONCLUSIVE is skipped with its reason.

INCONCLUSIVE is not an `<error>`: an error says that the test itself broke. Skipped is shown apart from passed by every
reader of the format, and the exit code 3 of `tailgate run` is what stops a pipeline that must not go on without a PASS.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from analysis.report import reading
from analysis.report.values import DASH, Row, at, is_number, label, quantity, rows, text, verdict


def _case(suite: ET.Element, classname: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", {"classname": classname, "name": name, "time": "0"})


def _measured(row: Row) -> str:
    unit = row.get("unit")
    return f"value {quantity(row.get('value'), unit)}, limit {quantity(row.get('limit'), unit)}"


def _gate(suite: ET.Element, classname: str, gate: Row, remedy: str) -> None:
    case = _case(suite, classname, label(gate.get("gate")))
    judged, reason = verdict(gate.get("verdict")), text(gate.get("reason"))
    if judged == "FAIL":
        failure = ET.SubElement(case, "failure", {"message": reason, "type": text(gate.get("kind"))})
        failure.text = "\n".join(filter(None, (_measured(gate), remedy)))
    elif judged != "PASS":
        # A gate without a verdict must never count as passed.
        ET.SubElement(case, "skipped", {"message": f"{judged}: {reason} ({_measured(gate)})"})
    else:
        ET.SubElement(case, "system-out").text = f"{reason} ({_measured(gate)})"


def _check(suite: ET.Element, classname: str, check: Row) -> None:
    case = _case(suite, classname, reading.check_name(check))
    if check.get("ok") is not True:
        ET.SubElement(case, "skipped", {"message": f"INCONCLUSIVE: {text(check.get('reason'))} ({_measured(check)})"})


def _totals(element: ET.Element, seconds: float) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", "0")
    element.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    element.set("time", f"{seconds:.3f}")


def _seconds(summary: Row) -> float:
    duration, trials = at(summary, "design", "duration_s"), at(summary, "design", "trials")
    return float(duration) * (float(trials) if is_number(trials) else 1.0) if is_number(duration) else 0.0


def junit_xml(summary: Row) -> str:
    """The whole junit.xml for `summary`: arms' suites, then one suite for the run's validity checks."""
    name, created = text(at(summary, "name")), text(at(summary, "created"))[:19]
    root = ET.Element("testsuites", {"name": f"tailgate {name}"})

    def suite(title: str) -> ET.Element:
        element = ET.SubElement(root, "testsuite", {"name": f"{name}.{title}"})
        if created != DASH:
            element.set("timestamp", created)
        return element

    for arm in reading.arm_names(summary):
        if gates := reading.gates_of(summary, arm):
            element = suite(text(arm))
            for gate in gates:
                _gate(element, f"{name}.{text(arm)}", gate, reading.remedy_of(summary, gate))
    if checks := rows(summary, "validity"):
        element = suite("validity")
        for check in checks:
            _check(element, f"{name}.validity", check)
    for element in (*root, root):
        _totals(element, _seconds(summary))
    del root.attrib["skipped"]  # The Jenkins schema (junit-10.xsd) knows it on a suite only.
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
