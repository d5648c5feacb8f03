"""`tailgate analyze`: a run directory, judged again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from analysis.records.tables import RecordError
from analysis.report import write_reports
from analysis.report.terminal import verdict_table
from analysis.summary.summary import analyze, exit_code, write_summary
from loadtests.commands.command_line import CommandParser, add_slo, run_directory
from loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain, without_verdict
from servers import stdout
from servers.complaint import fault


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate analyze`."""
    parser.describe(
        "Reads the records (Arrow, Parquet or JSON Lines; also of a run that was cut off), writes summary.json,\n"
        "report.html, report.md and junit.xml into the directory, and prints the verdict.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable.",
        "  tailgate analyze runs/20260101T120000Z-canary\n"
        "  tailgate analyze runs/20260101T120000Z-canary --json | jq .gates\n"
        "  tailgate analyze runs/20260101T120000Z-canary --slo 'p99_ttft_ms <= 300'",
        json_help="print summary.json on one line instead of the table",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    add_slo(parser)


def main(options: argparse.Namespace) -> int:
    """Judges the run directory; the exit code."""
    return judge_run(run_directory(options.run_dir), {}, as_json=options.json, whole=options.json, slo=options.slo)


def judge_run(
    run_dir: Path,
    ended: dict[str, Any],
    *,
    as_json: bool,
    whole: bool = False,
    broke: bool = False,
    slo: Sequence[str] = (),
) -> int:
    """The run directory holds a summary and reports, and the verdict is on stdout; as JSON the `whole` summary or its
    outcome. Returns the exit code."""
    unjudged = partial(_unjudged, run_dir=run_dir, ended=ended, as_json=as_json)
    try:
        summary = analyze(run_dir, slo=slo)
        write_summary(summary, run_dir / "summary.json")
        write_reports(summary, run_dir)
    except RecordError as error:
        return unjudged(str(error), EXIT_BROKE if ended else EXIT_USAGE)
    except OSError as error:
        return unjudged(f"{error}: the records are kept in {run_dir}", EXIT_BROKE)
    except KeyboardInterrupt:
        return unjudged(f"interrupted: the records are kept: tailgate analyze {run_dir}", EXIT_BROKE)
    except Exception as error:
        return unjudged(fault(error, run_dir), EXIT_BROKE)
    code = EXIT_BROKE if broke else exit_code(summary)
    if whole:
        stdout.write("", summary, as_json=True)
        return code
    report = run_dir / "report.html"
    line = {
        "verdict": summary["overall"],
        "run_dir": str(run_dir),
        "report": str(report),
        "exit_code": code,
        "headline": summary.get("headline"),
        "arms": {arm["name"]: arm["verdict"] for arm in summary.get("arms", []) if not arm.get("control")},
        "needed_s": (summary.get("advice") or {}).get("needed_s"),
        **ended,
    }
    words = f"{verdict_table(summary, width=stdout.columns())}\nreport: {report}"
    stdout.write(words, line, as_json=as_json)
    return code


def _unjudged(message: str, code: int, *, run_dir: Path, ended: dict[str, Any], as_json: bool) -> int:
    """There is no verdict, for the reason in `message`. After a run, programs get their line all the same."""
    complain(message, code)
    if ended:
        without_verdict(run_dir, {"error": message, **ended}, code, as_json=as_json)
    return code
