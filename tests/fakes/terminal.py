"""A person at a terminal: a command whose stdout is a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.patience import PATIENCE_S
from tests.fakes.whole_run import ROOT

__all__ = ["ROOT", "at_terminal", "tailgate"]


def at_terminal(
    code: str, folder: Path, *, columns: int = 80, stop_at: str = "", within_s: float = 120.0
) -> tuple[int, list[str], str]:
    """Return the exit code, the lines on stdout and stderr of Python `code` at a terminal of so many columns.

    It is interrupted as by Ctrl-C once stderr matches `stop_at`.
    """
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    log = folder / "terminal-stderr.txt"
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "xterm"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stdout=terminal, stderr=stderr, env=environment
        )
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + within_s
    try:
        while True:
            assert time.monotonic() < deadline, f"still running: {shown!r} {log.read_text()}"
            if stop_at and re.search(stop_at, log.read_text()):
                process.send_signal(signal.SIGINT)
                stop_at = ""
            if select.select([master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # Linux says EIO where nobody holds the other end any more
                    if part := os.read(master, 65536):
                        shown += part
                        continue
                break
    finally:
        if process.poll() is None and time.monotonic() >= deadline:
            process.kill()
        os.close(master)
    return process.wait(timeout=PATIENCE_S), shown.decode().replace("\r\n", "\n").splitlines(), log.read_text()


def tailgate(*arguments: str, arm_command: Sequence[str] = ()) -> str:
    """Return Python code that runs the command line, with `arm_command` in place of what starts an arm."""
    replaced = f", arm_command={list(arm_command)!r}" if arm_command else ""
    return f"import sys; from loadtests.commands.main import main; sys.exit(main({list(arguments)!r}{replaced}))"
