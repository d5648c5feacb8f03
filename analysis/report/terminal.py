"""The brief as text for the end of `tailgate run`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.report import frontier
from analysis.report.brief import DEFINITION, ArmBrief, Brief, brief_of
from analysis.summary.model import Summary

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
MARKS = {"PASS": "✔ PASS", "FAIL": "✘ FAIL", "INCONCLUSIVE": "? INCONCLUSIVE"}


def verdict_table(document: Mapping[str, Any], *, width: int = 100) -> str:
    """The verdict, the arms, what keeps gates open, the gates that did not pass and what to do, within `width` columns.

    Colours are for a terminal, where stdout is one and NO_COLOR is unset. Otherwise the text has no escape codes.
    """
    summary = Summary.of(document)
    brief = brief_of(summary)
    console = console_of(width)
    console.print(Text.assemble(chip(brief.verdict) if brief.verdict else brief.title, "  ", (brief.name, "bold")))
    console.print(Text(brief.headline))
    for arm in brief.treatments:
        if arm.leaning:
            console.print(Text(arm.leaning))
    _print_answer(console, brief, summary)
    console.print(_arms(brief.arms))
    if brief.treatments and not brief.answer:
        console.print(Text(DEFINITION, "dim"))
    failed = {arm.name for arm in brief.treatments if arm.verdict == "FAIL"}
    for check in brief.failed_checks:
        if check.reason not in brief.headline and check.row.arm not in failed:
            name = "allowed for" if check.state == "allowed for" else "limited by"
            console.print(noted(name, f"{check.name}: {check.reason}"))
    for arm in brief.treatments:
        _print_gates(console, arm)
    console.print()
    for name, line in (*brief.notes, *_what_to_do(brief)):
        console.print(noted(name.lower(), line))
    return printed_on(console) + "\n"


def frontier_words(document: Mapping[str, Any], *, width: int = 100, gated: bool = False) -> str:
    """The answer of a search, within `width` columns; with the verdicts of its gates where they are asked for."""
    if gated:
        return verdict_table(document, width=width)
    summary = Summary.of(document)
    brief = brief_of(summary)
    console = console_of(width)
    console.print(Text(brief.name, "bold"))
    _print_answer(console, brief, summary)
    for name, line in (*brief.notes, *_what_to_do(brief)):
        console.print(noted(name.lower(), line))
    return printed_on(console) + "\n"


def _what_to_do(brief: Brief) -> list[tuple[str, str]]:
    """(what for, in words) of what to do about what failed, and to decide what is open."""
    return [
        *((f"to fix {arm}", line) for arm, line in brief.remedies),
        *((("to decide", brief.decider),) if brief.decider else ()),
        *((("next", brief.next),) if brief.next else ()),
    ]


def _print_answer(console: Console, brief: Brief, summary: Summary) -> None:
    """Which policy to ship, after a search."""
    if not brief.answer:
        return
    search = summary.open_parts()
    for line in brief.answer:
        console.print(Text(line))
    console.print(_holdings(frontier.holdings(search).rows))
    for line in frontier.search_notes(search):
        console.print(noted("search", line))


def _print_gates(console: Console, arm: ArmBrief) -> None:
    """Gates that failed, each with its sentence; those that are open in one paragraph."""
    failed, undecided = arm.of("FAIL"), arm.of("INCONCLUSIVE")
    if not failed and not undecided:
        return
    console.print()
    console.print(Text(arm.name, "bold"))
    for gate in failed:
        console.print(Text.assemble(chip("FAIL"), f"  {gate.name}: {gate.sentence}"))
    if undecided:
        each = ", ".join(f"{gate.name} {gate.value} / {gate.limit}" for gate in undecided)
        console.print(Text.assemble(chip("INCONCLUSIVE"), f"  {each}"))


def _arms(arms: Sequence[ArmBrief]) -> Table:
    """The figures at a glance, an arm a row."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=len(MARKS["INCONCLUSIVE"]))
    names = list(dict.fromkeys(figure.name for arm in arms for figure in arm.figures))
    for name in names:
        table.add_column(name, justify="right")
    for arm in arms:
        figures = {figure.name: figure for figure in arm.figures}
        judged = Text("control", "dim") if arm.control else chip(arm.verdict)
        table.add_row(
            Text.assemble(arm.name, "\n", judged),
            *(
                Text.assemble(figures[name].value, "\n", (figures[name].note, "dim")) if name in figures else Text("–")
                for name in names
            ),
        )
    if not table.row_count:
        table.add_row(Text("no arm sent a record", "dim"))
    return table


def _holdings(arms: Iterable[Mapping[str, str]]) -> Table:
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
    """A console that keeps what is printed on it, within `width` columns; coloured as `verdict_table` says."""
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


def chip(verdict: object) -> Text:
    """A verdict with its mark, coloured."""
    return Text(MARKS.get(str(verdict), "–"), STYLES.get(str(verdict), "dim"))


def noted(name: str, line: str) -> Text:
    """A line under a name."""
    return Text.assemble((f"{name}: ", "bold"), " ".join(line.split()))
