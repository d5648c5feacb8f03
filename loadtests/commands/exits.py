"""What commands have on stderr: one line where they failed, and a sign that they work. And their exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tailgate.servers import stdout
from tailgate.servers.complaint import one_line
from tailgate.servers.processes import kill_children

EXIT_BROKE = 1
EXIT_USAGE = 2
EXIT_OPEN = 3  # as of a run that is INCONCLUSIVE


def complain(message: str, code: int) -> int:
    """Write `message` to stderr as one line; return `code`."""
    with contextlib.suppress(OSError):  # stderr may be closed or full: the exit code remains
        print(f"tailgate: {one_line(message)}", file=sys.stderr)
    return code


def without_verdict(run_dir: Path, ended: Mapping[str, Any], code: int = EXIT_BROKE, *, as_json: bool) -> int:
    """Write the JSON line for programs that the run has no verdict, and how it `ended`; return `code`."""
    line = {"verdict": None, "run_dir": str(run_dir), "report": None, "exit_code": code}
    stdout.write("", {**line, **ended}, as_json=as_json)
    return code


@contextlib.contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show at a terminal that something goes on; print nothing elsewhere, nor if `quiet`."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def stopping(interrupt: Callable[[], None], note: Callable[[str], None]) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM stop in order; a second one kills every child and ends this process at once."""
    signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            interrupt()
            note("stopping in order; Ctrl-C again kills at once")
            return
        kill_children()
        os._exit(EXIT_BROKE)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
