"""`tailgate compare`: two runs over time, last week's release and this one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.judging.gates import FAIL
from analysis.records.tables import RecordError
from analysis.releases.comparison import arms_to_compare, chosen_arms, compare_releases
from analysis.releases.history import History, accept, before, read_history
from analysis.releases.release import Release, is_run, read_release
from analysis.report.release import release_table, write_release_reports
from analysis.results.file import part_of
from analysis.settings.release_limits import ReleaseLimits
from analysis.summary.summary import EXIT_CODES
from loadtests.commands.command_line import CommandParser
from loadtests.commands.exits import EXIT_USAGE, complain
from loadtests.experiments.toml_limits import parse_toml, read_toml, table_of
from loadtests.trials.preflight import check_makeable
from servers import stdout
from servers.fields import ConfigError
from servers.security import check_named

LIMITS_FILE = "compare.toml"


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate compare`."""
    parser.describe(
        "Compares each arm that both runs have: latency, goodput, compiles, start-up, memory and energy. The runs\n"
        "need share neither schedule nor machine nor day: the unit is the trial, and what trials and days differ by\n"
        "anyhow is allowed for. A change of the machine's own speed, as the runs' references show it, opens what it\n"
        "may explain. Runs that differ in traffic, model or objectives are refused; what else differs is listed.\n\n"
        f"BASELINE is a run directory, a record of one, or a folder of either (with {LIMITS_FILE} for the limits), of\n"
        "which the newest is compared and all show how days differ. Either may be another tool's result file; FILE#2\n"
        "is the second result of a file that holds several. Writes compare.html, compare.md, compare.xml and\n"
        "compare.json into the candidate's run directory.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable or not comparable.",
        "  tailgate compare runs/20260101T120000Z-canary runs/20260108T120000Z-canary\n"
        "  tailgate compare baselines/main runs/20260108T120000Z-canary --accept\n"
        "  tailgate compare baselines/main runs/20260108T120000Z-canary --arm buckets --limits limits.toml\n"
        "  tailgate compare runs/a runs/b --arm compiled-padded=compiled-bucketed --json | jq .figures",
        json_help="print compare.json on one line instead of the table",
    )
    parser.add_argument("baseline", metavar="BASELINE", help="the earlier run, or a folder of earlier runs")
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
    parser.add_argument(
        "--accept",
        action="store_true",
        help="keeps a record of the candidate in the folder BASELINE, unless it FAILs: the next baseline",
    )
    parser.add_argument("--force", action="store_true", help="with --accept: also where it FAILs")


def main(options: argparse.Namespace) -> int:
    """Compares the runs; the exit code."""
    for name, path in (("BASELINE", options.baseline), ("CANDIDATE", options.candidate)):
        if not path:
            raise ConfigError(f"{name} is empty: give a run directory, or a record of one")
    check_named({"--limits": options.limits, "--out": options.out})
    folder, given = Path(options.baseline), Path(options.candidate)
    out = Path(options.out) if options.out else given if given.is_dir() else None
    if out is not None:
        check_makeable(out)  # before the minutes that reading may take
    if options.force and not options.accept:
        raise ConfigError("--force says what --accept does: add --accept, or leave both out")
    if options.accept:
        if part_of(folder)[0].is_file() or is_run(folder):
            raise ConfigError(
                f"--accept keeps records in a folder, and {folder} is one run: give a folder of baselines"
            )
        check_makeable(folder, "BASELINE")
    try:
        chosen_arms(options.arms)
    except RecordError as error:
        return complain(str(error), EXIT_USAGE)
    limits = read_limits(Path(options.limits) if options.limits else folder / LIMITS_FILE, named=bool(options.limits))
    try:
        candidate = read_release(given)
        history = _history(folder, candidate, may_be_new=options.accept)
        if not history.releases:
            return _first(folder, candidate, keep=options.accept, as_json=options.json)
        arms = arms_to_compare(history.newest, candidate, options.arms)
        document = compare_releases(history, candidate, arms=arms, limits=limits)
    except RecordError as error:
        return complain(str(error), EXIT_USAGE)
    except OSError as error:
        return complain(f"{error}: give runs that can be read, and with --accept a folder to write into", EXIT_USAGE)
    try:
        report = write_release_reports(document, out) if out is not None else None
    except OSError as error:
        return complain(f"{error}: give a folder that can be written as --out", EXIT_USAGE)
    kept = None
    if options.accept and (document["overall"] != FAIL or options.force):
        try:
            kept = accept(candidate, folder)
        except OSError as error:
            return complain(f"{error}: --accept needs a folder that can be written", EXIT_USAGE)
    return _show(document, report, kept, options)


def _show(document: Mapping[str, Any], report: Path | None, kept: Path | None, options: argparse.Namespace) -> int:
    code = int(document["exit_code"])
    if options.json:
        stdout.write("", document, as_json=True)
        return code
    words = [release_table(document, width=stdout.columns())]
    if kept is not None:
        words.append(f"kept: {kept}")
    elif options.accept:
        words.append("not kept, since it FAILs: --accept --force keeps it all the same")
    if report is not None:
        words.append(f"report: {report}")
    line = {
        "verdict": document["overall"],
        "exit_code": code,
        "headline": document["headline"],
        "arms": {arm["name"]: arm["verdict"] for arm in document["arms"]},
        "report": str(report) if report is not None else None,
        "kept": str(kept) if kept is not None else None,
    }
    stdout.write("\n".join(words), line)
    return code


def _history(folder: Path, candidate: Release, *, may_be_new: bool) -> History:
    if may_be_new and not folder.exists():
        return History(releases=())
    history = read_history(folder)
    # A run that is named by itself may be younger than the candidate; in a folder, only what came before can tell.
    return history if part_of(folder)[0].is_file() or is_run(folder) else before(history, candidate)


def _first(folder: Path, candidate: Release, *, keep: bool, as_json: bool) -> int:
    """There is no run to compare with: INCONCLUSIVE, and with --accept it is the first to be kept."""
    if not keep:
        return complain(
            f"{folder} holds no run from before {candidate.run_id}: keep a first one with --accept", EXIT_USAGE
        )
    kept = accept(candidate, folder)
    verdict = "INCONCLUSIVE"
    headline = f"There is no earlier run to compare with; {candidate.run_id} is the first baseline."
    line = {"verdict": verdict, "exit_code": EXIT_CODES[verdict], "headline": headline, "kept": str(kept)}
    stdout.write(f"{verdict}: {headline}\nkept: {kept}", line, as_json=as_json)
    return EXIT_CODES[verdict]


def read_limits(path: Path, *, named: bool) -> ReleaseLimits:
    """The limits in the [compare] table of the file; the defaults where it is not `named` and not there. ConfigError
    for one that cannot be used."""
    if not named and not path.is_file():
        return ReleaseLimits()
    table = parse_toml(read_toml(path), str(path))
    for key in table:
        if key != "compare":
            raise ConfigError(f"{path}: [{key}] is unknown: it takes a table [compare]")
    try:
        return ReleaseLimits.from_table(table_of(table, "compare"))
    except RecordError as error:
        raise ConfigError(f"{path}: {error}") from None
