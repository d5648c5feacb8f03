"""`tailgate frontier`: which policy to ship at which load."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.records.joining import RecordedRun, RunList, check_next, listed_runs
from analysis.records.run_records import check_runs
from analysis.records.tables import RecordError
from loadtests.commands.analyze import judge_run
from loadtests.commands.command_line import (
    CommandParser,
    add_allow_different,
    add_experiment,
    add_metrics,
    add_set,
    add_slo,
    real,
    run_directory,
    seed,
)
from loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from loadtests.commands.frontier_plan import FrontierPlan, asks_for_verdicts, frontier_plan
from loadtests.commands.joined_folder import check_outside, join_runs
from loadtests.commands.judged_run import add_page, page_of
from loadtests.commands.parity import show_parity
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.model import Experiment
from loadtests.experiments.writing import to_toml
from loadtests.trials.environment import describe_environment
from loadtests.trials.frontier import FrontierSearch, check_budget
from loadtests.trials.progress import Display, Status
from loadtests.trials.run import ARM_COMMAND
from loadtests.trials.run_directory import has_requests
from loadtests.trials.run_metrics import exporting
from loadtests.trials.trial_facts import known_before
from servers.fields import ConfigError

BUDGET_MINUTES = 60.0
DEMO, DEMO_MINUTES = "frontier-demo", 9.0
_LONGEST_MINUTES = 10_080.0


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate frontier`."""
    parser.describe(
        "Starts one arm after another, again and again, each time at loads around the most that it holds within the\n"
        "[slo], until the budget is spent or nothing is open. Then it says which policy to ship at which load, what\n"
        "that costs, and what is not known. An experiment with the control alone gets the standard set: padded,\n"
        "bucketed with the ladder that pads its lengths least, dynamic. Loads begin at traffic.rates, or around\n"
        "traffic.rate. Ctrl-C ends the search with what is known.\n\n"
        "With --after it goes on with earlier searches of the same experiment, made here or on another machine of the\n"
        "kind: the control is started first, then the arms that they never started, then those that they left open.\n"
        "The answer is of all of them.\n\n"
        "Exit codes: 0 it ended with an answer; where the experiment sets [gates], those of `run` (0 PASS,\n"
        "3 INCONCLUSIVE, 99 FAIL); 2 bad usage or configuration; 1 it broke or was interrupted.",
        "  tailgate frontier demo\n"
        "  tailgate frontier canary.toml --budget 180\n"
        "  tailgate frontier canary.toml --standard --set arms[0].device=cuda:0\n"
        "  tailgate frontier canary.toml --after runs/20261123T174947Z-canary --seed 2\n"
        "  tailgate frontier canary.toml --set traffic.rates=[2,64] --slo p99_ttft_ms=500",
    )
    add_experiment(parser)
    parser.add_argument(
        "--budget",
        type=real(0, _LONGEST_MINUTES, "number of minutes", above=True),
        metavar="MINUTES",
        help=f"how long the search may take (default {BUDGET_MINUTES:g}; {DEMO_MINUTES:g} for the demo)",
    )
    parser.add_argument(
        "--standard",
        action="store_true",
        help="search the standard set of policies beside the control, in place of the experiment's other arms",
    )
    parser.add_argument(
        "--after",
        nargs="+",
        default=[],
        metavar="RUN_DIR",
        help="earlier searches of the experiment to go on with, or a folder that joins some",
    )
    add_allow_different(parser)
    add_set(parser, "traffic.step_s=20")
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for run directories (default %(default)s)")
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")
    add_page(parser)
    add_slo(parser)
    add_metrics(parser)


def main(options: argparse.Namespace) -> int:
    """Runs the search and says what it found; the exit code."""
    began = time.monotonic()
    demo = options.experiment == "demo"
    plan = frontier_plan(
        DEMO if demo else options.experiment,
        settings=options.settings,
        seed=options.seed,
        slo=options.slo,
        standard=options.standard,
    )
    minutes = options.budget or (DEMO_MINUTES if demo else BUDGET_MINUTES)
    check_budget(plan.experiment, minutes, goes_on=bool(options.after))
    after = _earlier(plan.experiment, options)
    return _search(plan, minutes, began, after, options)


def _earlier(experiment: Experiment, options: argparse.Namespace) -> RunList | None:
    """The searches that this one goes on with. ConfigError for those with which it could not be joined."""
    if not options.after:
        if options.allow_different:
            raise ConfigError("--allow-different is for what differs from earlier searches: name them with --after")
        return None
    directories = [run_directory(text, "tailgate frontier") for text in options.after]
    with as_config_error(RecordError):
        after = check_continued(experiment, directories, options.allow_different)
    check_outside(Path(options.out), [*directories, *after.directories])
    return after


def check_continued(experiment: Experiment, directories: Sequence[Path], accepted: Sequence[str] = ()) -> RunList:
    """The searches in `directories`, with which one of `experiment` on this machine may be joined once it is there.

    RecordError where it may not, but for what is `accepted`.
    """
    listed = listed_runs(directories, accepted)
    documents = check_runs(listed)
    for run in documents:
        if run.search is None:
            raise RecordError(f"{run.name} is no search, as it holds no frontier.json: give runs of tailgate frontier")
        if run.seed == str(experiment.seed):
            raise RecordError(
                f"{run.name} has seed {run.seed} too, so its requests would come again: give another --seed"
            )
    coming = RecordedRun(
        directory=Path(),
        name="what would run now",
        experiment=tomllib.loads(to_toml(experiment)),
        environment=describe_environment(),
        infos=(json.loads(json.dumps(known_before(experiment))),),  # as trial.json will have it
        search={},
    )
    check_next(documents, coming, listed.accepted)
    return listed


def _search(
    plan: FrontierPlan, minutes: float, began: float, after: RunList | None, options: argparse.Namespace
) -> int:
    status = Status()
    page = page_of(options.page, status)
    search = FrontierSearch(
        plan.experiment,
        out=Path(options.out),
        budget_s=minutes * 60.0,
        dropped=plan.dropped,
        after=() if after is None else after.directories,
        gated=asks_for_verdicts(plan.experiment),
        status=status,
        page=page,
        arm_command=options.arm_command or ARM_COMMAND,
        metrics=bool(options.metrics),
        began=began,
    )
    search.prepare()
    for item in plan.dropped:
        status.note(f"{item.arm} {item.reason}")
    ended: dict[str, Any] = {"complete": False, "error": "it ended in the middle"}
    try:
        return _run(search, status, minutes, after, ended, options)
    finally:
        if page is not None:
            page.close(ended)


def _run(
    search: FrontierSearch,
    status: Status,
    minutes: float,
    after: RunList | None,
    ended: dict[str, Any],
    options: argparse.Namespace,
) -> int:
    """The search was run and judged, and `ended` says how it ended; the exit code."""
    with (
        exporting(status, options.metrics),
        stopping(search.interrupt, search.kill, status.note),
        Display(status),
    ):
        outcome = search.run()
        status.phase = "recorded" if outcome.complete else "stopped"
    if outcome.error is not None:
        complain(outcome.error, EXIT_BROKE)
    elif outcome.interrupted:
        complain(f"interrupted: what was recorded is in {outcome.run_dir}", EXIT_BROKE)
    ended.clear()
    ended |= outcome.ended
    if outcome.failed_parity is not None:
        return show_parity(outcome.failed_parity, outcome.run_dir, as_json=options.json)
    if not has_requests(outcome.run_dir):
        if outcome.complete:
            why = f"--budget of {minutes:g} minutes was spent before an arm took any load: give more"
            complain(why, EXIT_BROKE)
            ended |= {"complete": False, "error": why}
        return without_verdict(outcome.run_dir, ended, as_json=options.json)
    run_dir = outcome.run_dir
    if after is not None:
        try:
            run_dir = join_runs([*after.directories, run_dir], out=f"{run_dir}-joined", accepted=after.accepted)
        except (RecordError, ConfigError, OSError) as error:
            status.note(f"judged by itself: {error}")
    status.phase = "judging"
    print(f"judging {run_dir}", file=sys.stderr)
    code = judge_run(run_dir, ended, as_json=options.json, broke=not outcome.complete)
    ended["judged"] = run_dir.name
    return code
