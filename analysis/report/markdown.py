"""The report as Markdown for a pull request: verdict, gates, key numbers, worst compiles, what would decide it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.report import breakeven, comparing, load, outside, reading
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
    lists = {arm: reading.gate_list(summary, arm) for arm in reading.arm_names(summary)}
    body = [
        [
            code(arm),
            mark(gate.get("verdict")),
            prose(label(gate.get("gate"))),
            quantity(gate.get("value"), gate.get("unit")),
            quantity(gate.get("limit"), gate.get("unit")),
            prose(reason),
        ]
        for arm, found in lists.items()
        for gate, reason in found.rows
    ]
    if not body:
        return "No gate was judged."
    shared = [
        f"- {code(arm)}, {prose(names)}: {prose(reason)}"
        for arm, found in lists.items()
        for names, reason in found.shared
    ]
    head = ("Arm", "Verdict", "Gate", "Value", "Limit", "Reason")
    about = "Non-inferiority leaves out the cold start and what a compile held up; all else is of all traffic."
    return "\n\n".join([*(["\n".join(shared)] if shared else []), table(head, body, right=(3, 4)), about])


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


def _outside(summary: Mapping[str, Any]) -> list[str]:
    """Causes of long requests, and what shows without telemetry: folded, since the gates say what follows."""
    head = ["", *(code(arm.get("name")) for arm in reading.arms_of(summary))]
    parts: list[str] = []
    for title, figures in (
        ("What compiles did to requests", outside.causes(summary)),
        ("Stalls seen from outside", outside.outside(summary)),
    ):
        if figures:
            body = [[f"{row.group.lower()}: {row.name}", *map(prose, row.values)] for row in figures]
            shown = table(head, body, right=range(1, len(head)))
            parts += [f"<details><summary>{title}</summary>\n\n{shown}\n\n</details>"]
    found = outside.stalls(summary)
    if found:
        lines = [
            [code(row.arm), row.trial, row.begin, row.took, prose(row.cause), row.shape, row.requests] for row in found
        ]
        head = ["Arm", "Trial", "At", "Took", "Cause", "First-seen length", "Requests in flight"]
        parts += ["### Stalls of arms without telemetry", table(head, lines, right=(1, 2, 3, 5, 6))]
    return parts


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
            mark(row.get("verdict")) if comparing.gates(row) else "no gate",
            span(row.get("needed_s")),
        ]
        for row in comparing.shown_comparisons(summary)
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
    shown = [table(head, body, right=(3, 4, 5, 7))]
    shown += [_grids(arm, found) for arm, found in itertools.groupby(comparing.grids(summary), key=lambda it: it.arm)]
    return "\n\n".join(shown)


def _grids(arm: str, grids: Iterable[comparing.Grid]) -> str:
    """All ratios of one arm, phase by phase, folded away; those that gate are bold."""
    parts = []
    for grid in grids:
        body = [[name, *map(_cell, cells)] for name, cells in grid.lines]
        parts.append(table((grid.title, *grid.heads), body, right=range(1, 1 + len(grid.heads))))
    told = "\n\n".join(parts)
    return f"<details><summary>{prose(arm)}: every ratio</summary>\n\n{told}\n\n</details>"


def _cell(cell: comparing.Cell) -> str:
    shown = f"**{cell.ratio}**" if cell.gate else cell.ratio
    return shown if cell.limits == DASH else f"{shown} {cell.limits}"


def _rates(summary: Mapping[str, Any]) -> list[str]:
    body = [
        [code(row.arm), row.name, row.value, row.control, row.shares, row.ratio, row.limits, row.least]
        for row in comparing.rates(summary)
    ]
    if not body:
        return []
    head = ("Arm", "Rate", "The arm's", "The control's", "Good requests", "Ratio", "Interval", "At least")
    return ["### At the same load", table(head, body, right=range(2, 8))]


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
    bracket = ("Arm", "Highest held", "Lowest missed", "95 % of the knee", "Goodput there", "Most goodput")
    head = (*bracket, "Over the control's", "Trials")
    body = [
        [code(row.arm), row.held, row.failed, row.interval, row.goodput, row.highest, row.ratio, row.trials]
        for row in found
    ]
    steps = [
        [code(row.arm), row.trial, row.rate, row.requests, row.goodput, row.good, row.held, prose(row.reason)]
        for row in load.steps(summary)
    ]
    under = ("Arm", "Trial", "Rate", "Requests", "Goodput", "Good", "Step", "Why")
    return [
        "### What load each arm holds",
        f"A step is held when it keeps: {prose(load.asked(summary))}.",
        table(head, body, right=range(1, 8)),
        f"<details><summary>{len(steps)} steps</summary>\n\n{table(under, steps, right=range(1, 6))}\n\n</details>",
    ]


def _break_even(summary: Mapping[str, Any]) -> list[str]:
    found = breakeven.payoffs(summary)
    if not found.arms:
        return []
    head = ["", *(code(row.arm) for row in found.arms)]
    body = [[name, *map(prose, values)] for name, *values in found.figures]
    return [
        "### When it pays",
        f"For {prose(found.about)}. {breakeven.RANGES}",
        table(head, body, right=range(1, len(head))),
        "\n".join(f"- {prose(row.reason)}" for row in found.arms),
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
        *_checks(summary),
        "### Gates",
        _gates(summary),
        *_externals(summary),
    ]
    if wanted := reading.deciders(summary):
        parts += ["### What would decide the open gates", "\n".join(f"- {prose(line)}" for line in wanted)]
    parts += _search(summary)
    parts += _break_even(summary)
    parts += [
        "### Against the control",
        _comparisons(summary),
        *_rates(summary),
        "### Key numbers",
        _arms(summary),
        *_traffic(summary),
        *_parity(summary),
        f"### Worst {WORST_EVENTS} compiles while serving" if rows(summary, "events") else "### Compiles while serving",
        _events(summary),
        *_outside(summary),
        *_shortfalls(summary),
        *_startup(summary),
        f"<sub>tailgate · run {code(at(summary, 'run_id'))} · charts and every request's events: report.html</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
