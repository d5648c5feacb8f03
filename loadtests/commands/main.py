"""The console script `tailgate`: run | ramp | provider | frontier | parity | inspect | serve | precompile | split |
worker | analyze | compare. Each command is a module of this package; only that of the command in hand is imported.

Exit codes of run, parity, analyze and compare: 0 PASS, 3 INCONCLUSIVE, 99 FAIL, 2 bad usage or configuration, 1 the run
itself broke or was interrupted. Results go to stdout, as `servers.stdout` says: words for a person at a terminal,
one JSON object as the last line for a program. Every other word about progress goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from loadtests.commands.command_line import CommandParser, give_types
from loadtests.commands.exits import EXIT_BROKE, EXIT_USAGE, complain
from servers.complaint import fault
from servers.fields import ConfigError

COMMANDS = {
    "run": "run an experiment and judge it",
    "ramp": "move traffic to a candidate step by step, and back when something happens",
    "provider": "answer for a run's candidate where Argo Rollouts or Flagger moves the traffic",
    "frontier": "find out which policy to ship at which load",
    "parity": "say whether the arms of an experiment compute the same",
    "inspect": "list the graphs of an arm and the shapes that will recompile, or forecast them from a trace",
    "serve": "serve one arm over gRPC",
    "precompile": "compile an arm once, for starts that find its code ready",
    "split": "split traffic over arms with Envoy, in the foreground",
    "worker": "drive load from this host for a run on another one",
    "analyze": "judge a run again, or several runs as one",
    "compare": "compare two runs over time, such as last week's release and this",
}


def main(arguments: Sequence[str] | None = None, *, arm_command: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. `arm_command` replaces what starts an arm, for tests."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not raise
    words = sys.argv[1:] if arguments is None else arguments
    folder: Path | None = None
    try:
        parser = build_parser(next((word for word in words if not word.startswith("-")), ""))
        options = parser.parse_args(words, argparse.Namespace(arm_command=arm_command))
        folder = Path(options.run_dir) if getattr(options, "run_dir", "") else None
        code: int = _module(options.command).main(options)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_BROKE)
    except BrokenPipeError:
        # The reader of stdout is gone (`tailgate ... | head`): nothing more can be shown.
        _leave_stdout()
        return EXIT_BROKE
    except Exception as error:
        if isinstance(error, OSError):
            _leave_stdout()
        return complain(fault(error, folder), EXIT_BROKE)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; with a `command`, the arguments of that one alone, and the names of the others."""
    parser = CommandParser(
        prog="tailgate",
        description="May this compiled model server replace the eager one, under our traffic, within our SLA?",
        epilog="examples:\n"
        "  tailgate run demo                       three arms on this CPU, 90 s of traffic, a verdict\n"
        "  tailgate run canary.toml --trace conv.csv\n"
        "  tailgate frontier demo                  which policy to ship at which load, in ten minutes\n"
        "  tailgate parity demo                    do the arms compute the same?\n"
        "  tailgate inspect --arm compiled-naive   what will recompile, before any load\n"
        "  tailgate analyze runs/20260101T120000Z-canary\n"
        "  tailgate compare baselines/main runs/20260108T120000Z-canary\n"
        "  tailgate inspect --trace conv.csv       how many compiles, how much padding, before any GPU time\n"
        "\n"
        "`tailgate COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"tailgate {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, summary in COMMANDS.items():
        one = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if command in (None, name):
            _module(name).add_arguments(one)
            give_types(one)
    return parser


def _version() -> str:
    try:
        return metadata.version("tailgate")
    except metadata.PackageNotFoundError:
        return "of a folder that is not installed"


def _module(command: str) -> Any:
    return importlib.import_module(f"loadtests.commands.{command}")


def _leave_stdout() -> None:
    """What stdout still holds is not written again at the end of the process."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


if __name__ == "__main__":
    sys.exit(main())
