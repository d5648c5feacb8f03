"""`tailgate locust`: Locust with one of tailgate's locustfiles, wherever tailgate is installed."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from tailgate.loadtests.workers.channel import locust
from tailgate.servers.complaint import check_installed

EXAMPLES = """\
  tailgate locust chat --host localhost:8080
  tailgate locust embed --host localhost:50051 --headless -u 4 -r 4 -t 60s
  tailgate locust chat --list"""

# All that follows the locustfile is Locust's, --help too.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def command(
    context: typer.Context,
    locustfile: Annotated[
        Literal["chat", "embed"],
        typer.Argument(metavar="LOCUSTFILE", help="chat for models that generate, embed for encoders."),
    ],
) -> None:
    """Generate load with Locust by hand.

    Runs `locust -f loadtests/chat.py` or `loadtests/embed.py` of the installed package with the options that follow.
    """
    check_installed("locust")
    os.execv(sys.executable, [*locust(locustfile), *context.args])
