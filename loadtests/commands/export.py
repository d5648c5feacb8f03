"""`tailgate export`: the records of a run as Parquet, JSON Lines or CSV."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.records.export import export
from analysis.records.schemas import TABLES
from analysis.records.tables import RecordError
from loadtests.commands.command_line import CommandParser
from loadtests.commands.exits import EXIT_BROKE, complain
from loadtests.experiments.config_errors import as_config_error
from servers import stdout


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate export`."""
    parser.describe(
        "Makes a directory that `tailgate analyze` judges as it does the run (not from CSV): each table under its own\n"
        "name, and the small files beside it. Rows go through in batches: memory does not grow with the run.\n"
        "In CSV a list of numbers such as token_ns is one cell with spaces between, a list of texts one cell of JSON.",
        "  tailgate export runs/20260101T120000Z-canary --format parquet\n"
        "  tailgate export runs/20260101T120000Z-canary --format csv --table requests --out canary-csv",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    parser.add_argument("--format", required=True, choices=("parquet", "jsonl", "csv"), help="what to write")
    parser.add_argument("--out", default="", metavar="DIR", help="a new directory (default: RUN_DIR-FORMAT)")
    parser.add_argument(
        "--table",
        default=",".join(TABLES),
        metavar="LIST",
        help="which tables, between commas (default %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Writes the records; the exit code."""
    run_dir = Path(options.run_dir)
    out = (
        Path(options.out) if options.out else run_dir.resolve().with_name(f"{run_dir.resolve().name}-{options.format}")
    )
    tables = [name.strip() for name in options.table.split(",") if name.strip()]
    try:
        with as_config_error(RecordError):
            written = export(run_dir, out, form=options.format, tables=tables)
    except OSError as error:
        return complain(f"{error}: {out} is not whole", EXIT_BROKE)
    for problem in written.problems:
        print(f"tailgate: {problem}", file=sys.stderr)
    counted = ", ".join(f"{name} {rows:,}" for name, rows in written.rows.items())
    outcome = {"out": str(out), "format": options.format, "rows": written.rows, "problems": list(written.problems)}
    stdout.write(f"{out}: {options.format}, rows: {counted or 'none'}", outcome, as_json=options.json)
    return 0
