"""`tailgate analyze`: a run directory judged again, several as one, or the results of another load tool."""

from __future__ import annotations

from typing import Annotated

import typer

from tailgate.loadtests.commands.exits import EXIT_BROKE, complain
from tailgate.loadtests.commands.options import AllowDifferent, Quiet, Slo, WholeJson, run_directory, split_keys
from tailgate.servers.complaint import ConfigError
from tailgate.servers.security import check_named

EXAMPLES = """\
  tailgate analyze runs/20260101T120000Z-canary
  tailgate analyze runs/20260101T120000Z-canary --json | jq .gates
  tailgate analyze runs/20260101T120000Z-canary --slo p99_ttft_ms=300
  tailgate analyze runs/*-canary --out runs/canary
  tailgate analyze eager=a.json compiled=b.json --slo p99_ttft_ms=300"""


def command(
    run_dirs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="A directory that `tailgate run` wrote, or one that joins runs; or NAME=FILE, a result of another "
            "tool.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the outcome; the runs stay unchanged. Default: RUN_DIR; for several runs or files a new "
            "folder joined-... or results-... next to the first.",
        ),
    ] = None,
    allow_different: AllowDifferent = None,
    slo: Slo = None,
    quiet: Quiet = False,
    as_json: WholeJson = False,
) -> int:
    """Judge a run again, or several runs as one.

    Reads the records (Arrow, Parquet or JSON Lines; also of a run that was cut off), writes summary.json,
    report.html, report.md and junit.xml into the directory, and prints the verdict.

    Judges several runs of one experiment as one, also of different days and machines. Refuses runs whose settings
    differ, and lists the differences. The outcome goes to a new folder, which can be judged again or joined with more
    runs.

    Takes detailed results of vLLM's bench serve as NAME=FILE: one file for each run of an arm, the control first.

    Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 not readable; of a search those of `frontier`.
    """
    from tailgate.analysis.records.joining import joins_runs
    from tailgate.analysis.records.tables import RecordError
    from tailgate.loadtests.commands.made_folder import join_runs, names_results, run_of_results
    from tailgate.loadtests.commands.verdict import judge_run
    from tailgate.loadtests.experiments.files import check_makeable

    check_named({"--out": out})
    accepted = split_keys(allow_different)
    results = names_results(run_dirs)
    directories = [] if results else [run_directory(text) for text in run_dirs]
    joined = bool(out) or len(directories) > 1 or any(joins_runs(directory) for directory in directories)
    if accepted and (results or not joined):
        raise ConfigError("--allow-different is for several run directories: leave it out, or give more of them")
    try:
        if results:
            run_dir = run_of_results(run_dirs, out=out or "")
        elif joined:
            run_dir = join_runs(directories, out=out or "", accepted=accepted)
        else:
            (run_dir,) = directories
            check_makeable(run_dir)  # before the minutes that judging may take
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        return complain(f"{error}: give a folder that can be written as --out", EXIT_BROKE)
    return judge_run(run_dir, {}, as_json=as_json, whole=as_json, slo=slo or (), quiet=quiet)
