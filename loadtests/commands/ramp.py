"""`tailgate ramp`: traffic moved to a candidate step by step, and back at once when something happens."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.commands.command_line import (
    CommandParser,
    add_experiment,
    add_metrics,
    add_set,
    add_slo,
    duration,
    seed,
)
from loadtests.commands.judged_run import add_page, page_of, run_and_judge
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import from_table, load_table
from loadtests.experiments.toml_limits import table_of
from loadtests.experiments.users import of_users
from loadtests.trials.progress import Status
from loadtests.trials.ramp import RampRun, ramped
from loadtests.trials.run import ARM_COMMAND, Orchestrator
from loadtests.trials.users_ramp import UsersRamp


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate ramp`."""
    parser.describe(
        "Starts the control and the candidate behind the splitter, sends the experiment's traffic, and moves it to\n"
        "the candidate in the steps of [ramp]: 1, 5, 25, 50, 100 % unless it says otherwise. A step is left upwards\n"
        "by what is sure alone; a death, a compile while serving or a burst of errors rolls back to 0 % at once.\n"
        "weights.jsonl says who had what since when, and why.\n\n"
        "With --admin the traffic is that of users, behind a `tailgate split --request-log FILE` that runs already.\n"
        "Traffic and weights stay as they are once the ramp has ended or was killed. A new ramp begins at the step\n"
        "whose share the candidate has.\n\n"
        "Exit codes: 0 promoted and every gate passed, 3 held or open, 99 rolled back, 2 bad usage or configuration,\n"
        "1 the run broke or was interrupted.",
        "  tailgate ramp canary.toml\n"
        "  tailgate ramp demo --set ramp.candidate=compiled-padded --set ramp.step_s=60\n"
        "  tailgate ramp canary.toml --set ramp.steps=[5,50,100] --at-most 2h\n"
        "  tailgate ramp canary.toml --admin 127.0.0.1:9901",
    )
    add_experiment(parser)
    add_set(parser, "ramp.step_s=600")
    parser.add_argument("--trace", default="", metavar="FILE", help="replay the times and lengths of this trace")
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for run directories (default %(default)s)")
    parser.add_argument(
        "--admin",
        default="",
        metavar="HOST:PORT or PATH",
        help="ramp users' traffic, split by the `tailgate split` with this admin address",
    )
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")
    parser.add_argument("--at-most", type=duration, metavar="TIME", help="the traffic ends by then, such as 60m or 2h")
    add_page(parser)
    add_metrics(parser)
    add_slo(parser)


def main(options: argparse.Namespace) -> int:
    """Ramps and judges; the exit code."""
    experiment = _experiment(options)
    status = Status()
    page = page_of(options.page, status)
    ramp: Orchestrator
    if experiment.ramp.load == "none":
        ramp = UsersRamp(experiment, out=Path(options.out), status=status, page=page)
    else:
        ramp = RampRun(
            experiment,
            out=Path(options.out),
            status=status,
            page=page,
            arm_command=options.arm_command or ARM_COMMAND,
            metrics=bool(options.metrics),
        )
    return run_and_judge(ramp, status, page, metrics=options.metrics, as_json=options.json)


def _experiment(options: argparse.Namespace) -> Experiment:
    """What is ramped, and how."""
    of_none = (
        [*options.settings, "ramp.load=none", f"users.admin={options.admin}"] if options.admin else options.settings
    )
    table = load_table(
        options.experiment,
        settings=of_none,
        trace=options.trace,
        seed=options.seed,
        slo=options.slo,
        needs_traffic=not options.admin,
    )
    if table_of(table, "ramp").get("load") == "none":
        table = of_users(table)
    return ramped(from_table(table), at_most_s=options.at_most)
