"""GPUs for a load and when an arm pays, from a run: `tailgate breakeven`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.foresight.costs import break_even_rows, break_evens
from analysis.judging.judgement import judge
from analysis.records.plain_values import mapping
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.report.breakeven import RANGES, payoffs
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from loadtests.commands.command_parser import CommandParser
from loadtests.commands.flags import run_directory
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from servers import stdout

SCHEMA = 1


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate breakeven`."""
    parser.describe(
        "From a saturation search: what a replica holds within the SLO, the GPUs for --load, and after how many\n"
        "requests or hours the GPU-seconds that an arm saves have paid for its start, with the interval of the search\n"
        "carried through. A run without a search only shows that what was offered was held.",
        "  tailgate breakeven runs/20260101T120000Z-search --load 200\n"
        "  tailgate breakeven runs/20260101T120000Z-search --load 200 --gpus-per-replica 2 --json",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument(
        "--load", type=float, default=None, metavar="R", help="requests/s in all (default: rollout.load_rps, or any)"
    )
    parser.add_argument(
        "--gpus-per-replica", type=int, default=None, metavar="N", help="(default: rollout.gpus_per_replica, or 1)"
    )


def main(options: argparse.Namespace) -> int:
    """Says when each arm pays; the exit code."""
    directory = run_directory(options.run_dir)
    with as_config_error(RecordError):
        costs = breakeven_of_run(directory, load_rps=options.load, gpus_per_replica=options.gpus_per_replica)
    stdout.write(breakeven_text(costs), costs, as_json=options.json)
    return 0


def breakeven_of_run(directory: Path, *, load_rps: float | None, gpus_per_replica: int | None) -> dict[str, Any]:
    """The break-even of every arm as plain values; what is not given comes from the run's [rollout] table.

    RecordError where there is nothing to weigh.
    """
    run = Run.of(read_run(directory))
    rollout = Rollout.from_table(mapping(run.records.experiment.get("rollout")))
    if load_rps is not None:
        rollout = replace(rollout, load_rps=load_rps)
    if gpus_per_replica is not None:
        rollout = replace(rollout, gpus_per_replica=gpus_per_replica)
    costs = break_even_rows(break_evens(run, judge(run), rollout), rollout)
    return {"schema": SCHEMA, "run_dir": str(directory), **costs}


def breakeven_text(costs: Mapping[str, Any]) -> str:
    """The break-even for people."""
    shown = payoffs({"break_even": costs})
    table = aligned([["", *shown.arms, ""], *([row.name, *row.values, ""] for row in shown.figures)])
    return "\n".join([f"{costs['run_dir']}: {shown.about}", "", *table, "", RANGES, *shown.reasons])
