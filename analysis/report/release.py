"""What a reader sees of two releases compared: a table for the terminal, Markdown, JUnit XML and HTML."""

from __future__ import annotations

import io
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.records.documents import write_json
from analysis.report.terminal import MARKS, STYLES
from analysis.report.values import DASH, Row, at, interval, is_number, quantity, ratio, rows, text, verdict


def write_release_reports(document: Mapping[str, Any], folder: Path) -> Path:
    """compare.json, compare.md, compare.xml and compare.html stand in `folder`; the path of the one for people."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", document, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "compare.xml").write_text(release_junit(document), encoding="utf-8", newline="\n")
    return folder / "compare.json"


def gates_of(document: Row, arm: object = None) -> list[Row]:
    """The figures that were judged; of one arm where it is named."""
    judged = [row for row in rows(document, "figures") if row.get("verdict") is not None]
    return [row for row in judged if arm is None or row.get("arm") == arm]


def limit_text(row: Row) -> str:
    """The limit of a figure: "×1.05", of counts "+0"."""
    limit = row.get("limit")
    if not is_number(limit):
        return DASH
    if row.get("counted"):
        return f"+{limit:g}"
    return f"×{1.0 + limit if row.get('less_is_better') else 1.0 - limit:.3g}"


def open_lines(document: Row) -> list[str]:
    """Why gates did not pass, but for what the headline says; one line for all that one doubt leaves open."""
    said = text(at(document, "headline"))
    lines: dict[str, list[str]] = {}
    for row in gates_of(document):
        if row.get("verdict") == "PASS":
            continue
        arm, reason, doubt = text(row.get("arm")), text(row.get("reason")), text(row.get("doubt"))
        if doubt != DASH:
            lines.setdefault(doubt, []).append(f"{arm} {text(row.get('label'))}")
        elif reason not in said:
            lines[f"{arm}: {reason}"] = []
    return [f"{', '.join(figures)}: {line}." if figures else line for line, figures in lines.items()]


# --- Terminal ---------------------------------------------------------------------------------------------------------


def release_table(document: Row, *, width: int = 100) -> str:
    """The comparison for a terminal: coloured where stdout is one and NO_COLOR is unset."""
    color = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    names = f"{text(at(document, 'baseline', 'run_id'))} → {text(at(document, 'candidate', 'run_id'))}"
    console.print(Text.assemble(_chip(at(document, "overall")), "  ", (names, "bold")))
    console.print(Text(text(at(document, "headline"))))
    console.print(_gates(document))
    for line in open_lines(document):
        console.print(Text(line))
    for note in at(document, "notes") or []:
        console.print(_note("note", text(note)))
    if changed := [text(row.get("text")) for row in rows(document, "differs")]:
        console.print(_note("what differs", "; ".join(changed)))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _chip(value: object) -> Text:
    judged = verdict(value)
    return Text(MARKS.get(judged, judged), STYLES.get(judged, "dim"))


def _note(name: str, line: str) -> Text:
    return Text.assemble((f"{name}: ", "bold"), " ".join(line.split()))


def _gates(document: Row) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for name in ("baseline", "candidate", "ratio", "between", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in rows(document, "arms"):
        table.add_row(Text(text(arm.get("name")), "bold"))
        for row in gates_of(document, arm.get("name")):
            table.add_row(
                _chip(row.get("verdict")),
                text(row.get("label")),
                quantity(row.get("baseline"), row.get("unit")),
                quantity(row.get("candidate"), row.get("unit")),
                ratio(row.get("ratio")),
                interval(row.get("low"), row.get("high")),
                limit_text(row),
            )
    return table


# --- JUnit ------------------------------------------------------------------------------------------------------------


def release_junit(document: Row) -> str:
    """A suite an arm, a case a gate: FAIL is a failure, INCONCLUSIVE is skipped with its reason."""
    names = f"{text(at(document, 'baseline', 'run_id'))} {text(at(document, 'candidate', 'run_id'))}"
    root = ET.Element("testsuites", {"name": f"tailgate compare {names}"})
    for arm in rows(document, "arms"):
        name = f"compare.{text(arm.get('name'))}"
        suite = ET.SubElement(root, "testsuite", {"name": name})
        for row in gates_of(document, arm.get("name")):
            case = ET.SubElement(suite, "testcase", {"classname": name, "name": text(row.get("label")), "time": "0"})
            _outcome(case, row)
    for element in (*root, root):
        cases = list(element.iter("testcase"))
        element.set("tests", str(len(cases)))
        element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
        element.set("errors", "0")
        if element is not root:  # the Jenkins schema knows it on a suite only
            element.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
        element.set("time", "0.000")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _outcome(case: ET.Element, row: Row) -> None:
    judged, reason = verdict(row.get("verdict")), text(row.get("reason"))
    if judged == "FAIL":
        values = [f"{side} {quantity(row.get(side), row.get('unit'))}" for side in ("baseline", "candidate")]
        failure = ET.SubElement(case, "failure", {"message": reason, "type": text(row.get("figure"))})
        failure.text = f"{', '.join(values)}, limit {limit_text(row)}"
    elif judged == "PASS":
        ET.SubElement(case, "system-out").text = reason
    else:
        # A gate without a verdict must never count as passed.
        ET.SubElement(case, "skipped", {"message": f"{judged}: {reason}"})
