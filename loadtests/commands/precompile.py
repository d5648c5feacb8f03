"""`tailgate precompile`: the compiled code of an arm in a file, for starts that find it ready."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from loadtests.commands.arm_flags import add_arm_flags, become
from loadtests.commands.command_line import CommandParser, add_experiment, add_set
from loadtests.commands.inspect import inspected_arm
from loadtests.trials.preflight import check_arm
from loadtests.trials.run_directory import check_writable
from servers.config import PRESETS, ArmConfig
from servers.fields import ConfigError


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate precompile`."""
    parser.describe(
        "Loads the arm, warms it up as it would be served, and writes what the compiler made to one file. A start\n"
        "whose arm has compile.artifact set to that file, here or on another machine of the same kind, finds its\n"
        "graphs and inductor's tuned kernels. The file is refused where torch, the device, the model's name or the\n"
        "policy is another. Torch unpickles what it holds: load only files that you trust like a program.\n\n"
        "Exit codes: 0 written, 2 bad usage or configuration, 1 it broke or was interrupted.",
        "  tailgate precompile --arm compiled-bucketed --model random:llama-3.2-1b --out bucketed.compiled\n"
        "  tailgate serve --preset compiled-bucketed --model random:llama-3.2-1b \\\n"
        "                 --set compile.artifact=bucketed.compiled\n"
        "  tailgate precompile canary.toml --arm buckets   to the file that the arm's compile.artifact names",
    )
    add_experiment(parser, nargs="?", default="")
    parser.add_argument(
        "--arm",
        "--preset",
        dest="arm",
        required=True,
        metavar="NAME",
        help=f"an arm of EXPERIMENT; without one a preset: {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--out", default="", metavar="FILE", help="where to write (default: the arm's compile.artifact)"
    )
    add_arm_flags(parser)
    add_set(parser, "compile.mode=max-autotune, or as `run` takes it with EXPERIMENT")


def main(options: argparse.Namespace) -> NoReturn:
    """This process becomes the one that compiles."""
    arm, path = precompiled_arm(options)
    check_arm(arm)
    check_writable(Path(path).parent)
    become("servers.precompile", arm, "", ["--out", path, *(["--json"] * options.json)])


def precompiled_arm(options: argparse.Namespace) -> tuple[ArmConfig, str]:
    """The arm to compile, without an artifact of its own, and the file to write. Raises ConfigError."""
    arm = inspected_arm(options)
    path = options.out or arm.compile.artifact
    if not path:
        raise ConfigError(f'arm "{arm.name}" has no compile.artifact and --out names none: add --out FILE')
    if Path(path).is_dir():
        raise ConfigError(f'--out "{path}" is a folder: give a file')
    if not arm.compile.enabled:
        raise ConfigError(f'arm "{arm.name}" compiles nothing (compile.enabled is false): choose a compiled one')
    if arm.compile.backend != "inductor":
        raise ConfigError(
            f'arm "{arm.name}" has compile.backend "{arm.compile.backend}", and only inductor keeps compiled code: '
            "choose another arm"
        )
    return replace(arm, compile=replace(arm.compile, artifact="")), path
