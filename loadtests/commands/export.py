"""`tailgate export`: the records of a run as Parquet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.records.export import export
from analysis.records.tables import RecordError
from loadtests.commands.command_line import CommandParser
from loadtests.commands.exits import EXIT_BROKE, complain
from loadtests.experiments.config_errors import as_config_error
from servers import stdout


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate export`."""
    parser.describe(
        "Makes a directory that `tailgate analyze` judges as it does the run: each table as Parquet, and the small\n"
        "files of the run. Memory holds one table file at a time.",
        "  tailgate export runs/20260101T120000Z-canary",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument("--out", default="", metavar="DIR", help="a new directory (default: RUN_DIR-parquet)")


def main(options: argparse.Namespace) -> int:
    """Writes the records; the exit code."""
    run_dir = Path(options.run_dir)
    out = Path(options.out) if options.out else run_dir.resolve().with_name(f"{run_dir.resolve().name}-parquet")
    try:
        with as_config_error(RecordError):
            written = export(run_dir, out)
    except OSError as error:
        return complain(f"{error}: {out} is not whole", EXIT_BROKE)
    for problem in written.problems:
        print(f"tailgate: {problem}", file=sys.stderr)
    counted = ", ".join(f"{name} {rows:,}" for name, rows in written.rows.items())
    outcome = {"out": str(out), "rows": written.rows, "problems": list(written.problems)}
    stdout.write(f"{out}: rows: {counted or 'none'}", outcome, as_json=options.json)
    return 0
