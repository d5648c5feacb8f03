"""The machine monitor on the host of a load worker that shares no disk with the run."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailgate.loadtests.monitor.readings import Seen, Task, Unreadable, Watch, start_monitor, watch
from tailgate.servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from tailgate.servers.processes import describe_exit

_STOP_WITHIN_S = 5.0


class HostWatch:
    """Sample this host into `path` until `stop`.

    `host` is what the table calls it, `load` this process in it. Times have `offset_ns` added to this process's clock.
    """

    def __init__(self, path: Path, *, trial: int, host: str, sample_s: float, offset_ns: int) -> None:
        self._host = host
        self._child = start_monitor(
            Task(out=str(path), trial=trial, host=host, sample_s=sample_s),
            log_path=path.with_name("watcher.log"),
            environment={**os.environ, ANCHOR_VARIABLE: str(ANCHOR_NS + offset_ns)},
        )
        watch(self._child, Watch(name="load", pid=os.getpid()))

    def stop(self) -> dict[str, Any]:
        """Complete the samples on disk. Return what the monitor saw of the machine, as trial.json has it."""
        self._child.end_commands()
        self._child.wait(_STOP_WITHIN_S)
        code = self._child.kill()
        facts: dict[str, Any] = {"machines": {}, "unreadable": []}
        for message in self._child.receive()[0]:
            if isinstance(message, Seen):
                facts["machines"] = message.machines
            elif isinstance(message, Unreadable):
                facts["unreadable"].append(asdict(message))
        if code:
            why = f"its watcher ended with {describe_exit(code)}: see {self._child.log_path.parent} there"
            facts["unreadable"].append(asdict(Unreadable(host=self._host, name="watcher", what="samples", why=why)))
        return facts
