"""`tailgate provider`: the judge of a rollout as an HTTP service for Argo Rollouts and Flagger."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Annotated

import typer

from analysis.wording import counted
from loadtests.commands.exits import stopping
from loadtests.commands.options import Json, duration, file_name, run_directory
from servers import stdout
from servers.address import host_port, joined
from servers.fields import ConfigError
from servers.security import check_named, token_from_file

_DEFAULT = "127.0.0.1:9466"
EXAMPLES = """\
  tailgate provider runs/20260101T120000Z-canary
  tailgate provider runs --listen 0.0.0.0:9466 --token-file /secrets/token    # the newest run in the folder
  curl 'http://127.0.0.1:9466/v1/judgement?for=step&window=5m'"""


def command(
    run_dir: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR", parser=file_name, help="A run in progress, or the folder that holds the newest one."
        ),
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")] = _DEFAULT,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            parser=file_name,
            help="Requests must carry the token in this file. Required beyond this machine.",
        ),
    ] = None,
    stale_after: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=duration,
            help="How long an interim analysis counts. Default: four blocks, and a minute at least.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Judge a rollout for Argo Rollouts or Flagger.

    Answers PASS, FAIL or INCONCLUSIVE for the candidate of a run in progress, from its directory, until Ctrl-C. The
    controller that moves the weights asks: Argo Rollouts by a web metric (GET /v1/judgement), Flagger by webhooks (POST
    /v1/flagger/HOOK). A crash, a long compile or a burst of errors is FAIL at once; without a recent interim analysis
    nothing is PASS. It moves no traffic itself.
    """
    from loadtests.provider.observed import Observed
    from loadtests.provider.server import JUDGEMENT, ProviderServer

    folder = run_directory(run_dir)
    host, port = host_port(listen, f'--listen "{listen}" is not HOST:PORT: give {_DEFAULT}', lowest=0)
    token = _token(host, token_file)
    observed = Observed(folder, stale_s=stale_after)
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
        stdout.write("", {"url": url, "run_dir": str(folder)}, as_json=as_json)
        _note(f"answering for {folder} at {url}{JUDGEMENT}; Ctrl-C ends")
        stopped.wait()
        server.shutdown()
    return 0


def _token(host: str, path: str | None) -> str:
    """Return the token that requests must carry, "" where only this machine can ask. Raises ConfigError."""
    from loadtests.page.serving import FEWEST_CHARACTERS, is_loopback

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
    # stderr may be closed.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
