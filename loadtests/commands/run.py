"""`tailgate run`: an experiment, run and judged."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields, replace
from pathlib import Path

from analysis.records.tables import RecordError
from loadtests.commands.command_line import (
    CommandParser,
    add_experiment,
    add_metrics,
    add_set,
    add_slo,
    count,
    duration,
    real,
    seed,
)
from loadtests.commands.judged_run import add_page, page_of, run_and_judge
from loadtests.experiments.config_errors import as_config_error
from loadtests.experiments.field_names import FieldFlags
from loadtests.experiments.model import Experiment
from loadtests.experiments.reading import load
from loadtests.traffic.traces import KNOWN
from loadtests.trials.progress import Status
from loadtests.trials.run import ARM_COMMAND, Orchestrator
from servers.fields import ConfigError


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate run`."""
    parser.describe(
        "Starts every arm and the splitter, drives the traffic through them, records everything in a new\n"
        "directory, and judges the arms against the control. Ctrl-C stops in order, keeps and judges what was\n"
        "recorded; a second Ctrl-C kills at once.\n\n"
        "Exit codes: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run broke or was\n"
        "interrupted.",
        "  tailgate run demo\n"
        "  tailgate run demo --set traffic.duration_s=1200 --set trials.count=3\n"
        "  tailgate run canary.toml --trace AzureLLMInferenceTrace_conv.csv --set traffic.time_scale=2\n"
        "  tailgate run canary.toml --set arms[1].compile.mode=max-autotune\n"
        "  tailgate run canary.toml --set arms.compiled.replicas=2\n"
        "  tailgate run canary.toml --until-decided --at-most 60m\n"
        "  tailgate run canary.toml --request-rate 8 --num-prompts 500 --goodput ttft:200 tpot:50",
    )
    add_experiment(parser)
    add_set(parser, "traffic.rate=4")
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help=f"replay the times and lengths of this trace ({KNOWN})",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for run directories (default %(default)s)")
    parser.add_argument(
        "--until-decided",
        action="store_true",
        help="look at the run after every block, and end it once every gate is decided for good or none of it will be; "
        "the verdict is right at any look (gates.sequential = true)",
    )
    parser.add_argument(
        "--at-most",
        type=duration,
        metavar="TIME",
        help="with --until-decided: the traffic of all trials together ends by then, such as 60m or 2h",
    )
    add_page(parser)
    parser.add_argument("--seed", type=seed, metavar="N", help="replaces the experiment's seed")
    add_slo(parser)
    add_metrics(parser)
    _add_field_names(parser)


def _until_decided(experiment: Experiment, at_most_s: float | None) -> Experiment:
    """The experiment, which is looked at after every block and takes at most so long."""
    traffic = experiment.traffic
    if at_most_s is not None:
        traffic = replace(traffic, duration_s=at_most_s / experiment.trials.count)
    with as_config_error(RecordError):
        return replace(experiment, traffic=traffic, gates=experiment.gates.model_copy(update={"sequential": True}))


def _add_field_names(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("names that other serving benchmarks use", "With the meaning they have there.")
    for flag, kind, metavar, text in (
        ("--request-rate", _rate, "R", "requests/s to each arm; inf: all at once, or as --max-concurrency lets them"),
        ("--burstiness", _factor, "B", "gamma shape of the gaps between requests; 1 is Poisson"),
        ("--max-concurrency", count, "N", "most requests under way to each arm"),
        ("--num-prompts", count, "N", "requests that are sent to each arm"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--goodput", nargs="+", default=(), metavar="NAME:MS", help="limits of a good request, such as ttft:200 tpot:50"
    )


def _rate(text: str) -> float:
    return math.inf if text in ("inf", "+inf", "Infinity") else _finite_rate(text)


_finite_rate = real(0, 1e9, "rate (requests/s, or inf)", above=True)
_factor = real(0, 1e6, above=True)


def main(options: argparse.Namespace) -> int:
    """Runs the experiment and judges it; the exit code."""
    experiment = load(
        options.experiment,
        settings=options.settings,
        trace=options.trace,
        seed=options.seed,
        flags=FieldFlags(**{item.name: getattr(options, item.name) for item in fields(FieldFlags)}),
        slo=options.slo,
    )
    if options.until_decided:
        experiment = _until_decided(experiment, options.at_most)
    elif options.at_most is not None:
        raise ConfigError("--at-most belongs to --until-decided: give both, or --set traffic.duration_s")
    status = Status()
    page = page_of(options.page, status)
    orchestrator = Orchestrator(
        experiment,
        out=Path(options.out),
        status=status,
        page=page,
        arm_command=options.arm_command or ARM_COMMAND,
        metrics=bool(options.metrics),
    )
    return run_and_judge(orchestrator, status, page, metrics=options.metrics, as_json=options.json)
