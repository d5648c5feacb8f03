"""`tailgate compare`: two runs over time, last week's release and this one."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.compare.comparison import WHAT_DIFFERS, compare_runs
from analysis.compare.pair import made_run
from analysis.records.tables import RecordError
from analysis.report import write_reports
from analysis.report.terminal import verdict_table
from analysis.settings.gate_limits import GateLimits
from analysis.summary.summary import exit_code, write_summary
from loadtests.commands.command_line import CommandParser
from loadtests.commands.exits import EXIT_USAGE, complain
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.toml_limits import parse_toml, read_toml, table_of
from loadtests.trials.run_directory import check_makeable
from servers import stdout
from servers.fields import ConfigError
from servers.security import check_named

FOLDER = "compare"  # of the reports, in the candidate's run directory


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate compare`."""
    parser.describe(
        "Judges an arm of the later run by the gates of its experiment, with the same arm of the earlier run as the\n"
        "control: latency, objectives, errors and compiles. The runs need share neither schedule nor machine nor day:\n"
        "the unit is the trial, and the limits allow for what starts and days differ by. What the machines may\n"
        "explain, as the references of the runs show it, is INCONCLUSIVE. Runs that differ in traffic, model or\n"
        "objectives are refused; other differences are listed.\n\n"
        "BASELINE and CANDIDATE are run directories, or result files of another tool. Writes summary.json,\n"
        "report.html, report.md and junit.xml into the folder compare of the candidate's run directory.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable or not comparable.",
        "  tailgate compare runs/20260101T120000Z-canary runs/20260108T120000Z-canary\n"
        "  tailgate compare runs/baseline runs/20260108T120000Z-canary --arm buckets --limits limits.toml\n"
        "  tailgate compare runs/a runs/b --arm compiled-padded=compiled-bucketed --json | jq .gates",
        json_help="print summary.json on one line instead of the table",
    )
    parser.add_argument("baseline", metavar="BASELINE", help="the earlier run")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run that is judged")
    parser.add_argument(
        "--arm",
        metavar="NAME",
        help="the arm, or BASELINE=CANDIDATE for arms of different names (default: the only arm that both runs have "
        "and that is not their control)",
    )
    parser.add_argument("--limits", metavar="FILE", help="a TOML file with a [gates] table, instead of the candidate's")
    parser.add_argument(
        "--trust-machines", action="store_true", help="take machines without references for equally fast"
    )
    parser.add_argument("--out", metavar="DIR", help="where the reports go (default: compare in the candidate's run)")


def main(options: argparse.Namespace) -> int:
    """Compare the runs; returns the exit code."""
    for name, path in (("BASELINE", options.baseline), ("CANDIDATE", options.candidate)):
        if not path:
            raise ConfigError(f"{name} is empty: give a run directory")
    check_named({"--limits": options.limits, "--out": options.out})
    arm = _arm(options.arm)
    candidate = Path(options.candidate)
    out = Path(options.out) if options.out else candidate / FOLDER if candidate.is_dir() else None
    if out is not None:
        check_makeable(out)  # before the minutes that reading may take
    gates = read_gates(Path(options.limits)) if options.limits else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                made_run(path, Path(folder) / side)
                for side, path in (("baseline", Path(options.baseline)), ("candidate", candidate))
            ]
            summary = compare_runs(*runs, arm=arm, gates=gates, trust_machines=options.trust_machines)
    except RecordError as error:
        return complain(str(error), EXIT_USAGE)
    except OSError as error:
        return complain(f"{error}: give runs that can be read", EXIT_USAGE)
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_summary(summary, out / "summary.json")
            write_reports(summary, out)
    except OSError as error:
        return complain(f"{error}: give a folder that can be written as --out", EXIT_USAGE)
    return _show(summary, None if out is None else out / "report.html", as_json=options.json)


def _arm(text: str | None) -> str:
    if text is None:
        return ""
    name, mapped, other = text.partition("=")
    if not name or (mapped and not other):
        raise ConfigError(f'--arm "{text}" lacks a name: give NAME or BASELINE=CANDIDATE')
    return text


def _show(summary: Mapping[str, Any], report: Path | None, *, as_json: bool) -> int:
    code = exit_code(summary)
    if as_json:
        stdout.write("", summary, as_json=True)
        return code
    words = [verdict_table(summary, width=stdout.columns())]
    words += [str(row["reason"]) for row in summary["validity"] if row["check"] == WHAT_DIFFERS.name]
    words += [] if report is None else [f"report: {report}"]
    line = {
        "verdict": summary["overall"],
        "exit_code": code,
        "headline": summary["headline"],
        "report": str(report) if report is not None else None,
    }
    stdout.write("\n".join(words), line)
    return code


def read_gates(path: Path) -> Mapping[str, Any]:
    """The [gates] table of the file. ConfigError for one that cannot be used."""
    table = parse_toml(read_toml(path), str(path))
    for key in table:
        if key != "gates":
            raise ConfigError(f"{path}: [{key}] is unknown: it takes a table [gates]")
    gates = table_of(table, "gates")
    with as_config_error(RecordError):
        GateLimits.read(gates)
    return gates
