"""`tailgate worker`: load from this host for a run on another one.

Locust does the work, in a process for each trial, because importing it patches the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tailgate.loadtests.commands.options import number
from tailgate.loadtests.workers.channel import TOKEN_VARIABLE, channel_token, locust
from tailgate.servers.address import host_port
from tailgate.servers.complaint import ConfigError, check_installed
from tailgate.servers.processes import Child

EXAMPLES = """\
  tailgate worker --master 10.0.0.5:5557
  tailgate worker --master 10.0.0.5:5557 --keep /var/lib/tailgate --trials 3"""


def command(
    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="traffic.master_bind of the run.")],
    keep: Annotated[
        str,
        typer.Option(metavar="DIR", help="Write the records here before they are sent, by run and trial."),
    ] = "tailgate-worker",
    trials: Annotated[
        int,
        typer.Option(metavar="N", parser=number(int, 0, 10**6), help="End after N trials; 0: never."),
    ] = 0,
) -> int:
    """Generate load from this host for a run on another one.

    Waits for a `tailgate run` with traffic.remote_workers at --master, sends its share of each trial's traffic, and
    returns the records. Both sides need the same secret in the environment variable TAILGATE_CHANNEL_TOKEN. Tokens for
    arms are read from this host's environment or files and never travel.
    """
    host, port = host_port(master, f'--master "{master}" is not HOST:PORT: give traffic.master_bind of the run')
    check_installed("locust")
    channel_token("tailgate worker")
    # A container's first process gets SIGTERM from its engine, and has no default that would end it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Path(keep).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--keep "{keep}" cannot be made ({error.strerror or error}): give another') from None
    address = ["--master-host", host, "--master-port", str(port)]
    command = [*locust(), "--worker", *address, "--only-summary", "--keep", keep]
    # Settings of Locust that were meant for others.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")}
    done = 0
    while not trials or done < trials:
        _wait_for(host, port)
        # SIGTERM, at which it stops in order: what it has recorded is kept, whatever ends this process.
        process = Child("locust", command, log_path=None, environment=environment, death_signal=signal.SIGTERM)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.ask_to_stop()
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()  # it stops in order
            raise
        finally:
            process.kill()
        done += code == 0
        if code:
            _print(
                f"the trial ended with exit code {code}: what was recorded is in {keep}; a master that never answered "
                f"has another {TOKEN_VARIABLE}"
            )
    return 0


def _wait_for(host: str, port: int) -> None:
    """Return once something listens at the address."""
    _print(f"waiting for a run at {host}:{port}; Ctrl-C ends")
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return
        time.sleep(0.5)


def _print(text: str) -> None:
    print(f"tailgate worker: {text}", file=sys.stderr, flush=True)
