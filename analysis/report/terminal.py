"""The brief as text for the end of `tailgate run`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailgate.analysis.report.brief import Brief, brief_of, limit_of, sentence_of, value_of
from tailgate.analysis.report.values import DASH, count, rate, seconds
from tailgate.analysis.summary.model import Summary

_CHIPS = {
    "PASS": ("✔ PASS", "bold green"),
    "FAIL": ("✘ FAIL", "bold red"),
    "INCONCLUSIVE": ("? INCONCLUSIVE", "bold yellow"),
    "": ("control", "dim"),
}


def verdict_table(document: Mapping[str, Any], *, width: int = 100, experiment: str = "experiment.toml") -> str:
    """Render the verdict, the arms, open and failed gates and what to do, within `width` columns.

    For a search without gates, it renders the answer and what to do. It uses colours and escape codes only if stdout is
    a terminal and NO_COLOR is unset. Commands name the file `experiment`.
    """
    summary = Summary.of(document)
    brief = brief_of(summary)
    coloured = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        no_color=not coloured,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    if brief.verdict:
        console.print(Text.assemble(_CHIPS[brief.verdict], "  ", (brief.name, "bold")))
        console.print(Text(brief.headline))
    else:
        console.print(Text(brief.name, "bold"))
    if brief.answer:
        _print_answer(console, brief, summary)
    if brief.verdict:
        _print_judgement(console, brief)
    notes = [(name.lower(), line) for name, line in brief.notes]
    notes += [(f"to fix {arm}", line) for arm, line in brief.remedies]
    for name, line in (*notes, ("to decide", brief.decider), (f"n{brief.next_name[1:]}", brief.next)):
        if line:
            console.print(_noted(name, line.replace("experiment.toml", experiment)))
    assert isinstance(console.file, io.StringIO)
    # Rich pads lines to the full width; a log is easier to read and to compare without that.
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines()) + "\n"


def next_step(document: Mapping[str, Any], *, experiment: str) -> str:
    """Return the command to run next; empty where there is none. It names the file `experiment`."""
    return brief_of(Summary.of(document)).next.replace("experiment.toml", experiment)


def _print_answer(console: Console, brief: Brief, summary: Summary) -> None:
    """Print which policy to ship, after a search."""
    for line in brief.answer:
        console.print(Text(line))
    table = _table("arm")
    for head in ("surely holds", "as seen", "surely not above", "start", "starts", "steps"):
        table.add_column(head, justify="right")
    for row in summary.frontier.arms if summary.frontier else ():
        loads = map(rate, (row.low_rps, row.seen_rps, row.high_rps))
        table.add_row(Text(row.arm), *loads, seconds(row.start_s), count(row.starts), count(row.steps))
    console.print(table)


def _print_judgement(console: Console, brief: Brief) -> None:
    """Print the arms at a glance, failed checks, each failed gate's sentence, and each arm's open gates."""
    console.print(_arms(brief))
    if brief.treatments and not brief.answer:
        console.print(Text(brief.definition, "dim"))
    failed = {arm.name for arm in brief.treatments if arm.verdict == "FAIL"}
    for check in brief.failed_checks:
        if check.reason not in brief.headline and check.arm not in failed:
            name = "allowed for" if check.allowed else "limited by"
            console.print(_noted(name, f"{check.title}: {check.reason}"))
    for arm in brief.treatments:
        lines = [("FAIL", f"{gate.title}: {sentence_of(gate)}") for gate in arm.of("FAIL")]
        if undecided := arm.of("INCONCLUSIVE"):
            pending = [gate for gate in undecided if not gate.caveat]
            each = (f"{gate.title} ({value_of(gate)}, limit {limit_of(gate)})" for gate in pending)
            lines += [("INCONCLUSIVE", f"not decided: {', '.join(each)}")] if pending else []
            lines += [("INCONCLUSIVE", f"{gate.title}: {gate.reason}") for gate in undecided if gate.caveat]
        if lines:
            console.print("\n", Text(arm.name, "bold"), sep="")
        for verdict, line in lines:
            console.print(Text.assemble(_CHIPS[verdict], f"  {line}"))
    console.print()


def _arms(brief: Brief) -> Table:
    """Return the figures at a glance, an arm a row."""
    table = _table("arm")
    for name in brief.figure_names:
        table.add_column(name, justify="right")
    for arm in brief.arms:
        figures = [arm.figures.get(name, (DASH, "")) for name in brief.figure_names]
        cells = (Text.assemble(value, "\n", (note if value != DASH else "", "dim")) for value, note in figures)
        table.add_row(Text.assemble(arm.name, "\n", _CHIPS[arm.verdict]), *cells)
    if not brief.arms:
        table.add_row(Text("no arm sent a record", "dim"))
    return table


def _table(head: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(head, overflow="fold", min_width=len(_CHIPS["INCONCLUSIVE"][0]))
    return table


def _noted(name: str, line: str) -> Text:
    """Return a line under a name."""
    return Text.assemble((f"{name}: ", "bold"), " ".join(line.split()))
