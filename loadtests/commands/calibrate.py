"""Whether the verdicts of a run can be trusted, tried on its own data: `tailgate calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.foresight.calibration import EXIT_CODES, Calibration, calibrate
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.run import Run
from analysis.settings.metrics import METRIC_NAMES
from loadtests.commands.command_line import CommandParser, run_directory, seed, whole
from loadtests.commands.terminal_table import aligned
from loadtests.experiments.config_errors import as_config_error
from servers import stdout

SCHEMA = 1
FEWEST_SPLITS, MOST_SPLITS = 20, 10_000
_SHARES = {"called slower": "slower", "called faster": "faster", "interval holds": "covered", "passed": "passed"}


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate calibrate`."""
    parser.describe(
        "On its own data. The control is split into halves that are equal by construction, many times: how often do\n"
        "the tests of the verdict call one slower, and how often do they see a half that was made slower? Then how\n"
        "alike neighbouring blocks are, and whether trials differ by more than their blocks foretell.\n\n"
        "Exit codes: 0 trustworthy, 3 too few data to say, 99 do not trust, 2 not readable.",
        "  tailgate calibrate runs/20260101T120000Z-canary\n"
        "  tailgate calibrate runs/20260101T120000Z-canary --splits 400 --json | jq .reasons",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a directory that `tailgate run` wrote")
    splits = whole(FEWEST_SPLITS, MOST_SPLITS, "number of splits")
    parser.add_argument("--splits", type=splits, default=100, metavar="N", help="each way (default %(default)s)")
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")


def main(options: argparse.Namespace) -> int:
    """Says whether the verdicts of the run can be trusted; the exit code."""
    directory = run_directory(options.run_dir)
    with as_config_error(RecordError):
        calibration = calibrate(Run.of(read_run(directory), options.seed), splits=options.splits)
    document = to_document(calibration, directory)
    stdout.write(calibration_text(document), document, as_json=options.json)
    return EXIT_CODES[calibration.trust]


def to_document(calibration: Calibration, directory: Path) -> dict[str, Any]:
    """The calibration of the run in `directory` as plain values."""
    figures = asdict(calibration)
    for row, halves in zip(figures["halves"], calibration.halves, strict=True):
        for name in _SHARES.values():
            row[name]["share"] = getattr(halves, name).share
    return {
        "schema": SCHEMA,
        "run_dir": str(directory),
        "verdict": calibration.trust,
        "exit_code": EXIT_CODES[calibration.trust],
        **{name: figures[name] for name in ("reasons", "notes", "control", "alpha", "margin", "splits", "trials")},
        "halves": figures["halves"],
        "block_correlations": figures["correlations"],
        "restarts": [{**asdict(item), "variance_ratio": item.ratio} for item in calibration.restarts],
    }


def calibration_text(calibration: Mapping[str, Any]) -> str:
    """The calibration for people."""
    alpha = calibration["alpha"]
    fewest = min((row["requests"] for row in calibration["halves"]), default=0)
    each = f", {fewest:,} requests or more a half" if fewest else ""
    lines = [
        f"{calibration['run_dir']}: halves of {calibration['control']}, {calibration['splits']} splits each way"
        f"{each}, alpha {alpha:g}, margin {100 * calibration['margin']:g} %",
        "",
        *aligned(_halves(calibration), left=2),
        "",
        f"Of equal halves, alpha allows {100 * alpha:g} % to be called slower and as many faster; the interval should "
        f"hold the truth in {100 * (1 - 2 * alpha):g} %.",
        "A half that is slower by the margin and passes is a false PASS.",
        "",
    ]
    if calibration["block_correlations"]:
        lines += [*aligned(_correlations(calibration["block_correlations"]), left=2), ""]
    if calibration["restarts"]:
        lines += [*aligned(_restarts(calibration["restarts"]), left=2), ""]
    lines += calibration["notes"]
    reasons = " ".join(calibration["reasons"])
    lines.append(f"This run's verdicts: {calibration['verdict']}{f': {reasons}' if reasons else '.'}")
    return "\n".join(lines)


def _label(row: Mapping[str, Any]) -> str:
    return f"p{100 * row['quantile']:.10g} {METRIC_NAMES.get(row['metric'], row['metric'])}"


def _halves(calibration: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    rows = [["metric", "split", "true ratio", *(f"{name}, %" for name in _SHARES)]]
    for row in calibration["halves"]:
        shares = [_percent(row[name]) for name in _SHARES.values()]
        effect = "1" if row["effect"] == 1 else f"× {row['effect']:.10g}"
        rows.append([_label(row), row["how"], effect, *shares])
    return rows


def _percent(share: Mapping[str, Any]) -> str:
    if share["share"] is None:
        return "untested"
    return f"{100 * share['share']:.0f} ({100 * share['low']:.0f}–{100 * share['high']:.0f})"


def _correlations(correlations: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    rows = [["arm to control", "metric", "block", "blocks", "neighbours correlate", "limit"]]
    for row in correlations:
        value = _figure(row["value"], 2)
        rows.append(
            [row["arm"], _label(row), f"{row['block_s']:g} s", str(row["blocks"]), value, f"{row['limit']:.2f}"]
        )
    return rows


def _restarts(restarts: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    rows = [["arm to control", "metric", "trials", "between trials", "as blocks foretell", "variance ratio", "p"]]
    for row in restarts:
        figures = (("between", 3), ("within", 3), ("variance_ratio", 2), ("p_value", 3))
        shown = [_figure(row[name], digits) for name, digits in figures]
        rows.append([row["arm"], _label(row), str(row["trials"]), *shown])
    return rows


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
