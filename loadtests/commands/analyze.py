"""`tailgate analyze`: a run directory judged again, several as one, or the results of another load tool."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from analysis.frontier.summary_rows import asks_nothing
from analysis.records.joining import joins_runs
from analysis.records.tables import RecordError
from analysis.report import write_reports
from analysis.report.terminal import verdict_table
from analysis.summary.summary import analyze, exit_code, write_summary
from loadtests.commands.command_line import CommandParser, add_allow_different, add_slo, run_directory
from loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain, without_verdict
from loadtests.commands.joined_folder import join_runs
from loadtests.commands.result_folder import names_results, run_of_results
from loadtests.experiments.config_errors import as_config_error
from loadtests.trials.run_directory import check_writable
from servers import stdout
from servers.complaint import fault, unwritten
from servers.fields import ConfigError
from servers.security import check_named


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate analyze`."""
    parser.describe(
        "Reads the records (Arrow, Parquet or JSON Lines; also of a run that was cut off), writes summary.json,\n"
        "report.html, report.md and junit.xml into the directory, and prints the verdict.\n\n"
        "Several runs of one experiment, from different times and machines, are joined: their trials are judged as\n"
        "those of one run, with each machine as a stratum. Runs that differ in what they ran are refused, with a list\n"
        "of what differs. The outcome goes to a folder of its own, which names its runs and can be judged again, or\n"
        "joined with more. --out has the same of one run, such as one that cannot be written.\n\n"
        "Detailed results of vLLM's bench serve, AIPerf and GuideLLM are given as NAME=FILE, a file\n"
        "for each run of an arm, the control's first, and judged as runs that nothing pairs.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable.",
        "  tailgate analyze runs/20260101T120000Z-canary\n"
        "  tailgate analyze runs/20260101T120000Z-canary --json | jq .gates\n"
        "  tailgate analyze runs/20260101T120000Z-canary --slo p99_ttft_ms=300\n"
        "  tailgate analyze runs/*-canary --out runs/canary\n"
        "  tailgate analyze runs/canary runs/20260108T120000Z-canary\n"
        "  tailgate analyze eager=a.json compiled=b.json --slo p99_ttft_ms=300",
        json_help="print summary.json on one line instead of the table",
    )
    parser.add_argument(
        "run_dirs",
        nargs="+",
        metavar="RUN_DIR",
        help="a directory that `tailgate run` wrote, or one that joins runs; or NAME=FILE, a result of another tool",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the outcome goes, and nothing into the runs (default: RUN_DIR; of several runs or files a folder "
        "joined-… or results-… beside the first)",
    )
    add_allow_different(parser)
    add_slo(parser)


def main(options: argparse.Namespace) -> int:
    """Judges the run directory, or the runs as one; the exit code."""
    check_named({"--out": options.out})
    if names_results(options.run_dirs):
        if options.allow_different:
            raise ConfigError("--allow-different is for run directories, and result files are given: leave it out")
        with as_config_error(RecordError):
            try:
                run_dir = run_of_results(options.run_dirs, out=options.out or "")
            except OSError as error:
                return complain(f"{error}: give a folder that can be written as --out", EXIT_BROKE)
        return judge_run(run_dir, {}, as_json=options.json, whole=options.json, slo=options.slo)
    directories = [run_directory(text) for text in options.run_dirs]
    run_dir = directories[0]
    if "" in options.allow_different:
        raise ConfigError("--allow-different holds an empty key: give settings with commas between, or leave it out")
    if options.out or len(directories) > 1 or joins_runs(run_dir):
        with as_config_error(RecordError):
            try:
                run_dir = join_runs(directories, out=options.out or "", accepted=options.allow_different)
            except OSError as error:
                return complain(f"{error}: give a folder that can be written as --out", EXIT_BROKE)
    elif options.allow_different:
        raise ConfigError("--allow-different is for several runs, and one is given: leave it out, or give more runs")
    else:
        check_writable(run_dir)  # before the minutes that judging may take
    return judge_run(run_dir, {}, as_json=options.json, whole=options.json, slo=options.slo)


def judge_run(
    run_dir: Path,
    ended: dict[str, Any],
    *,
    as_json: bool,
    whole: bool = False,
    broke: bool = False,
    slo: Sequence[str] = (),
) -> int:
    """The run directory holds a summary and reports, and the verdict, or the answer of a search, is on stdout; as JSON
    the `whole` summary or its outcome. Returns the exit code."""
    unjudged = partial(_unjudged, run_dir=run_dir, ended=ended, as_json=as_json)
    try:
        summary = analyze(run_dir, slo=slo)
        write_summary(summary, run_dir / "summary.json")
        write_reports(summary, run_dir)
    except RecordError as error:
        return unjudged(str(error), EXIT_BROKE if ended else EXIT_USAGE)
    except OSError as error:
        return unjudged(f"{unwritten(error)}, then tailgate analyze {run_dir}: the records are kept", EXIT_BROKE)
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
        **({"runs": len(joined["runs"])} if (joined := summary.get("joined")) else {}),
        "report": str(report),
        "exit_code": code,
        "headline": summary.get("headline"),
        "arms": {arm["name"]: arm["verdict"] for arm in summary.get("arms", []) if not arm.get("control")},
        "needed_s": (summary.get("advice") or {}).get("needed_s"),
        **ended,
    }
    frontier: Mapping[str, Any] = summary.get("frontier") or {}
    if frontier.get("search"):
        unasked = asks_nothing(frontier)
        if unasked:
            line = {key: value for key, value in line.items() if key not in _OF_VERDICTS} | {"verdict": None}
        line |= {key: frontier.get(key) for key in ("answer", "highest", "search")}
    text = verdict_table(summary, width=stdout.columns())
    stdout.write(f"{text}\nreport: {report}", line, as_json=as_json)
    return code


_OF_VERDICTS = ("headline", "arms", "needed_s")


def _unjudged(message: str, code: int, *, run_dir: Path, ended: dict[str, Any], as_json: bool) -> int:
    """There is no verdict, for the reason in `message`. After a run, programs get their line all the same."""
    complain(message, code)
    if ended:
        without_verdict(run_dir, {"error": message, **ended}, code, as_json=as_json)
    return code
