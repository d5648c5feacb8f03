"""The looks at a run while it goes on: a process of its own makes them, and here is read what they say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.looks.journal import JOURNAL
from loadtests.page.tails import DocumentsTail
from loadtests.trials.processes import Child, child_environment

_COMMAND = (sys.executable, "-P", "-m", "analysis.looks")
_GRACE_S = 2.0


class Judge:
    """Looks at the run in `run_dir` after every block until `stop`. One that ends early leaves a note and no looks."""

    def __init__(self, run_dir: Path) -> None:
        self._looks = DocumentsTail(run_dir / JOURNAL)  # a day has thousands: no line is read twice
        self._child = Child(
            "looks",
            [*_COMMAND, str(run_dir.resolve())],
            log_path=run_dir / "looks.log",
            environment=child_environment(),
        )
        self._last: Mapping[str, Any] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def failure(self) -> str | None:
        """Why there are no more looks; None while they go on."""
        return None if self._child.poll() is None else f"the run is not looked at any more: {self._child.log_tail(2)}"

    def last(self) -> Mapping[str, Any] | None:
        """The last look; None before the first."""
        for look in self._looks.new():
            self._last = look
        return self._last

    def stop(self) -> None:
        """No process looks any more."""
        self._child.stop(_GRACE_S)

    def kill(self) -> None:
        """The same at once. Safe in a signal handler."""
        self._child.kill_now()
