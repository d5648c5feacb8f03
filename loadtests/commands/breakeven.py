"""GPUs for a load and when an arm pays, from a run: `tailgate breakeven`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analysis.foresight.costs import break_even_rows, break_evens
from analysis.judging.judgement import judge
from analysis.records.plain_values import mapping
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.report.breakeven import RANGES, payoffs
from analysis.run.run import Run
from analysis.settings.rollout import Rollout
from loadtests.commands.command_line import CommandParser, run_directory
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from servers import stdout

SCHEMA = 1


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate breakeven`."""
    parser.describe(
        "From a saturation search: what a replica holds within the SLO, the GPUs for --load, and after how many\n"
        "requests or hours the GPU-seconds that an arm saves have paid for its start, with the interval of the search\n"
        "carried through. A run without a search only shows that what was offered was held. --gpu-hour-price adds\n"
        "what 1,000 requests and a million tokens cost.",
        "  tailgate breakeven runs/20260101T120000Z-search --load 200\n"
        "  tailgate breakeven runs/20260101T120000Z-search --load 200 --gpus-per-replica 2 --json",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument("--load", type=float, metavar="R", help="requests/s in all (default: rollout.load_rps, or any)")
    parser.add_argument("--gpus-per-replica", type=int, metavar="N", help="(default: rollout.gpus_per_replica, or 1)")
    parser.add_argument("--gpu-hour-price", type=float, metavar="P", help="(default: rollout.gpu_hour_price)")
    parser.add_argument("--currency", metavar="NAME", help="of the price (default: rollout.currency, or USD)")


def main(options: argparse.Namespace) -> int:
    """Says when each arm pays; the exit code."""
    directory = run_directory(options.run_dir)
    with as_config_error(RecordError):
        run = Run.of(read_run(directory))
        rollout = Rollout.from_table(mapping(run.records.experiment.get("rollout")))
        given = {
            "load_rps": options.load,
            "gpus_per_replica": options.gpus_per_replica,
            "gpu_hour_price": options.gpu_hour_price,
            "currency": options.currency,
        }
        rollout = replace(rollout, **{name: value for name, value in given.items() if value is not None})
        rows = break_even_rows(break_evens(run, judge(run), rollout), rollout)
    costs = {"schema": SCHEMA, "run_dir": str(directory), **rows}
    stdout.write(breakeven_text(costs), costs, as_json=options.json)
    return 0


def breakeven_text(costs: Mapping[str, Any]) -> str:
    """The break-even for people."""
    shown = payoffs({"break_even": costs})
    table = aligned([["", *shown.arms, ""], *([row.name, *row.values, ""] for row in shown.figures)])
    return "\n".join([f"{costs['run_dir']}: {shown.about}", "", *table, "", RANGES, *shown.reasons])
