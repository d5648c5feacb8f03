"""`tailgate ramp`: traffic moved to a candidate step by step, and back at once when something happens."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.commands.command_line import CommandParser, add_experiment, add_metrics, add_set, add_slo, duration, seed
from loadtests.commands.judged_run import add_page, page_of, run_and_judge
from loadtests.experiments.reading import load
from loadtests.trials.progress import Status
from loadtests.trials.ramp import RampRun, ramped
from loadtests.trials.run import ARM_COMMAND


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate ramp`."""
    parser.describe(
        "Starts the control and the candidate behind the splitter, sends the experiment's traffic, and moves it to\n"
        "the candidate in the steps of [ramp]: 1, 5, 25, 50, 100 % unless it says otherwise. A step is left upwards\n"
        "by what is sure alone; a death, a compile while serving or a burst of errors rolls back to 0 % at once.\n"
        "weights.jsonl says who had what since when, and why.\n\n"
        "Exit codes: 0 promoted and every gate passed, 3 held or open, 99 rolled back, 2 bad usage or configuration,\n"
        "1 the run broke or was interrupted.",
        "  tailgate ramp canary.toml\n"
        "  tailgate ramp demo --set ramp.candidate=compiled-padded --set ramp.step_s=60\n"
        "  tailgate ramp canary.toml --set ramp.steps=[5,50,100] --at-most 2h",
    )
    add_experiment(parser)
    add_set(parser, "ramp.step_s=600")
    parser.add_argument("--trace", default="", metavar="FILE", help="replay the times and lengths of this trace")
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for run directories (default %(default)s)")
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")
    parser.add_argument("--at-most", type=duration, metavar="TIME", help="the traffic ends by then, such as 60m or 2h")
    add_page(parser)
    add_metrics(parser)
    add_slo(parser)


def main(options: argparse.Namespace) -> int:
    """Ramps and judges; the exit code."""
    experiment = ramped(
        load(options.experiment, settings=options.settings, trace=options.trace, seed=options.seed, slo=options.slo),
        at_most_s=options.at_most,
    )
    status = Status()
    page = page_of(options.page, status)
    ramp = RampRun(
        experiment,
        out=Path(options.out),
        status=status,
        page=page,
        arm_command=options.arm_command or ARM_COMMAND,
        metrics=bool(options.metrics),
    )
    return run_and_judge(ramp, status, page, metrics=options.metrics, as_json=options.json)
