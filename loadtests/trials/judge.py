"""Interim analyses of a run: a process of its own makes them, and this module reads what they say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.interim import JOURNAL
from loadtests.page.tails import LinesTail
from loadtests.trials.processes import child_environment
from servers.processes import Child

_COMMAND = (sys.executable, "-P", "-m", "analysis.interim")
_GRACE_S = 2.0


class Judge:
    """Has the run in `run_dir` analysed after every block until `stop`. A process that ends early leaves a note."""

    def __init__(self, run_dir: Path) -> None:
        self._rows = LinesTail(run_dir / JOURNAL)  # a day has thousands: no line is read twice
        self._child = Child(
            "interim",
            [*_COMMAND, str(run_dir.resolve())],
            log_path=run_dir / "interim.log",
            environment=child_environment(),
        )
        self._last: Mapping[str, Any] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def failure(self) -> str | None:
        """Why there are no more interim analyses; None while they go on."""
        return None if self._child.poll() is None else f"the interim analyses ended: {self._child.log_tail(2)}"

    def last(self) -> Mapping[str, Any] | None:
        """The last interim analysis; None before the first."""
        for row in self._rows.new():
            self._last = row
        return self._last

    def stop(self) -> None:
        """Stop the process."""
        self._child.stop(_GRACE_S)
