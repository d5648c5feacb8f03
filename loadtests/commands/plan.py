"""`tailgate plan`: how long a run must be, before it is made."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from analysis.planning import plan_of
from analysis.records.tables import RecordError
from analysis.wording import counted, duration_text
from loadtests.commands.command_line import CommandParser, real, run_directory
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from servers import stdout


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate plan`."""
    parser.describe(
        "For a given margin, from the spread that a pilot run saw, for every gate. All gates pass together with a\n"
        "chance of 80 % where arms are equal. Nothing is run.",
        "  tailgate plan runs/20260101T120000Z-canary --margin 0.1",
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="a pilot: a directory that `tailgate run` wrote")
    add("--margin", type=real(1e-4, 10, "share"), metavar="M", help="accepted rise (default: the pilot's)")
    add("--ratio", type=real(0.01, 100), default=1.0, metavar="R", help="true ratio to plan for (default 1: equal)")


def main(options: argparse.Namespace) -> int:
    """Says how long the run must be; the exit code."""
    with as_config_error(RecordError):
        directory = run_directory(options.run_dir)
        plan = plan_of(directory, margin=options.margin, ratio=options.ratio)
    stdout.write(plan_text(plan), plan, as_json=options.json)
    return 0


def plan_text(plan: Mapping[str, Any]) -> str:
    """The plan for people."""
    goal, source = plan["wanted"], plan["source"]
    lines = [
        f"{source['run_dir']}: {duration_text(source['seconds'])} in {counted(source['trials'], 'trial')}, "
        f"{source['design']}",
        f"goal: margin {100 * goal['margin']:g} %, power {100 * goal['power']:g} %, alpha {goal['alpha']:g}, "
        f"for a true ratio of {goal['ratio']:g}",
        "",
    ]
    table = [["arm", "gate", "seen", "spread", "run length", ""]]
    for row in plan["rows"]:
        spread = "" if row["spread"] is None else f"{row['spread']:.3f}"
        length = "none" if row["needed_s"] is None else duration_text(row["needed_s"])
        table.append([row["arm"], row["what"], _seen(row), spread, length, row["note"]])
    lines += [*aligned(table, left=2), ""]
    lines += list(plan["notes"])
    if plan["needed_s"] is None:
        lines.append(f"No run of up to a week decides {', '.join(plan['out_of_reach'])}.")
    else:
        each = "" if plan["trials"] == 1 else f": {plan['trials']} trials of {duration_text(plan['trial_s'])}"
        lines.append(
            f"Run for {duration_text(plan['needed_s'])} ({plan['needed_s']:,.0f} s){each}. "
            f"Longest: {plan['decided_by']}."
        )
    return "\n".join(lines)


def _seen(row: Mapping[str, Any]) -> str:
    if row["seen"] is None:
        return ""
    return f"{row['seen']:.3f}" if row["spread"] is not None else f"{100 * row['seen']:.3g} %"
