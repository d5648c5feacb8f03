"""`tailgate provider`: the judge of a rollout as an HTTP service for Argo Rollouts and Flagger."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time

from analysis.wording import counted
from loadtests.commands.command_line import CommandParser, duration, run_directory
from loadtests.commands.exits import stopping
from loadtests.page.serving import FEWEST_CHARACTERS, is_loopback
from loadtests.provider.observed import Observed
from loadtests.provider.server import JUDGEMENT, ProviderServer
from servers import stdout
from servers.address import host_port, joined
from servers.fields import ConfigError
from servers.security import check_named, token_from_file

_DEFAULT = "127.0.0.1:9466"


def add_arguments(parser: CommandParser) -> None:
    """`parser` reads the command line of `tailgate provider`."""
    parser.describe(
        "Answers PASS, FAIL or INCONCLUSIVE for the candidate of a run that goes on, from its directory, until\n"
        "Ctrl-C. Whoever moves the weights asks: Argo Rollouts by a web metric (GET /v1/judgement), Flagger by\n"
        "webhooks (POST /v1/flagger/HOOK). A death, a long compile or a burst of errors is FAIL at once; without a\n"
        "fresh look at the run nothing is PASS. It moves no traffic itself.",
        "  tailgate provider runs/20260101T120000Z-canary\n"
        "  tailgate provider runs --listen 0.0.0.0:9466 --token-file /secrets/token    # the newest run in the folder\n"
        "  curl 'http://127.0.0.1:9466/v1/judgement?for=step&window=5m'",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="a run that goes on, or the folder in which the newest one is"
    )
    parser.add_argument(
        "--listen", default=_DEFAULT, metavar="HOST:PORT", help="where it is asked (default %(default)s)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="who asks sends the token in this file; needed beyond this machine"
    )
    parser.add_argument(
        "--stale-after",
        type=duration,
        metavar="TIME",
        help="a look at the run counts for so long (default: four blocks, and a minute at least)",
    )


def main(options: argparse.Namespace) -> int:
    """Answers until it is stopped; the exit code."""
    folder = run_directory(options.run_dir)
    host, port = host_port(options.listen, f'--listen "{options.listen}" is not HOST:PORT: give {_DEFAULT}', lowest=0)
    token = _token(host, options.token_file)
    observed = Observed(folder, stale_s=options.stale_after)
    try:
        server = ProviderServer(observed, host, port, token=token, note=_note)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise ConfigError(f"--listen {joined(host, port)} cannot be used ({reason}): give another address") from None
    stopped = threading.Event()
    with server, stopping(stopped.set, lambda: None, _note):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        url = f"http://{server.address}"
        stdout.write("", {"url": url, "run_dir": str(folder)}, as_json=options.json)
        _note(f"answering for {folder} at {url}{JUDGEMENT}; Ctrl-C ends")
        stopped.wait()
        server.shutdown()
    return 0


def _token(host: str, path: str | None) -> str:
    """The token of who may ask; empty where only this machine can. ConfigError where there must be one."""
    check_named({"--token-file": path})
    if path is None:
        if is_loopback(host):
            return ""
        raise ConfigError(f"--listen {host} is not this machine alone: add --token-file with a token for who may ask")
    token = token_from_file(path, key="--token-file")
    if len(token) < FEWEST_CHARACTERS:
        raise ConfigError(
            f'--token-file "{path}" holds {counted(len(token), "character")}; the least is {FEWEST_CHARACTERS}: make '
            "one with `openssl rand -hex 16`"
        )
    return token


def _note(text: str) -> None:
    # Nobody may be left to read it.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
