"""`tailgate plan`: how long a run must be, before it is made."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from analysis.planning import DESIGNS, plan_from_design, plan_from_run
from analysis.records.tables import RecordError
from analysis.settings.slo_targets import merged, parse_slo
from analysis.wording import counted, duration_text
from loadtests.commands.command_line import CommandParser, real, run_directory
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from servers import stdout
from servers.fields import ConfigError


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate plan`."""
    parser.describe(
        "For a given margin: from the spread that a pilot run saw, for every gate, or without a pilot from rate and\n"
        "design. All gates pass together with a chance of 80 % where arms are equal. Nothing is run.",
        "  tailgate plan runs/20260101T120000Z-canary --margin 0.1\n"
        "  tailgate plan --rate 4 --design mirrored --margin 0.1\n"
        "  tailgate plan --rate 4 --design split --slo p99_ttft_ms=500",
    )
    add = parser.add_argument
    add("run_dir", nargs="?", default="", metavar="RUN_DIR", help="a pilot: a directory that `tailgate run` wrote")
    add("--margin", type=real(1e-4, 10, "share"), metavar="M", help="accepted rise (default: the pilot's, or 0.1)")
    add(
        "--ratio",
        type=real(0.01, 100),
        default=1.0,
        metavar="R",
        help="true ratio to plan for; 1 is equal arms (default 1)",
    )
    group = parser.add_argument_group("without a pilot")
    group.add_argument("--rate", type=real(1e-6, 1e6, "rate"), metavar="R", help="requests/s to each arm")
    group.add_argument(
        "--design",
        choices=DESIGNS,
        help="separate: two runs at different times or hosts (default mirrored)",
    )
    group.add_argument("--slo", action="append", metavar="TARGET", help="such as p99_ttft_ms=500")


def main(options: argparse.Namespace) -> int:
    """Says how long the run must be; the exit code."""
    with as_config_error(RecordError):
        plan = _plan(options)
    stdout.write(plan_text(plan), plan, as_json=options.json)
    return 0


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    goal = {"margin": options.margin, "ratio": options.ratio}
    if options.run_dir:
        for flag in ("rate", "design", "slo"):
            if getattr(options, flag) is not None:
                raise ConfigError(
                    f"--{flag} is for a plan without a pilot, but RUN_DIR is given: leave one of them out"
                )
        return plan_from_run(run_directory(options.run_dir), **goal)
    if options.rate is None:
        raise ConfigError("there is neither a pilot nor a rate: give RUN_DIR, or --rate R for requests/s to each arm")
    targets = parse_slo(merged({}, options.slo or []))
    return plan_from_design(rate=options.rate, design=options.design or "mirrored", targets=targets, **goal)


def plan_text(plan: Mapping[str, Any]) -> str:
    """The plan for people."""
    goal, source = plan["wanted"], plan["source"]
    pilot = source["from"] == "pilot"
    about = (
        f"{source['run_dir']}: {duration_text(source['seconds'])} in "
        f"{counted(source['trials'], 'trial')}, {source['design']}"
        if pilot
        else f"{source['design']}, {source['rate']:g} requests/s to each arm"
    )
    lines = [
        about,
        f"goal: margin {100 * goal['margin']:g} %, power {100 * goal['power']:g} %, alpha {goal['alpha']:g}, "
        f"for a true ratio of {goal['ratio']:g}",
        "",
    ]
    head = ["arm"] * pilot + ["gate", *(["seen", "spread"] if pilot else []), "run length"]
    table = [[*head, ""]]
    for row in plan["rows"]:
        cells = [row["arm"]] * pilot + [row["what"]]
        if pilot:
            cells += [_seen(row), "" if row["spread"] is None else f"{row['spread']:.3f}"]
        cells.append(_length(row["needed_s"]))
        table.append([*cells, row["note"]])
    lines += [*aligned(table, left=2 if pilot else 1), ""]
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


def _length(seconds: float | None) -> str:
    return "none" if seconds is None else duration_text(seconds)
