"""The report as one HTML file that opens anywhere, fetches nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import ChainableUndefined, Environment, FunctionLoader, select_autoescape
from markupsafe import Markup

from analysis.report import (
    bed,
    charts,
    comparing,
    frontier,
    joined,
    load,
    looks,
    reading,
    server_load,
    stalls,
    values,
)
from analysis.report.resources import memory_events
from analysis.wording import counted

SCRIPTS = (
    "plot.js",
    "timeline.js",
    "timeline-marks.js",
    "timeline-input.js",
    "distribution.js",
    "padding.js",
    "bed.js",
    "server-load.js",
    "forest.js",
    "knees.js",
    "tables.js",
    "report.js",
)
METRIC_COLUMNS = ("n", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms", "max_ms", "mean_ms")
PHASES = (
    ("metrics", "All traffic", "every measured request"),
    ("steady", "Steady", "while nothing compiled"),
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
        *(values.moment, values.first_line, values.with_code, reading.ratio_of_limit, reading.check_name),
    ):
        environment.filters[show.__name__] = show
    environment.filters["counted"] = partial(counted, show=values.count)
    environment.filters["number"] = lambda value: value if values.is_number(value) else ""
    return environment


def html_report(summary: Mapping[str, Any]) -> str:
    """The whole report.html for `summary`."""
    names = reading.arm_names(summary)
    arms = {arm.get("name"): arm for arm in values.rows(summary, "arms")}
    events = values.rows(summary, "events")
    style, script = template_text("report.css"), bundle()
    metric_names = reading.metric_names(summary)
    gates = reading.gate_lists(summary)
    return (
        environment()
        .get_template("report.html")
        .render(
            policy=content_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=Markup(charts.script_json(charts.chart_data(summary))),
            summary=summary,
            headline=reading.headline(summary),
            facts=reading.facts(summary),
            bed=bed.bed_section(summary),
            variation=bed.variation(summary),
            bed_line=reading.bed_line(summary),
            bed_note=reading.bed_note(summary),
            bed_verdict=values.text(values.at(summary, "bed", "verdict")),
            pressure=reading.pressure(summary),
            below_headline=reading.below_headline(summary, gates.shared),
            arms=[{"index": index, "name": name, **_arm(arms.get(name), summary)} for index, name in enumerate(names)],
            gates=gates,
            ratios={
                name: {metric: comparing.ratio_of(summary, name, metric) for metric in metric_names} for name in names
            },
            unknown_stalls=reading.unknown_stalls(summary),
            checks=values.rows(summary, "validity"),
            failed_checks=reading.failed_checks(summary),
            checks_heading=reading.checks_heading(summary),
            is_allowed_for=partial(reading.is_allowed_for, summary),
            events=events,
            # Where each event stands in the table, so that a spike can point at its events.
            event_numbers={values.text(event.get("event_id")): number for number, event in enumerate(events)},
            longest_event=max((s for event in events if values.is_number(s := event.get("seconds"))), default=0.0),
            spikes=values.rows(summary, "spikes"),
            side_by_side=reading.side_by_side(summary),
            memory_events=memory_events(summary),
            grids=comparing.grids(summary),
            rates=comparing.rates(summary),
            frontier={
                "title": frontier.title(summary),
                "answer": frontier.answer(summary),
                "picture": frontier.picture(summary),
                "latencies": frontier.latencies(summary),
                "held": frontier.held(summary),
                "holdings": frontier.holdings(summary),
                "search_notes": frontier.search_notes(summary),
                "pairs": frontier.pairs(summary),
                "costs": frontier.costs(summary),
                "steps": frontier.steps(summary),
                "objective": frontier.objective(summary),
            },
            traffic=load.traffic(summary),
            looks_words=looks.words(summary),
            decisions=looks.decisions(summary),
            ramp_steps=looks.ramp_steps(summary),
            ramp_picture=looks.ramp_picture(summary),
            parity=reading.parity(summary),
            asked=reading.was_asked(summary),
            externals=reading.externals(summary),
            joined_head=joined.head(summary),
            joined_runs=joined.runs(summary),
            joined_ratios=joined.ratios(summary),
            joined_differences=joined.differences(summary),
            causes=stalls.causes(summary),
            stall_counts=stalls.counts(summary),
            stalls=stalls.longest_stalls(summary),
            server_load=server_load.server_load(summary),
            beside=server_load.beside,
            startup=reading.startup_costs(summary),
            shortfalls=reading.shortfalls(summary),
            environment=reading.flattened(values.at(summary, "environment")),
            phases=PHASES,
            columns=METRIC_COLUMNS,
            metric_names=metric_names,
            embeds=reading.embeds(summary),
        )
    )


def _arm(arm: Mapping[str, Any] | None, summary: Mapping[str, Any]) -> dict[str, Any]:
    """An arm's own table; `known` is False for an arm that only gates name."""
    if arm is None:
        return {"known": False}
    own = {key: value for key, value in arm.items() if key not in {"index", "name"}}
    return {"known": True, **own, "verdict": frontier.arm_verdict(summary, arm)}
