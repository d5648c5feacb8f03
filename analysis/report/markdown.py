"""The report as Markdown for a pull request: verdict, gates, key numbers, worst compiles, what would decide it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.report import load, reading
from analysis.report.values import (
    DASH,
    at,
    figure,
    interval,
    is_number,
    kind_label,
    label,
    metric_label,
    phase_label,
    quantity,
    ratio,
    rows,
    seconds,
    span,
    text,
    verdict,
)

MARKS = {"PASS": "✅ PASS", "FAIL": "❌ FAIL", "INCONCLUSIVE": "❔ INCONCLUSIVE"}
WORST_EVENTS = 10
PUNCTUATION = re.compile(r"([\\`*_\[\]<>|~])")
ZERO_WIDTH_SPACE = "\u200b"


def prose(value: object) -> str:
    """Text that Markdown shows as written: no markup, no HTML, no @mention, on one line."""
    shown = PUNCTUATION.sub(r"\\\1", " ".join(text(value).split()))
    shown = shown.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
    return shown.replace("@", "@" + ZERO_WIDTH_SPACE).replace("://", ":" + ZERO_WIDTH_SPACE + "//")


def code(value: object) -> str:
    """Text as a code span that fits in a table cell: nothing in it is markup; an en dash for nothing."""
    shown = " ".join(text(value).split())
    if shown == DASH:
        return DASH
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    # In a table a pipe ends the cell even inside code; a backslash hides it, unless another one hides the backslash.
    shown = re.sub(r"\\+(?=\|)", r"\g<0> ", shown).replace("|", "\\|")
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def table(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A pipe table; the columns in `right` are aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def mark(value: object) -> str:
    return MARKS.get(verdict(value), DASH)


def _gates(summary: Mapping[str, Any]) -> str:
    body = [
        [
            code(arm),
            mark(gate.get("verdict")),
            prose(label(gate.get("gate"))),
            quantity(gate.get("value"), gate.get("unit")),
            quantity(gate.get("limit"), gate.get("unit")),
            prose(gate.get("reason")),
        ]
        for arm in reading.arm_names(summary)
        for gate in reading.gates_of(summary, arm)
    ]
    if not body:
        return "No gate was judged."
    return table(("Arm", "Verdict", "Gate", "Value", "Limit", "Reason"), body, right=(3, 4))


def _arms(summary: Mapping[str, Any]) -> str:
    arms = reading.arms_of(summary)
    if not arms:
        return "No arm sent a record."
    head = ["", *(code(arm.get("name")) for arm in arms)]
    right = range(1, len(head))
    verdicts = ["verdict", *("control" if arm.get("control") else mark(arm.get("verdict")) for arm in arms)]
    figures = [row for row in reading.side_by_side(summary) if any(value != DASH for value in row.values)]
    key = [[row.name, *row.values] for row in figures if row.key]
    rest = [[row.name, *row.values] for row in figures if not row.key]
    shown = table(head, [verdicts, *key], right=right)
    if rest:
        shown += f"\n\n<details><summary>More figures</summary>\n\n{table(head, rest, right=right)}\n\n</details>"
    return shown


def _startup(summary: Mapping[str, Any]) -> list[str]:
    arms = reading.arms_of(summary)
    figures = [row for row in reading.startup_costs(summary) if any(value != DASH for value in row.values)]
    if not figures:
        return []
    head = ["", *(code(arm.get("name")) for arm in arms)]
    right = range(1, len(head))
    key = [[row.name, *map(prose, row.values)] for row in figures if row.key]
    rest = [[f"{row.group.lower()}: {row.name}", *map(prose, row.values)] for row in figures if not row.key]
    shown = table(head, key, right=right)
    if rest:
        shown += f"\n\n<details><summary>More of the start</summary>\n\n{table(head, rest, right=right)}\n\n</details>"
    return ["### Start-up cost", shown]


def _shortfalls(summary: Mapping[str, Any]) -> list[str]:
    body = [[code(row.arm), row.what, figure(row.times), code(row.cause[:300])] for row in reading.shortfalls(summary)]
    if not body:
        return []
    head = ("Arm", "What", "Times", "Where and why")
    return ["### What the compiler could not do", table(head, body, right=(2,))]


def _comparisons(summary: Mapping[str, Any]) -> str:
    body = [
        [
            code(row.get("arm")),
            metric_label(row.get("metric"), row.get("quantile")),
            prose(phase_label(row.get("phase"))),
            ratio(row.get("ratio")),
            interval(row.get("low"), row.get("high")),
            ratio(1 + row["margin"]) if is_number(row.get("margin")) else DASH,
            mark(row.get("verdict")),
            span(row.get("needed_s")),
        ]
        for row in reading.comparisons(summary)
    ]
    if not body:
        return "No arm was compared with the control."
    control = code(at(summary, "control"))
    head = (
        "Arm",
        "Metric",
        "Traffic",
        f"Ratio to {control}",
        "Interval",
        "Allowed",
        "Verdict",
        "Run length that decides",
    )
    return table(head, body, right=(3, 4, 5, 7))


def _events(summary: Mapping[str, Any]) -> str:
    events = rows(summary, "events")
    if not events:
        return "No compile while serving."
    body = [
        [
            code(event.get("arm")),
            prose(kind_label(event.get("kind"))),
            seconds(event.get("offset_s")),
            seconds(reading.event_seconds(event)),
            code(event.get("shape")),
            text(reading.event_hits(event)),
            code(text(event.get("reason"))[:300]),
        ]
        for event in reading.worst_events(summary, WORST_EVENTS)
    ]
    shown = table(("Arm", "Kind", "At", "Took", "Shape", "Requests hit", "Guard's reason"), body, right=(2, 3, 5))
    if len(events) > WORST_EVENTS:
        shown += f"\n\n{figure(len(events) - WORST_EVENTS)} more in report.html."
    return shown


def _parity(summary: Mapping[str, Any]) -> list[str]:
    figures = reading.parity(summary)
    if not figures:
        return []
    head = ["", *(code(arm.get("name")) for arm in reading.arms_of(summary))]
    body = [[f"{row.name} ({row.group.lower()})", *row.values] for row in figures]
    return ["### Do the arms compute the same?", table(head, body, right=range(1, len(head)))]


def _search(summary: Mapping[str, Any]) -> list[str]:
    found = load.knees(summary)
    if not found:
        return []
    head = ("Arm", "Highest held", "Lowest missed", "95 % of the knee", "Goodput there", "Most goodput", "Trials")
    body = [[code(row.arm), row.held, row.failed, row.interval, row.goodput, row.highest, row.trials] for row in found]
    steps = [
        [code(row.arm), row.trial, row.rate, row.requests, row.goodput, row.good, row.held, prose(row.reason)]
        for row in load.steps(summary)
    ]
    under = ("Arm", "Trial", "Rate", "Requests", "Goodput", "Good", "Step", "Why")
    return [
        "### What load each arm holds",
        f"A step is held when it keeps: {prose(load.asked(summary))}.",
        table(head, body, right=range(1, 7)),
        f"<details><summary>{len(steps)} steps</summary>\n\n{table(under, steps, right=range(1, 6))}\n\n</details>",
    ]


def _traffic(summary: Mapping[str, Any]) -> list[str]:
    lines = [f"- **{prose(name)}**: {prose(line)}" for name, line in load.traffic(summary)]
    return ["### Traffic", "\n".join(lines)] if lines else []


def _externals(summary: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {code(row.arm)} ({prose(row.what)}): {prose(' '.join(row.notes))}" for row in reading.externals(summary)
    ]
    return ["### External arms: what was not checked", "\n".join(lines)] if lines else []


def _checks(summary: Mapping[str, Any]) -> list[str]:
    failed = reading.failed_checks(summary)
    if not failed:
        return []
    lines = [
        f"- **{prose(reading.check_name(check))}**: {prose(check.get('reason'))}"
        + (f" (opens: {prose(label(check.get('affects')))})" if check.get("affects") else "")
        for check in failed
    ]
    return ["### What limits this run", "\n".join(lines)]


def markdown_report(summary: Mapping[str, Any]) -> str:
    """The whole report.md for `summary`, ending in one newline."""
    facts = " · ".join(
        f"{fact.name.lower()} **{prose(fact.value)}**" + (f" ({prose(fact.note)})" if fact.note else "")
        for fact in reading.facts(summary)
        if fact.value != DASH
    )
    parts = [
        f"## {mark(at(summary, 'overall'))} · {prose(at(summary, 'name'))}",
        prose(reading.headline(summary)),
        facts,
        "### Gates",
        _gates(summary),
        *_checks(summary),
        *_externals(summary),
    ]
    if wanted := reading.deciders(summary):
        parts += ["### What would decide the open gates", "\n".join(f"- {prose(line)}" for line in wanted)]
    parts += _search(summary)
    parts += [
        "### Against the control",
        _comparisons(summary),
        "### Key numbers",
        _arms(summary),
        *_traffic(summary),
        *_parity(summary),
        f"### Worst {WORST_EVENTS} compiles while serving" if rows(summary, "events") else "### Compiles while serving",
        _events(summary),
        *_shortfalls(summary),
        *_startup(summary),
        f"<sub>tailgate · run {code(at(summary, 'run_id'))} · charts and every request's events: report.html</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
