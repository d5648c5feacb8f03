"""The machine monitor on the host of a load worker that shares no disk with the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from servers.processes import launched

# By its name and not imported: what a trial has watched lies above this floor.
_WATCHER = (sys.executable, "-P", "-m", "loadtests.monitor")
_STOP_WITHIN_S = 5.0


class HostWatch:
    """Sample this host into `path` until `stop`.

    `host` is what the table calls it, `load` this process in it. Times have `offset_ns` added to this process's clock.
    """

    def __init__(self, path: Path, *, trial: int, host: str, sample_s: float, offset_ns: int) -> None:
        self._path = path
        self._host = host
        command = [*_WATCHER, "--out", str(path), "--trial", str(trial), "--host", host, "--sample-s", str(sample_s)]
        with path.with_name("watcher.log").open("ab") as log:
            self._process = subprocess.Popen(
                launched(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, ANCHOR_VARIABLE: str(ANCHOR_NS + offset_ns)},
                start_new_session=True,  # Ctrl-C reaches the worker alone, which still ships what was seen
            )
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"name": "load", "pid": os.getpid()}) + "\n")
            self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """Complete the samples on disk. Return what the watcher saw of the machine, as trial.json has it."""
        try:
            said, _ = self._process.communicate(timeout=_STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            said, _ = self._process.communicate()
        facts: dict[str, Any] = {"machines": {}, "unreadable": [], "gaps": []}
        for line in said.splitlines():
            with suppress(ValueError):
                message = json.loads(line)
                facts |= {"machines": message["Seen"]["machines"]} if "Seen" in message else {}
                facts["unreadable"] += [message["Unreadable"]] if "Unreadable" in message else []
        if self._process.returncode:
            why = f"its watcher ended with exit code {self._process.returncode}: see {self._path.parent} there"
            facts["gaps"].append({"host": self._host, "at_ns": None, "why": why})
        return facts
