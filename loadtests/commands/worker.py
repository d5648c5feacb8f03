"""`tailgate worker`: load from this host for a run on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtests.commands.options import file_name, whole

EXAMPLES = """\
  tailgate worker --master 10.0.0.5:5557
  tailgate worker --master 10.0.0.5:5557 --keep /var/lib/tailgate --trials 3"""


def command(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="traffic.master_bind of the run.")],
    keep: Annotated[
        str,
        typer.Option(
            metavar="DIR", parser=file_name, help="Write the records here before they are sent, by run and trial."
        ),
    ] = "tailgate-worker",
    trials: Annotated[
        int,
        typer.Option(metavar="N", parser=whole(0, 10**6), help="End after N trials; 0: never."),
    ] = 0,
) -> int:
    """Generate load from this host for a run on another one.

    Waits for a `tailgate run` with traffic.remote_workers at --master, sends its share of the traffic of each
    trial, and returns the records. Both sides need the same secret in the environment variable
    TAILGATE_CHANNEL_TOKEN, which encrypts the channel between them. Tokens for arms are read from this host's
    environment or files and never travel.
    """
    from loadtests.workers.remote import parse_master, work

    return work(parse_master(master), keep=Path(keep), trials=trials)
