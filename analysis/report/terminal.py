"""The verdict as a table for the end of `tailgate run`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from analysis.report import comparing, frontier, joined, load, looks, reading
from analysis.report.values import (
    DASH,
    Row,
    at,
    count,
    first_sentence,
    label,
    metric_label,
    milliseconds,
    quantity,
    ratio,
    seconds,
    text,
    verdict,
)

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
WIDE = 96  # columns from which the arms' figures have room beside each other
MARKS = {"PASS": "✔ PASS", "FAIL": "✘ FAIL", "INCONCLUSIVE": "? INCONCLUSIVE"}


def verdict_table(summary: Row, *, width: int = 100) -> str:
    """Verdict, arms, what limits the run, gates that did not pass and what would decide them, within `width` columns.

    Colours are for a terminal, where stdout is one and NO_COLOR is unset. Otherwise the text is plain, without escape
    codes.
    """
    console = console_of(width)
    console.print(Text.assemble(chip(at(summary, "overall")), "  ", (text(at(summary, "name")), "bold")))
    console.print(Text(reading.headline(summary)))
    for name, line in _conditions(summary):
        console.print(noted(name, line))
    console.print(_arms(summary, narrow=width < WIDE))
    if any((at(arm, "compile", "requests_hit") or 0) > 0 for arm in reading.arms_of(summary)):
        console.print(noted("figures", "of all traffic; non-inferiority leaves out what a compile held up"))
    for check in reading.failed_checks(summary):
        if (reason := text(check.get("reason"))) not in reading.headline(summary):
            name = "allowed for" if reading.is_allowed_for(summary, check) else "limited by"
            console.print(noted(name, f"{reading.check_name(check)}: {reason}"))
    lists = reading.gate_lists(summary)
    for whose, reason in lists.shared:
        console.print(noted(whose, reason))
    for arm, gates in lists.arms.items():
        if lines := _open(gates, width):
            console.print()
            console.print(Text(text(arm), "bold"))
            console.print(Group(*lines))
    if ship := frontier.answer(summary):
        console.print()
        console.print(noted("which to ship", ship[0]))
        for line in ship[1:]:
            console.print(Text(line))
        console.print(_holdings(frontier.holdings(summary).rows))
        for line in frontier.search_notes(summary):
            console.print(noted("search", line))
    if knees := load.knees(summary).rows:
        console.print()
        console.print(_knees(knees))
    for name, line in looks.words(summary):
        console.print(noted(name.lower(), line))
    notes = [(name.lower(), line) for name, line in load.traffic(summary) if not name.startswith("Started")]
    notes += [("external", f"{text(row.arm)}: {' '.join(row.notes)}") for row in reading.externals(summary)]
    notes += _advice(summary)
    if notes:
        console.print()
    for name, line in notes:
        console.print(noted(name, line))
    return printed_on(console) + "\n"


def frontier_words(summary: Row, *, width: int = 100, gated: bool = False) -> str:
    """The answer of a search for people, within `width` columns; with the verdicts of the gates where they are asked
    for."""
    if gated:
        return verdict_table(summary, width=width)
    console = console_of(width)
    console.print(Text(text(at(summary, "name")), "bold"))
    for line in frontier.answer(summary):
        console.print(Text(line))
    console.print(_holdings(frontier.holdings(summary).rows))
    notes = [("search", line) for line in frontier.search_notes(summary)]
    for name, line in (*notes, *_conditions(summary), *_advice(summary)):
        console.print(noted(name, line))
    return printed_on(console) + "\n"


def _conditions(summary: Row) -> list[tuple[str, str]]:
    """(what, in words) of that under which the verdict was found: what was run and where, what weighed on the machines
    on purpose, what disturbed them, which runs are judged as one."""
    facts = [
        f"{fact.name.lower()} {fact.value}" + (f" ({fact.note})" if fact.note else "")
        for fact in reading.facts(summary)
        if fact.name != "Joined"
    ]
    lines = (
        ("run", " · ".join(facts)),
        ("under pressure", reading.pressure(summary).removeprefix("Under pressure: ")),
        ("test bed", reading.bed_note(summary)),
        ("judged together", " · ".join(filter(None, (joined.head(summary), joined.accepted(summary))))),
    )
    return [(name, line) for name, line in lines if line]


def _advice(summary: Row) -> list[tuple[str, str]]:
    """(what for, in words) of what to do: about what failed, and to decide what is open."""
    return [
        *((f"to mend {arm}", line) for arm, line in reading.remedies(summary)),
        *(("to decide", line) for line in reading.deciders(summary)),
    ]


def _holdings(arms: Sequence[Mapping[str, str]]) -> Table:
    """What each arm holds, and what it costs to start."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=12)
    heads = {"Surely holds": "holds", "As seen": "seen", "Surely not above": "not above"}
    heads |= {"Start": "start", "Starts": "starts", "Steps": "steps"}
    for head in heads.values():
        table.add_column(head, justify="right", no_wrap=True)
    for arm in arms:
        table.add_row(Text(arm["Arm"]), *(arm[head] for head in heads))
    return table


def console_of(width: int) -> Console:
    """What is printed on it is kept, within `width` columns; coloured as `verdict_table` says."""
    color = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def printed_on(console: Console) -> str:
    """What was printed on a console of `console_of`, without a last line break."""
    assert isinstance(console.file, io.StringIO)
    # Rich pads lines to the full width; a log is easier to read and to compare without that.
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def chip(value: object) -> Text:
    """A verdict with its mark, coloured."""
    judged = verdict(value)
    return Text(MARKS.get(judged, judged), STYLES.get(judged, "dim"))


def noted(name: str, line: str) -> Text:
    """A line under a name."""
    return Text.assemble((f"{name}: ", "bold"), " ".join(line.split()))


def _arms(summary: Row, *, narrow: bool) -> Table:
    """Key figures, an arm a row; where it is narrow, its verdict stands below its name and a ratio below its figure."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=len(MARKS["INCONCLUSIVE"]))
    if not narrow:
        table.add_column("verdict", no_wrap=True)
    # The latencies of a search are those of overload: what each arm holds stands in a table of its own.
    judged_by = () if frontier.held(summary) else reading.metric_names(summary)
    metrics = [metric for metric in ("ttft", "e2e") if metric in judged_by]
    for name in (*(metric_label(metric, 0.99) for metric in metrics), "compiles", "longest", "hit"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in reading.arms_of(summary):
        raw = arm.get("name")
        judged = Text("control", "dim") if arm.get("control") else chip(arm.get("verdict"))
        table.add_row(
            *([Text.assemble(text(raw), "\n", judged)] if narrow else [Text(text(raw)), judged]),
            *(
                _p99(
                    milliseconds(at(arm, "metrics", metric, "p99_ms")),
                    comparing.ratio_of(summary, raw, metric),
                    narrow=narrow,
                )
                for metric in metrics
            ),
            count(at(arm, "compile", "serving_events")),
            seconds(at(arm, "compile", "longest_stall_s")),
            count(at(arm, "compile", "requests_hit")),
        )
    if not table.row_count:
        table.add_row(Text("no arm sent a record", "dim"))
    return table


def _p99(value: str, against: float | None, *, narrow: bool) -> Text:
    if against is None:
        return Text(value)
    return (
        Text.assemble(value, "\n", (ratio(against), "dim"))
        if narrow
        else Text.assemble((f"{ratio(against)}  ", "dim"), value)
    )


def _knees(knees: Sequence[Mapping[str, str]]) -> Table:
    """What load each arm held."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    table.add_column("load held within the SLO", overflow="fold", min_width=12)
    heads = ("Highest held", "Lowest missed", "95 % of the knee", "Goodput there", "Trials")
    for head in heads:
        table.add_column(head.lower(), justify="right", no_wrap=True)
    for knee in knees:
        table.add_row(Text(knee["Arm"]), *(knee[head] for head in heads))
    return table


def _open(gates: Iterable[tuple[Row, str]], width: int) -> list[Text | Padding]:
    """The gates of one arm that did not pass, each with its reason below it; empty where all passed."""
    lines: list[Text | Padding] = []
    for gate, reason in gates:
        if gate.get("verdict") == "PASS":
            continue
        unit = gate.get("unit")
        against = f"{quantity(gate.get('value'), unit)} / {quantity(gate.get('limit'), unit)}"
        lines.append(Text.assemble(chip(gate.get("verdict")), f"  {label(gate.get('gate'))}  ", (against, "dim")))
        if reason not in (reading.SHARED, DASH):
            lines.append(Padding(Text(first_sentence(reason, 2 * width)), (0, 0, 0, 4)))
    return lines
