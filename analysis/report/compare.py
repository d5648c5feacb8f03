"""What a reader sees of two runs compared: a table for the terminal, Markdown, JUnit XML and HTML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich import box
from rich.table import Table
from rich.text import Text

from analysis.records.documents import write_json
from analysis.report.html import content_policy, environment, template_text
from analysis.report.markdown import MARKS as MARKDOWN_MARKS
from analysis.report.markdown import prose, table
from analysis.report.terminal import WIDE, chip, console_of, noted, printed_on
from analysis.report.values import (
    DASH,
    Row,
    at,
    count,
    interval,
    is_number,
    moment,
    quantity,
    ratio,
    rows,
    text,
    verdict,
)


def write_compare_reports(document: Mapping[str, Any], folder: Path) -> Path:
    """compare.json, compare.xml, compare.md and compare.html stand in `folder`; the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", document, indent=1, ensure_ascii=False, allow_nan=False)
    for name, content in (
        ("compare.xml", compare_junit(document)),
        ("compare.md", compare_markdown(document)),
        ("compare.html", compare_html(document)),
    ):
        (folder / name).write_text(content, encoding="utf-8", newline="\n")
    return folder / "compare.html"


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


def compare_table(document: Row, *, width: int = 100) -> str:
    """The comparison for a terminal: coloured where stdout is one and NO_COLOR is unset."""
    console = console_of(width)
    names = f"{text(at(document, 'baseline', 'run_id'))} → {text(at(document, 'candidate', 'run_id'))}"
    console.print(Text.assemble(chip(at(document, "overall")), "  ", (names, "bold")))
    console.print(Text(text(at(document, "headline"))))
    console.print(_gates(document, narrow=width < WIDE))
    for line in open_lines(document):
        console.print(Text(line))
    for note in at(document, "notes") or []:
        console.print(noted("note", text(note)))
    if changed := [text(row.get("text")) for row in rows(document, "differs")]:
        console.print(noted("what differs", "; ".join(changed)))
    return printed_on(console)


def _gates(document: Row, *, narrow: bool) -> Table:
    """The gates, one a row; where it is narrow, without the figures of both runs that a ratio stands for."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for name in (*(() if narrow else ("baseline", "candidate")), "ratio", "between", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in rows(document, "arms"):
        table.add_row("", Text(text(arm.get("name")), "bold"))
        for row in gates_of(document, arm.get("name")):
            sides = () if narrow else ("baseline", "candidate")
            table.add_row(
                chip(row.get("verdict")),
                text(row.get("label")),
                *(quantity(row.get(side), row.get("unit")) for side in sides),
                ratio(row.get("ratio")),
                interval(row.get("low"), row.get("high")),
                limit_text(row),
            )
    return table


# --- HTML -------------------------------------------------------------------------------------------------------------


def compare_html(document: Row) -> str:
    """The whole compare.html: one file that fetches nothing and runs no script."""
    style = template_text("report.css") + template_text("compare.css")
    arms = rows(document, "arms")
    return (
        environment()
        .get_template("compare.html")
        .render(
            policy=content_policy(style, ""),
            style=Markup(style),
            document=document,
            facts=_facts(document),
            arms=[
                {
                    "index": index,
                    "name": arm.get("name"),
                    "verdict": arm.get("verdict"),
                    "gates": [
                        {**row, "between": interval(row.get("low"), row.get("high")), "limit_text": limit_text(row)}
                        for row in gates_of(document, arm.get("name"))
                    ],
                    "shown": [row for row in _shown(document) if row.get("arm") == arm.get("name")],
                    "references": rows(arm, "machine", "references"),
                    "machine": text(at(arm, "machine", "text")),
                }
                for index, arm in enumerate(arms)
            ],
            differs=rows(document, "differs"),
        )
    )


def _facts(document: Row) -> list[dict[str, str]]:
    facts = []
    for side in ("baseline", "candidate"):
        run = at(document, side)
        commit = text(at(run, "git_commit"))[:12]
        note = ", ".join(part for part in (moment(at(run, "created")), commit) if part != DASH)
        trials = count(at(run, "trials"))
        note += f"; trials: {trials}"
        facts.append({"name": side.capitalize(), "value": text(at(run, "run_id")), "note": note})
    return facts


def _shown(document: Row) -> list[Row]:
    """The figures that are not judged."""
    return [row for row in rows(document, "figures") if row.get("verdict") is None]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def compare_markdown(document: Row) -> str:
    """The comparison for a pull request: verdict, gates by arm, what is open, what differs."""
    names = f"{prose(at(document, 'baseline', 'run_id'))} → {prose(at(document, 'candidate', 'run_id'))}"
    judged = verdict(at(document, "overall"))
    parts = [f"## {MARKDOWN_MARKS.get(judged, judged)} · {names}", prose(at(document, "headline"))]
    head = ("Verdict", "Figure", "Baseline", "Candidate", "Ratio", "Between", "Limit")
    for arm in rows(document, "arms"):
        body = [
            (
                MARKDOWN_MARKS.get(verdict(row.get("verdict")), DASH),
                prose(row.get("label")),
                quantity(row.get("baseline"), row.get("unit")),
                quantity(row.get("candidate"), row.get("unit")),
                ratio(row.get("ratio")),
                interval(row.get("low"), row.get("high")),
                limit_text(row),
            )
            for row in gates_of(document, arm.get("name"))
        ]
        parts += [f"### {prose(arm.get('name'))}", table(head, body, right=(2, 3, 4, 5, 6))]
    lines = [prose(line) for line in open_lines(document)]
    lines += [prose(note) for note in at(document, "notes") or []]
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    if changed := [prose(row.get("text")) for row in rows(document, "differs")]:
        parts.append("What differs: " + "; ".join(changed) + ".")
    return "\n\n".join(parts) + "\n"


# --- JUnit ------------------------------------------------------------------------------------------------------------


def compare_junit(document: Row) -> str:
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
