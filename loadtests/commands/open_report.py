"""`tailgate open`: a report in the browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tailgate.loadtests.commands.options import Json, Out, run_directory
from tailgate.servers import stdout
from tailgate.servers.complaint import ConfigError

REPORT = "report.html"
EXAMPLES = """\
  tailgate open
  tailgate open runs/20260101T120000Z-canary"""


def command(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run directory. Default: that of the newest report."),
    ] = None,
    out: Out = "runs",
    as_json: Json = False,
) -> int:
    """Open the newest report in the browser, or that of RUN.

    Prints the path of the report, and opens it if this machine has a screen.
    """
    if run is not None:
        report = run_directory(run) / REPORT
    elif reports := sorted(Path(out).glob(f"*/{REPORT}"), key=lambda path: path.stat().st_mtime_ns):
        report = reports[-1]
    else:
        raise ConfigError(f'--out "{out}" holds no report: `tailgate run demo` writes one, or give the run directory')
    if not report.is_file():
        raise ConfigError(f'"{report}" does not exist: `tailgate analyze {report.parent}` writes it')
    opened = _opened(report.resolve().as_uri())
    hint = "" if opened else "\nno browser here: copy the file to where one is; report.md next to it is plain text"
    stdout.write(f"{report}{hint}", {"report": str(report), "opened": opened}, as_json=as_json)
    return 0


def _opened(address: str) -> bool:
    """Open the address where a browser has a window: a text browser would take this terminal."""
    import webbrowser

    if sys.platform != "darwin" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        return False
    try:
        return webbrowser.open(address)
    except (webbrowser.Error, OSError):
        return False
