"""The report as one HTML file that opens anywhere, fetches nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from markupsafe import Markup
from pydantic_core import to_json

from tailgate.analysis.judging.gates import ORDER
from tailgate.analysis.records.schemas import EVENT_KINDS
from tailgate.analysis.report.brief import MORE_IS_BETTER, brief_of
from tailgate.analysis.report.rendering import environment, template_text
from tailgate.analysis.settings.metrics import EMBED
from tailgate.analysis.summary.model import Bins, Histogram, Summary

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
    """Join all scripts into one strict function body, so that nothing leaks into the page's globals."""
    return '(() => {\n"use strict";\n' + "\n".join(template_text(name) for name in SCRIPTS) + "})();\n"


def content_policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows only this style and this script, and no fetch."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def html_report(document: Mapping[str, Any]) -> str:
    """Render report.html for the summary in `document`."""
    summary = Summary.of(document)
    brief = brief_of(summary)
    groups = [(arm, verdict, gates) for verdict in ORDER for arm in brief.arms if (gates := arm.of(verdict))]
    # Failed gates, and those that keep an arm open.
    first = [group for group in groups if group[1] != "PASS" and group[1] == group[0].gates[0].verdict]
    style, script = template_text("report.css"), bundle()
    return (
        environment()
        .get_template("report.html")
        .render(
            policy=content_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(script_json(chart_data(summary))),
            summary=summary,
            brief=brief,
            trials=summary.design.trial_names,
            arms=brief.arms,
            first_gates=first,
            other_gates=[group for group in groups if group not in first],
            more_is_better=MORE_IS_BETTER,
            embeds=summary.task == EMBED,
        )
    )


def chart_data(summary: Summary) -> dict[str, Any]:
    """Return what the scripts need: arms by index, columns of the time series, events, distributions."""
    names = [arm.name for arm in summary.arms]
    index = {name: position for position, name in enumerate(names)}
    places = {"trial", "offset_s", "seconds"}
    return {
        "arms": [{"name": name} for name in names],
        "kinds": EVENT_KINDS,
        "trials": summary.design.trial_names,
        "metrics": summary.metric_names,
        "bin_s": summary.series.bin_s,
        "block_s": summary.design.block_s,
        "duration_s": summary.design.duration_s,
        "series": [summary.series.arms.get(name, Bins()) for name in names],
        "events": [
            {"arm": index.get(event.arm), **event.model_dump(include={*places, "kind", "shape", "requests_hit"})}
            for event in summary.events
        ],
        "spikes": [
            {"arm": index.get(spike.arm), **spike.model_dump(include={*places, "cause", "explained_pct"})}
            for spike in summary.spikes
            if spike.offset_s is not None
        ],
        "stalls": [
            {"arm": index[arm.name], **stall.model_dump(include=places)}
            for arm in summary.arms
            for stall in arm.client_stalls.unexplained
        ],
        # The SLO line of a chart, by quantile and metric: {"p99_ttft_ms": 2000.0}.
        "limits": {gate.gate.removeprefix("slo "): gate.limit for gate in summary.gates if gate.kind == "slo"},
        "distribution": {
            metric: [arms.get(name, Histogram()) for name in names] for metric, arms in summary.distribution.items()
        },
        "knees": {}  # the latency of each arm against load
        if (search := summary.frontier) is None or not search.latency
        else {
            "label": search.latency,
            "limit_ms": search.limit_ms,
            "steps": [asdict(row) | {"arm": index.get(row.arm)} for row in search.steps if row.ms is not None],
        },
    }


def script_json(data: object) -> str:
    """Encode JSON for a script element: "</script" and "<!--" cannot occur in it."""
    return re.sub("[<>&]", lambda mark: f"\\u{ord(mark[0]):04x}", to_json(data, inf_nan_mode="null").decode())
