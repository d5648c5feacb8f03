"""`tailgate compare`: two runs over time, such as last week's release and this one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tailgate.loadtests.commands.exits import EXIT_USAGE, complain, working
from tailgate.loadtests.commands.options import Quiet, WholeJson
from tailgate.servers import stdout
from tailgate.servers.security import check_named

FOLDER = "compare"  # of the reports, in the candidate's run directory
EXAMPLES = """\
  tailgate compare runs/20260101T120000Z-canary runs/20260108T120000Z-canary
  tailgate compare runs/baseline runs/20260108T120000Z-canary --arm buckets --limits limits.toml
  tailgate compare runs/a runs/b --arm compiled-padded=compiled-bucketed --json | jq .gates"""


def command(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="The earlier run.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The run to judge.")],
    arm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The arm to judge, or BASELINE=CANDIDATE for arms of different names. Default: the only arm that both "
            "runs have and that is not their control.",
        ),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A TOML file with a [gates] table, instead of the candidate's."),
    ] = None,
    trust_machines: Annotated[
        bool,
        typer.Option("--trust-machines", help="Assume that machines without reference measurements are equally fast."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the reports. Default: compare in the candidate's run."),
    ] = None,
    quiet: Quiet = False,
    as_json: WholeJson = False,
) -> int:
    """Compare two runs over time.

    Judges an arm of the later run by the gates of its experiment, with the same arm of the earlier run as the control.
    The runs, or result files of another tool, need not share schedule, machine or day: the unit is the trial, and the
    limits allow for start-to-start and day-to-day variance. A difference that the speed of the machines may explain is
    INCONCLUSIVE. Runs that differ in traffic, model or objectives are refused; other differences are listed.

    Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable or not comparable.
    """
    from tailgate.analysis.compare.comparison import WHAT_DIFFERS, compare_runs, made_run
    from tailgate.analysis.records.tables import RecordError
    from tailgate.analysis.report import write_reports
    from tailgate.analysis.report.terminal import verdict_table
    from tailgate.analysis.summary.summary import write_summary
    from tailgate.loadtests.experiments.files import check_makeable

    check_named({"BASELINE": baseline, "CANDIDATE": candidate, "--arm": arm, "--limits": limits, "--out": out})
    folder = Path(out) if out else Path(candidate) / FOLDER if Path(candidate).is_dir() else None
    if folder is not None:
        check_makeable(folder)  # before the minutes that reading may take
    gates = read_gates(Path(limits)) if limits else None
    try:
        with working("judging the two runs", quiet=quiet), tempfile.TemporaryDirectory() as made:
            sides = (("baseline", Path(baseline)), ("candidate", Path(candidate)))
            runs = [made_run(path, Path(made) / side) for side, path in sides]
            summary = compare_runs(*runs, arm=arm or "", gates=gates, trust_machines=trust_machines)
    except RecordError as error:
        return complain(str(error), EXIT_USAGE)
    except OSError as error:
        return complain(f"{error}: give runs that can be read", EXIT_USAGE)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_summary(summary, folder / "summary.json")
            write_reports(summary, folder)
    except OSError as error:
        return complain(f"{error}: give a folder that can be written as --out", EXIT_USAGE)
    words = [verdict_table(summary, width=stdout.columns())]
    words += [str(row["reason"]) for row in summary["validity"] if row["check"] == WHAT_DIFFERS.name and row["ok"]]
    words += [] if folder is None else [f"report: {folder / 'report.html'}"]
    stdout.write("\n".join(words), summary, as_json=as_json)
    return int(summary["exit_code"])


def read_gates(path: Path) -> Mapping[str, Any]:
    """Return the [gates] table of the file. Raises ConfigError for one that cannot be used."""
    from tailgate.analysis.settings.gate_limits import GateLimits
    from tailgate.loadtests.experiments.files import parse_toml, read_toml
    from tailgate.servers.fields import Settings, read

    class Limits(Settings):
        gates: GateLimits = GateLimits()

    table = parse_toml(read_toml(path, "--limits"), str(path))
    return read(Limits, table).gates.model_dump(exclude_unset=True)
