"""A load worker on a host of its own: waits for the master of a run, drives a share of a trial, waits again.

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

from loadtests.workers.channel_token import TOKEN_VARIABLE, channel_token
from servers.address import host_port
from servers.complaint import ConfigError
from servers.processes import Child

_LOCUST = (sys.executable, "-P", "-m", "locust", "-f", str(Path(__file__).resolve().parents[1] / "chat.py"))
_TRY_EVERY_S = 0.5
_PRINT_EVERY_S = 60.0


def parse_master(text: str) -> tuple[str, int]:
    """(host, port) of "host:port"."""
    return host_port(text, f'--master "{text}" is not HOST:PORT: give traffic.master_bind of the run')


def work(master: tuple[str, int], *, keep: Path, trials: int) -> int:
    """The exit code, after `trials` trials, or after a Ctrl-C or SIGTERM where that is 0. Records stay in `keep`."""
    channel_token("tailgate worker")
    # A container's first process gets SIGTERM from its engine, and has no default that would end it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--keep "{keep}" cannot be made ({error.strerror or error}): give another') from None
    host, port = master
    done = 0
    while not trials or done < trials:
        _wait_for(host, port)
        command = [*_LOCUST, "--worker", "--master-host", host, "--master-port", str(port), "--only-summary"]
        # Settings of Locust that were meant for others.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOCUST_")}
        # SIGTERM, at which it stops in order: what it has recorded is kept, whatever ends this process.
        command += ["--keep", str(keep)]
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
        if code == 0:
            done += 1
        else:
            _print(
                f"the trial ended with exit code {code}: what was recorded is in {keep}; a master that never answered "
                f"has another {TOKEN_VARIABLE}"
            )
    return 0


def _wait_for(host: str, port: int) -> None:
    """Something listens at the address."""
    last_s = 0.0
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return
        if time.monotonic() - last_s > _PRINT_EVERY_S or not last_s:
            last_s = time.monotonic()
            _print(f"waiting for a run at {host}:{port}; Ctrl-C ends")
        time.sleep(_TRY_EVERY_S)


def _print(text: str) -> None:
    print(f"tailgate worker: {text}", file=sys.stderr, flush=True)
