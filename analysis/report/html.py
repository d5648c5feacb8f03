"""The report as one HTML file that opens anywhere, fetches nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import ChainableUndefined, Environment, FunctionLoader, select_autoescape
from markupsafe import Markup

from analysis.report import (
    charts,
    comparing,
    conditions,
    frontier,
    interim,
    joined,
    machines,
    server_load,
    stalls,
    values,
)
from analysis.report.arms import (
    arm_names,
    metric_names,
    shortfalls,
    side_by_side,
    startup_costs,
)
from analysis.report.brief import DEFINITION, ORDER, GateLine, brief_of
from analysis.settings.metrics import EMBED
from analysis.summary.model import Summary
from analysis.wording import counted

SCRIPTS = (
    "plot.js",
    "timeline.js",
    "timeline-marks.js",
    "timeline-input.js",
    "distribution.js",
    "machines.js",
    "knees.js",
    "tables.js",
    "report.js",
)
COLUMNS = (
    *(("n", "n"), ("p50_ms", "p50"), ("p90_ms", "p90"), ("p95_ms", "p95"), ("p99_ms", "p99"), ("p99_9_ms", "p99.9")),
    *(("max_ms", "max"), ("mean_ms", "mean")),
)
PHASES = (
    ("metrics", "All traffic", "every measured request"),
    ("steady", "Steady", "without the cold start and what compiles delayed"),
    ("cold", "Cold", "first traffic after ready"),
)


def template_text(name: str) -> str:
    """A file of the templates folder, also when the package is not unpacked."""
    return files("analysis.report").joinpath("templates", name).read_text(encoding="utf-8")


def bundle() -> str:
    """All scripts as one strict function body, so that nothing leaks into the page's globals."""
    return '(() => {\n"use strict";\n' + "\n".join(template_text(name) for name in SCRIPTS) + "})();\n"


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def content_policy(style: str, script: str) -> str:
    """A Content-Security-Policy under which only this style and this script count, and nothing is fetched."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def environment() -> Environment:
    """Templates of the folder, each compiled once a process, with what shows a value as filters."""
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for show in (
        *(values.text, values.count, values.milliseconds, values.column_ms, values.seconds, values.percent),
        *(values.ratio, values.quantity, values.label, values.metric_label, values.kind_label, values.verdict),
        *(values.moment, values.first_line, values.with_code),
    ):
        environment.filters[show.__name__] = show
    environment.filters["counted"] = partial(counted, show=values.count)
    environment.filters["number"] = lambda value: value if values.is_number(value) else ""
    return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class GateGroups:
    """Gates as (arm, verdict, gates): `first` has the failed ones and those that keep an arm open; `rest` is folded."""

    first: list[tuple[Any, str, tuple[GateLine, ...]]]
    rest: list[tuple[Any, str, tuple[GateLine, ...]]]

    @property
    def words(self) -> str:
        """What `rest` holds."""
        passed, undecided = (
            sum(len(gates) for _, verdict, gates in self.rest if verdict == wanted)
            for wanted in ("PASS", "INCONCLUSIVE")
        )
        more = f", {counted(undecided, 'open gate')} of arms that failed" if undecided else ""
        return f"{counted(passed, 'gate')} passed{more}"


def gate_groups(arms: Sequence[Mapping[str, Any]]) -> GateGroups:
    """The gates of `arms` in the order in which the page shows them."""
    groups = [(arm, verdict, arm["brief"].of(verdict)) for verdict in ORDER for arm in arms]
    known = [group for group in groups if group[2]]
    first = [
        (arm, verdict, gates)
        for arm, verdict, gates in known
        if verdict == "FAIL" or (verdict == "INCONCLUSIVE" and not arm["brief"].of("FAIL"))
    ]
    return GateGroups(first=first, rest=[group for group in known if group not in first])


def html_report(document: Mapping[str, Any]) -> str:
    """The whole report.html for the summary in `document`."""
    summary = Summary.of(document)
    brief, search = brief_of(summary), summary.open_parts()
    rows = {arm.name: arm for arm in summary.arms}
    arms = [
        {"index": index, "name": name, "row": rows.get(name), "brief": own}
        for index, (name, own) in enumerate(zip(arm_names(summary), brief.arms, strict=True))
    ]
    data = charts.chart_data(summary)
    style, script = template_text("report.css"), bundle()
    return (
        environment()
        .get_template("report.html")
        .render(
            policy=content_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(charts.script_json(data)),
            summary=summary,
            brief=brief,
            definition=DEFINITION,
            arms=arms,
            known=[arm for arm in arms if arm["row"]],
            gates=gate_groups(arms),
            remedies=[*brief.remedies, *([("To decide what is open", brief.decider)] if brief.decider else [])],
            drawn_timeline=any(columns["t_s"] for columns in data["series"]),
            drawn_distribution=any(data["distribution"].values()),
            # Where each event is in the table, so that a spike can point at its events.
            event_numbers={event.event_id: number for number, event in enumerate(summary.events)},
            longest_event=max((event.seconds for event in summary.events), default=0.0),
            meanwhile=server_load.meanwhile,
            side_by_side=side_by_side(summary),
            startup=startup_costs(summary),
            shortfalls=shortfalls(summary),
            externals=conditions.externals(summary),
            conditions=[
                *conditions.facts(summary),
                *conditions.flattened(summary.traffic, "traffic."),
                *conditions.flattened(summary.environment),
            ],
            grids=comparing.grids(summary),
            phases=PHASES,
            columns=COLUMNS,
            metric_names=metric_names(summary),
            embeds=summary.task == EMBED,
            causes=stalls.causes(summary),
            stall_counts=stalls.counts(summary),
            stalls=stalls.longest_stalls(summary),
            frontier={
                "answer": frontier.answer(search),
                "latencies": frontier.latencies(search),
                "holdings": frontier.holdings(search),
                "search_notes": frontier.search_notes(search),
                "pairs": frontier.pairs(search),
                "steps": frontier.steps(search),
                "objective": frontier.objective(search),
            },
            interim_words=interim.words(summary),
            ramp_steps=interim.ramp_steps(summary),
            joined_head=joined.head(summary),
            joined_runs=joined.runs(summary),
            joined_differences=joined.differences(summary),
            machines=machines.machine_section(summary.machines),
            server_load=server_load.server_load(summary),
        )
    )
