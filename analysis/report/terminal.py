"""The verdict as a table for the end of `tailgate run`."""

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

from analysis.report import comparing, load, reading
from analysis.report.values import (
    at,
    count,
    first_sentence,
    label,
    milliseconds,
    quantity,
    ratio,
    seconds,
    text,
    verdict,
)

Row = Mapping[str, Any]
STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
MARKS = {"PASS": "✔ PASS", "FAIL": "✘ FAIL", "INCONCLUSIVE": "? INCONCLUSIVE"}


def verdict_table(summary: Row, *, width: int = 100, color: bool | None = None) -> str:
    """Verdict, arms, gates that did not pass and what would decide them, at most `width` columns wide.

    Colours are for a terminal: `color=None` asks whether stdout is one and NO_COLOR is unset. Otherwise the text is
    plain, without escape codes.
    """
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(Text.assemble(_chip(at(summary, "overall")), "  ", (text(at(summary, "name")), "bold")))
    console.print(Text(reading.headline(summary)))
    console.print()
    console.print(_arms(summary))
    for arm in reading.arm_names(summary):
        if (gates := _open(summary, arm)) is not None:
            console.print()
            console.print(Text(text(arm), "bold"))
            console.print(gates)
    if load.knees(summary):
        console.print()
        console.print(_knees(summary))
    notes = [
        ("limited by", f"{reading.check_name(c)}: {text(c.get('reason'))}") for c in reading.failed_checks(summary)
    ]
    notes += [(name.lower(), line) for name, line in load.traffic(summary) if not name.startswith("Started")]
    notes += [("external", f"{text(row.arm)}: {' '.join(row.notes)}") for row in reading.externals(summary)]
    notes += [("to decide", line) for line in reading.deciders(summary)]
    if notes:
        console.print()
    for name, line in notes:
        console.print(Text.assemble((f"{name}: ", "bold"), " ".join(line.split())))
    # Rich pads lines to the full width; a log is easier to read and to compare without that.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _chip(value: object) -> Text:
    judged = verdict(value)
    return Text(MARKS.get(judged, judged), STYLES.get(judged, "dim"))


def _beside(against: float | None) -> str:
    return "" if against is None else f"{ratio(against)}  "


def _arms(summary: Row) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    table.add_column("arm", overflow="fold", min_width=12)
    table.add_column("verdict", no_wrap=True)
    for name in ("p99 TTFT", "p99 E2E", "compiles", "longest", "hit"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in reading.arms_of(summary):
        raw = arm.get("name")
        table.add_row(
            Text(text(raw)),
            Text("control", "dim") if arm.get("control") else _chip(arm.get("verdict")),
            *(
                Text.assemble(
                    (_beside(comparing.ratio_of(summary, raw, metric)), "dim"),
                    milliseconds(at(arm, "metrics", metric, "p99_ms")),
                )
                for metric in ("ttft", "e2e")
            ),
            count(at(arm, "compile", "serving_events")),
            seconds(at(arm, "compile", "longest_stall_s")),
            count(at(arm, "compile", "requests_hit")),
        )
    if not table.row_count:
        table.add_row(Text("no arm sent a record", "dim"), *[""] * 6)
    return table


def _knees(summary: Row) -> Table:
    """What load each arm held."""
    table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1), pad_edge=False)
    table.add_column("load held within the SLO", overflow="fold", min_width=12)
    for name in ("highest held", "lowest missed", "95 % of the knee", "goodput there", "trials"):
        table.add_column(name, justify="right", no_wrap=True)
    for knee in load.knees(summary):
        table.add_row(Text(knee.arm), knee.held, knee.failed, knee.interval, knee.goodput, knee.trials)
    return table


def _open(summary: Row, arm: str) -> Table | None:
    """The gates of one arm that did not pass, or None."""
    table = Table(box=None, expand=False, padding=(0, 1), show_header=False)
    table.add_column("verdict", no_wrap=True)
    table.add_column("gate")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for gate in reading.gates_of(summary, arm):
        if gate.get("verdict") == "PASS":
            continue
        unit = gate.get("unit")
        table.add_row(
            _chip(gate.get("verdict")),
            Text(label(gate.get("gate"))),
            f"{quantity(gate.get('value'), unit)} / {quantity(gate.get('limit'), unit)}",
            Text(first_sentence(gate.get("reason"), 200)),
        )
    return table if table.row_count else None
