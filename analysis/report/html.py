"""The report as one HTML file that opens anywhere, fetches nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from analysis.report import charts
from analysis.report.brief import DEFINITION, MORE_IS_BETTER, ORDER, ArmBrief, brief_of
from analysis.report.rendering import environment, template_text
from analysis.settings.metrics import EMBED
from analysis.summary.model import Gate, Summary

SCRIPTS = (
    "plot.js",
    "timeline.js",
    "timeline-marks.js",
    "timeline-input.js",
    "distribution.js",
    "knees.js",
    "tables.js",
    "report.js",
)


def bundle() -> str:
    """All scripts as one strict function body, so that nothing leaks into the page's globals."""
    return '(() => {\n"use strict";\n' + "\n".join(template_text(name) for name in SCRIPTS) + "})();\n"


def content_policy(style: str, script: str) -> str:
    """A Content-Security-Policy under which only this style and this script count, and nothing is fetched."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def html_report(document: Mapping[str, Any]) -> str:
    """The whole report.html for the summary in `document`."""
    summary = Summary.of(document)
    brief = brief_of(summary)
    first, rest = _gate_groups(brief.arms)
    style, script = template_text("report.css"), bundle()
    return (
        environment()
        .get_template("report.html")
        .render(
            policy=content_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(charts.script_json(charts.chart_data(summary))),
            summary=summary,
            brief=brief,
            arms=brief.arms,
            definition=DEFINITION,
            first_gates=first,
            other_gates=rest,
            more_is_better=MORE_IS_BETTER,
            embeds=summary.task == EMBED,
        )
    )


Group = tuple[ArmBrief, str, tuple[Gate, ...]]


def _gate_groups(arms: Sequence[ArmBrief]) -> tuple[list[Group], list[Group]]:
    """Gates as (arm, verdict, gates): the failed ones and those that keep an arm open, and the others."""
    groups = [(arm, verdict, gates) for verdict in ORDER for arm in arms if (gates := arm.of(verdict))]
    first = [group for group in groups if group[1] != "PASS" and group[1] == group[0].gates[0].verdict]
    return first, [group for group in groups if group not in first]
