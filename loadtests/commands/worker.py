"""`tailgate worker`: load from this host for a run on another one."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadtests.commands.command_line import CommandParser, whole
from loadtests.workers.remote import parse_master, work


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate worker`."""
    parser.describe(
        "Waits for `tailgate run` with traffic.remote_workers at --master, drives its share of each trial, and sends\n"
        "the records back from a file in --keep. Then it waits for the next trial, until Ctrl-C or --trials.\n"
        "Both need the same secret in the environment variable TAILGATE_CHANNEL_TOKEN: it closes and encrypts the\n"
        "channel between them. Tokens for arms are read here, from this host's environment or files, and never\n"
        "travel.",
        "  tailgate worker --master 10.0.0.5:5557\n"
        "  tailgate worker --master 10.0.0.5:5557 --keep /var/lib/tailgate --trials 3",
        json_help="",
    )
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="traffic.master_bind of the run")
    parser.add_argument(
        "--keep",
        default="tailgate-worker",
        metavar="DIR",
        help="records are written here before they are sent, by run and trial (default %(default)s)",
    )
    parser.add_argument(
        "--trials", type=whole(0, 10**6), default=0, metavar="N", help="end after N trials (default: never)"
    )


def main(options: argparse.Namespace) -> int:
    """Drives its share of each trial; the exit code."""
    return work(parse_master(options.master), keep=Path(options.keep), trials=options.trials)
