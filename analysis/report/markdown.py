"""The report as Markdown for a pull request: verdict, gates, key numbers, worst compiles, what would decide it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from analysis.report import (
    bed,
    comparing,
    frontier,
    joined,
    load,
    looks,
    reading,
    stalls,
)
from analysis.report.resources import memory_events
from analysis.report.server_load import server_load
from analysis.report.tables import Figure, Table
from analysis.report.values import (
    DASH,
    Row,
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
from analysis.wording import counted

MARKS = {"PASS": "✅ PASS", "FAIL": "❌ FAIL", "INCONCLUSIVE": "❔ INCONCLUSIVE"}
WORST_EVENTS = 10
MOST_CODE = 300  # characters
PUNCTUATION = re.compile(r"([\\`*_\[\]<>|~])")
ZERO_WIDTH_SPACE = "\u200b"


def prose(value: object) -> str:
    """Text that Markdown shows as written: no markup, no HTML, no @mention, on one line."""
    shown = PUNCTUATION.sub(r"\\\1", " ".join(text(value).split()))
    shown = shown.replace("&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
    return shown.replace("@", "@" + ZERO_WIDTH_SPACE).replace("://", ":" + ZERO_WIDTH_SPACE + "//")


def _with_code(line: str) -> str:
    """Prose in which what stands between backticks is a code span."""
    return "".join(code(part) if place % 2 else _spaced(part) for place, part in enumerate(line.split("`")))


def _spaced(part: str) -> str:
    """The part as prose, with the spaces at its ends."""
    before, after = (" " if part[at : at + 1 or None] == " " else "" for at in (0, -1))
    return f"{before}{prose(part)}{after}" if part.strip() else part


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


SHOWN: dict[str, Callable[[str], str]] = {
    "arm": code,
    "words": prose,
    "reason": prose,
    "code": lambda cell: code(cell[:MOST_CODE]),
    "figure": str,
}


def _cells(shared: Table) -> str:
    """A table that all reports share."""
    body = [[SHOWN[shared.kind(head)](cell) for head, cell in row.items()] for row in shared.rows]
    right = [place for place, head in enumerate(shared.heads) if shared.kind(head) == "figure"]
    return table(shared.heads, body, right=right)


def _figures(arms: Iterable[object], figures: Iterable[Figure], *, grouped: bool = True) -> str:
    """Figures side by side, each named with its group, if `grouped`."""
    head = ["", *map(code, arms)]
    named = ((f"{row.group.lower()}: {row.name}" if grouped else row.name, row.values) for row in figures)
    body = [[prose(name), *map(prose, values)] for name, values in named]
    return table(head, body, right=range(1, len(head)))


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def mark(value: object) -> str:
    return MARKS.get(verdict(value), DASH)


def _gates(summary: Row) -> str:
    lists = reading.gate_lists(summary)
    body = [
        [
            code(arm),
            mark(gate.get("verdict")),
            prose(label(gate.get("gate"))),
            quantity(gate.get("value"), gate.get("unit")),
            quantity(gate.get("limit"), gate.get("unit")),
            prose(reason),
        ]
        for arm, gates in lists.arms.items()
        for gate, reason in gates
    ]
    if not body:
        return "No gate was judged."
    shared = [f"- **{prose(whose)}**: {prose(reason)}" for whose, reason in lists.shared]
    head = ("Arm", "Verdict", "Gate", "Value", "Limit", "Reason")
    about = "Non-inferiority leaves out the cold start and what a compile held up; all else is of all traffic."
    return "\n\n".join([*(["\n".join(shared)] if shared else []), table(head, body, right=(3, 4)), about])


def _arms(summary: Row) -> str:
    arms = reading.arms_of(summary)
    if not arms:
        return "No arm sent a record."
    verdicts = tuple("control" if arm.get("control") else mark(frontier.arm_verdict(summary, arm)) for arm in arms)
    figures = [row for row in reading.side_by_side(summary) if row.known]
    key = [Figure(name="verdict", values=verdicts, group=""), *(row for row in figures if row.key)]
    rest = [row for row in figures if not row.key]
    names = [arm.get("name") for arm in arms]
    shown = [_figures(names, key, grouped=False)]
    if rest:
        shown.append(_folded("More figures", _figures(names, rest, grouped=False)))
    return "\n\n".join(shown)


def _startup(summary: Row) -> list[str]:
    figures = [row for row in reading.startup_costs(summary) if row.known]
    if not figures:
        return []
    names = [arm.get("name") for arm in reading.arms_of(summary)]
    parts = ["### Start-up cost", _figures(names, [row for row in figures if row.key], grouped=False)]
    if rest := [row for row in figures if not row.key]:
        parts.append(_folded("More of the start", _figures(names, rest)))
    return parts


def _stalls(summary: Row) -> list[str]:
    """Causes of long requests, and the stalls that clients saw: folded, since the gates say what follows."""
    names = [arm.get("name") for arm in reading.arms_of(summary)]
    parts = [
        _folded(title, _figures(names, figures))
        for title, figures in (
            ("What compiles did to requests", stalls.causes(summary)),
            ("Stalls that clients saw", stalls.counts(summary)),
        )
        if figures
    ]
    return parts + _section("Stalls that no compile event explains", stalls.longest_stalls(summary))


def _joined(summary: Row) -> list[str]:
    runs, ratios = joined.runs(summary), joined.ratios(summary)
    if not runs.rows:
        return []
    accepted = "\n".join(f"- Accepted: {prose(line)}" for line in joined.differences(summary))
    title = "### The runs" if joined.head(summary) else "### The run"
    return [title, _cells(runs), accepted, *_section("Machine by machine", ratios)]


def _section(title: str, shared: Table) -> list[str]:
    return [f"### {title}", _cells(shared)] if shared.rows else []


def _comparisons(summary: Row) -> str:
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
    grids = itertools.groupby(comparing.grids(summary), key=lambda grid: grid.arm)
    shown += [_grids(arm, of_arm) for arm, of_arm in grids]
    return "\n\n".join(shown)


def _grids(arm: str, grids: Iterable[comparing.Grid]) -> str:
    """All ratios of one arm, phase by phase, folded away; those that gate are bold."""
    parts = []
    for grid in grids:
        body = [[name, *map(_cell, cells)] for name, cells in grid.lines]
        parts.append(table((grid.title, *grid.heads), body, right=range(1, 1 + len(grid.heads))))
    return _folded(f"{prose(arm)}: every ratio", "\n\n".join(parts))


def _cell(cell: comparing.Cell) -> str:
    shown = f"**{cell.ratio}**" if cell.gate else cell.ratio
    return shown if cell.limits == DASH else f"{shown} {cell.limits}"


def _events(summary: Row) -> str:
    events = rows(summary, "events")
    if not events:
        return "No compile while serving."
    body = [
        [
            code(event.get("arm")),
            prose(kind_label(event.get("kind"))),
            seconds(event.get("offset_s")),
            seconds(event.get("seconds")),
            code(event.get("shape")),
            text(event.get("requests_hit")),
            code(text(event.get("reason"))[:MOST_CODE]),
        ]
        for event in reading.worst_events(summary, WORST_EVENTS)
    ]
    shown = table(("Arm", "Kind", "At", "Took", "Shape", "Requests hit", "Guard's reason"), body, right=(2, 3, 5))
    if len(events) > WORST_EVENTS:
        shown += f"\n\n{figure(len(events) - WORST_EVENTS)} more in report.html."
    return shown


def _parity(summary: Row) -> list[str]:
    figures = reading.parity(summary)
    names = [arm.get("name") for arm in reading.arms_of(summary)]
    return ["### Do the arms compute the same?", _figures(names, figures)] if figures else []


def _looks(summary: Row) -> list[str]:
    told = [f"**{name}**: {prose(line)}." for name, line in looks.words(summary)]
    if not told:
        return []
    steps, decided = looks.ramp_steps(summary), looks.decisions(summary)
    return [
        "### How the verdict formed",
        *told,
        *([_cells(steps)] if steps.rows else []),
        *([_cells(decided)] if decided.rows else []),
    ]


def _frontier(summary: Row) -> list[str]:
    lines = frontier.answer(summary)
    if not lines:
        return []
    costs, steps = frontier.costs(summary), frontier.step_times(summary)
    turns = "\n".join(f"- {prose(line)}" for line in frontier.step_turns(summary))
    return [
        "### Which policy to ship",
        "\n".join(f"- {prose(line)}" for line in lines),
        _cells(frontier.holdings(summary)),
        *(f"Search: {prose(line)}" for line in frontier.search_notes(summary)),
        _folded("Pairs", _cells(frontier.pairs(summary))),
        *([_folded("GPUs by load", _cells(costs))] if costs.rows else []),
        *([_folded("Step times by batch and length", f"{turns}\n\n{_cells(steps)}")] if steps.rows else []),
    ]


def _search(summary: Row) -> list[str]:
    knees, steps = load.knees(summary), load.steps(summary)
    if not knees.rows:
        return []
    return [
        "### What load each arm holds",
        f"A step is held when it keeps: {prose(load.objectives(summary))}.",
        _cells(knees),
        _folded(counted(len(steps.rows), "step"), _cells(steps)),
    ]


def _traffic(summary: Row) -> list[str]:
    lines = [f"- **{prose(name)}**: {prose(line)}" for name, line in load.traffic(summary)]
    return ["### Traffic", "\n".join(lines)] if lines else []


def _test_bed(summary: Row) -> list[str]:
    """The machines and the reference, folded: the line at the top says what follows from them."""
    section = bed.bed_section(summary)
    if section is None:
        return []
    shown = [(title, shared) for title, _, shared in section.tables if shared.rows]
    parts = ["### Test bed", _cells(section.disturbances) if section.disturbances.rows else ""]
    parts += [_folded(title, _cells(shared)) for title, shared in shown]
    return [*parts, *map(prose, section.notes)]


def _variation(summary: Row) -> list[str]:
    varied = bed.variation(summary)
    if varied is None or not varied.arms:
        return []
    tables = [_figures([arm.get("name") for arm in reading.arms_of(summary)], varied.arms, grouped=False)]
    tables += [_cells(varied.machines)] if varied.machines.rows else []
    return [_folded("From trial to trial", "\n\n".join([prose(varied.lead), *tables]))]


def _externals(summary: Row) -> list[str]:
    lines = [
        f"- {code(row.arm)} ({prose(row.what)}): {prose(' '.join(row.notes))}" for row in reading.externals(summary)
    ]
    return ["### External arms: what was not checked", "\n".join(lines)] if lines else []


def _opened(summary: Row, check: Row) -> str:
    """What the failed check leaves open, in brackets; empty where nothing is."""
    if not check.get("affects") or reading.is_allowed_for(summary, check):
        return ""
    turned = " what it may have turned" if check.get("shift") else ""
    return f" (opens{turned}: {prose(label(check.get('gates') or check.get('affects')))})"


def _checks(summary: Row) -> list[str]:
    failed = reading.failed_checks(summary)
    if not failed:
        return []
    lines = [
        f"- **{prose(reading.check_name(check))}**: {prose(check.get('reason'))}{_opened(summary, check)}"
        for check in failed
    ]
    return [f"### {reading.checks_heading(summary)}", "\n".join(lines)]


def markdown_report(summary: Row) -> str:
    """The whole report.md for `summary`, ending in one newline."""
    facts = " · ".join(
        f"{fact.name.lower()} **{prose(fact.value)}**" + (f" ({prose(fact.note)})" if fact.note else "")
        for fact in reading.facts(summary)
    )
    parts = [
        f"## {frontier.title(summary) or mark(at(summary, 'overall'))} · {prose(at(summary, 'name'))}",
        prose(reading.headline(summary)),
        facts,
        f"**Test bed**: {prose(line)}" if (line := reading.bed_note(summary)) else "",
        *([prose(sentence)] if (sentence := reading.pressure(summary)) else []),
        *_checks(summary),
        "### Gates",
        _gates(summary),
        *_looks(summary),
        *_joined(summary),
        *_externals(summary),
    ]
    if remedies := reading.remedies(summary):
        parts += [
            "### What to do about what failed",
            "\n".join(f"- {code(arm)}: {_with_code(line)}" for arm, line in remedies),
        ]
    if deciders := reading.deciders(summary):
        parts += ["### What would decide the open gates", "\n".join(f"- {_with_code(line)}" for line in deciders)]
    parts += _frontier(summary)
    parts += _search(summary)
    parts += [
        "### Against the control",
        _comparisons(summary),
        *_section("At the same load", comparing.rates(summary)),
        "### Key numbers",
        _arms(summary),
        *_section("Allocations in need", memory_events(summary)),
        *_variation(summary),
        *_test_bed(summary),
        *_traffic(summary),
        *_parity(summary),
        f"### Worst {WORST_EVENTS} compiles while serving" if rows(summary, "events") else "### Compiles while serving",
        _events(summary),
        *_stalls(summary),
        *_section("Load of external arms, by their own account", server_load(summary)),
        *_section("What the compiler could not do", reading.shortfalls(summary)),
        *_startup(summary),
        f"<sub>tailgate · run {code(at(summary, 'run_id'))} · charts and every request's events: report.html</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
