"""Looks at a run that is judged once, at its end: made by a process of their own, and only while somebody watches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from servers.launcher import launched

# -P: a directory called `analysis` where the user stands must not be imported instead.
_COMMAND = (sys.executable, "-P", "-m", "analysis.interim")
_GRACE_S = 2.0


class Preview:
    """The process that looks at the run in `run_dir`, while it is wanted."""

    def __init__(self, run_dir: Path) -> None:
        self._command = [*_COMMAND, str(run_dir.resolve()), "--preview"]
        self._process: subprocess.Popen[bytes] | None = None

    def want(self, wanted: bool) -> None:
        """The process runs, or is gone. One that ended by itself is not started again."""
        if wanted and self._process is None:
            self._process = subprocess.Popen(
                launched(self._command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        elif not wanted and self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
