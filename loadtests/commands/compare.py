"""`tailgate compare`: two runs over time, last week's release and this one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.compare.compared_run import read_compared
from analysis.compare.comparison import arms_to_compare, chosen_arms, compare_runs
from analysis.records.tables import RecordError
from analysis.report.compare import compare_table, write_compare_reports
from analysis.settings.compare_limits import CompareLimits
from loadtests.commands.command_line import CommandParser
from loadtests.commands.exits import EXIT_USAGE, complain
from loadtests.experiments.toml_limits import parse_toml, read_toml, table_of
from loadtests.trials.preflight import check_makeable
from servers import stdout
from servers.fields import ConfigError
from servers.security import check_named


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate compare`."""
    parser.describe(
        "Compares each arm that both runs have: latency, goodput, compiles, start-up and memory. The runs\n"
        "need share neither schedule nor machine nor day: the unit is the trial, and the limits allow for the\n"
        "variation over trials and days. A change of the machine's own speed, as the references of the runs show it,\n"
        "makes what it may explain INCONCLUSIVE. Runs that differ in traffic, model or objectives are refused; other\n"
        "differences are listed.\n\n"
        "BASELINE and CANDIDATE are run directories, or result files of another tool; FILE#2 is the second result of\n"
        "a file that holds several. Writes compare.html, compare.md, compare.xml and compare.json into the run\n"
        "directory of the candidate.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable or not comparable.",
        "  tailgate compare runs/20260101T120000Z-canary runs/20260108T120000Z-canary\n"
        "  tailgate compare runs/baseline runs/20260108T120000Z-canary --arm buckets --limits limits.toml\n"
        "  tailgate compare runs/a runs/b --arm compiled-padded=compiled-bucketed --json | jq .figures",
        json_help="print compare.json on one line instead of the table",
    )
    parser.add_argument("baseline", metavar="BASELINE", help="the earlier run")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run that is judged")
    parser.add_argument(
        "--arm",
        dest="arms",
        action="append",
        default=[],
        metavar="NAME",
        help="compares this arm; as BASELINE=CANDIDATE arms of different names; may be repeated",
    )
    parser.add_argument("--limits", metavar="FILE", help="a TOML file with a [compare] table")
    parser.add_argument("--out", metavar="DIR", help="where the reports go (default: the candidate's run directory)")


def main(options: argparse.Namespace) -> int:
    """Compares the runs; the exit code."""
    for name, path in (("BASELINE", options.baseline), ("CANDIDATE", options.candidate)):
        if not path:
            raise ConfigError(f"{name} is empty: give a run directory")
    check_named({"--limits": options.limits, "--out": options.out})
    given = Path(options.candidate)
    out = Path(options.out) if options.out else given if given.is_dir() else None
    if out is not None:
        check_makeable(out)  # before the minutes that reading may take
    limits = read_limits(Path(options.limits)) if options.limits else CompareLimits()
    try:
        chosen_arms(options.arms)
        baseline, candidate = read_compared(Path(options.baseline)), read_compared(given)
        arms = arms_to_compare(baseline, candidate, options.arms)
        document = compare_runs(baseline, candidate, arms=arms, limits=limits)
    except RecordError as error:
        return complain(str(error), EXIT_USAGE)
    except OSError as error:
        return complain(f"{error}: give runs that can be read", EXIT_USAGE)
    try:
        report = write_compare_reports(document, out) if out is not None else None
    except OSError as error:
        return complain(f"{error}: give a folder that can be written as --out", EXIT_USAGE)
    return _show(document, report, as_json=options.json)


def _show(document: Mapping[str, Any], report: Path | None, *, as_json: bool) -> int:
    code = int(document["exit_code"])
    if as_json:
        stdout.write("", document, as_json=True)
        return code
    words = [compare_table(document, width=stdout.columns())]
    if report is not None:
        words.append(f"report: {report}")
    line = {
        "verdict": document["overall"],
        "exit_code": code,
        "headline": document["headline"],
        "arms": {arm["name"]: arm["verdict"] for arm in document["arms"]},
        "report": str(report) if report is not None else None,
    }
    stdout.write("\n".join(words), line)
    return code


def read_limits(path: Path) -> CompareLimits:
    """The limits in the [compare] table of the file. ConfigError for one that cannot be used."""
    table = parse_toml(read_toml(path), str(path))
    for key in table:
        if key != "compare":
            raise ConfigError(f"{path}: [{key}] is unknown: it takes a table [compare]")
    try:
        return CompareLimits.from_table(table_of(table, "compare"))
    except RecordError as error:
        raise ConfigError(f"{path}: {error}") from None
