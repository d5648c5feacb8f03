"""`tailgate inspect`: the graphs of an arm, and the shapes that will recompile."""

from __future__ import annotations

import argparse

from loadtests.commands.arm_flags import ARM_FLAGS, add_arm_flags, become, preset_arm
from loadtests.commands.command_line import CommandParser, add_experiment, add_set, flag_of
from loadtests.commands.trace_forecast import add_trace_flags, given_trace_flags, show_forecast
from loadtests.experiments.model import OwnArm
from loadtests.experiments.reading import load
from loadtests.trials.preflight import check_arm
from servers.config import PRESETS, ArmConfig
from servers.fields import ConfigError


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate inspect`."""
    parser.describe(
        "Loads the arm, warms it up as it would be served, then runs each shape as a step of the engine and says\n"
        "what it met: a graph that was ready, a compile, a recompile and why, or a fall-back to eager. Then follow\n"
        "the graphs with their sizes, graph breaks and time. No traffic is sent.\n\n"
        "A shape is a step before padding: `prefill ROWSxTOKENS`, `decode ROWS@CONTEXT`, or for later chunks of\n"
        "prompts `extend ROWSxTOKENS@CONTEXT`. Without --shapes: every planned shape and a few that are not.\n\n"
        "With --trace nothing is loaded. It says of each compile policy how many graphs and compiles the prompt\n"
        "lengths of a trace need, how much they pad, and which buckets pad least.\n\n"
        "Exit codes: 0 every shape is ready, 99 some are not, 2 bad usage or configuration, 1 it broke or was\n"
        "interrupted.",
        "  tailgate inspect demo --arm compiled-naive\n"
        "  tailgate inspect --arm compiled-bucketed --model random:llama-3.2-1b --max-prompt-tokens 2048\n"
        '  tailgate inspect --arm compiled-dynamic --shapes "prefill 1x128, prefill 1x129, decode 8@200"\n'
        "  tailgate inspect canary.toml --arm buckets --set arms.buckets.compile.mode=max-autotune\n"
        "  tailgate inspect --trace conv.csv --max-prompt-tokens 8192 --compile-seconds 20",
    )
    add_experiment(parser, nargs="?", default="")
    parser.add_argument(
        "--arm",
        "--preset",
        dest="arm",
        default="",
        metavar="NAME",
        help=f"an arm of EXPERIMENT; without one a preset: {', '.join(PRESETS)}",
    )
    parser.add_argument("--shapes", default="", metavar="LIST", help="shapes to run in this order, between commas")
    add_arm_flags(parser)
    add_set(parser, "compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="keep compiled code here (default: nowhere)")
    add_trace_flags(parser)


def main(options: argparse.Namespace) -> int:
    """Forecast a trace, or become the process that inspects an arm; return the exit code."""
    if options.trace is not None:
        _check_alone(options)
        return show_forecast(options)
    if given := given_trace_flags(options):
        raise ConfigError(f"{flag_of(next(iter(given)))} is for a trace: add --trace TRACE, or leave it out")
    if not options.arm:
        raise ConfigError("no arm is given: name one with --arm, or a trace with --trace")
    arm = inspected_arm(options)
    check_arm(arm)
    become("servers.inspect", arm, options.cache_dir, ["--shapes", options.shapes, *(["--json"] * options.json)])


def _check_alone(options: argparse.Namespace) -> None:
    """Check that --trace goes without what describes an arm. Otherwise ConfigError."""
    if options.experiment:
        raise ConfigError(f'EXPERIMENT "{options.experiment}" has no effect with --trace: leave it out')
    names = ["arm", "shapes", "cache_dir", *(name for name, *_ in ARM_FLAGS if name != "max_prompt_tokens")]
    given = [flag_of(name) for name in names if getattr(options, name)] + ["--set"] * bool(options.settings)
    if given:
        raise ConfigError(f"{given[0]} has no effect with --trace: leave it out")


def inspected_arm(options: argparse.Namespace) -> ArmConfig:
    """The arm that `tailgate inspect` is asked about: one of an experiment, or a preset with flags as `serve` has."""
    if not options.experiment:
        return preset_arm(argparse.Namespace(**{**vars(options), "preset": options.arm, "name": ""}))
    given = [name for name, *_ in ARM_FLAGS if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f'{flag_of(given[0])} is for presets, but EXPERIMENT "{options.experiment}" is given: use --set, as with '
            "`tailgate run`"
        )
    experiment = load(options.experiment, settings=options.settings, needs_traffic=False)
    arm = next((arm for arm in experiment.arms if arm.name == options.arm), None)
    if arm is None:
        names = ", ".join(arm.name for arm in experiment.arms)
        raise ConfigError(f'--arm "{options.arm}" is not in experiment "{experiment.name}": use one of {names}')
    if not isinstance(arm, OwnArm):
        raise ConfigError(
            f'--arm "{options.arm}" is external (kind = "{arm.kind}"): only arms of tailgate are inspected'
        )
    return arm.config
