"""`tailgate ramp`: traffic moved to a candidate step by step, and back at once when something happens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadtests.commands.analyze import judge_run
from loadtests.commands.command_line import CommandParser, add_experiment, add_set, add_slo, duration, seed
from loadtests.commands.exits import EXIT_BROKE, complain, stopping, without_verdict
from loadtests.experiments.reading import load
from loadtests.trials.progress import Display, Status
from loadtests.trials.ramp import RampRun, ramped
from loadtests.trials.run import ARM_COMMAND
from loadtests.trials.run_directory import has_requests


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
    add_slo(parser)


def main(options: argparse.Namespace) -> int:
    """Ramps and judges; the exit code."""
    experiment = ramped(
        load(options.experiment, settings=options.settings, trace=options.trace, seed=options.seed, slo=options.slo),
        at_most_s=options.at_most,
    )
    status = Status()
    ramp = RampRun(experiment, out=Path(options.out), status=status, arm_command=options.arm_command or ARM_COMMAND)
    ramp.prepare()
    with stopping(ramp.interrupt, ramp.kill, status.note), Display(status):
        outcome = ramp.run()
        status.phase = "stopped" if not outcome.complete else "recorded"
    if outcome.error is not None:
        complain(outcome.error, EXIT_BROKE)
    elif outcome.interrupted:
        complain(f"interrupted: what was recorded is in {outcome.run_dir}", EXIT_BROKE)
    ended = {
        "complete": outcome.complete,
        **({"interrupted": True} if outcome.interrupted else {}),
        **({"error": outcome.error} if outcome.error else {}),
    }
    if not outcome.complete and not has_requests(outcome.run_dir):
        return without_verdict(outcome.run_dir, ended, as_json=options.json)
    print(f"judging {outcome.run_dir}", file=sys.stderr)
    return judge_run(outcome.run_dir, ended, as_json=options.json, broke=not outcome.complete)
