"""Serve the live page of a run, and write the two small files with what only the run itself knows.

`status.json` is what the run does now, replaced each second; `load.jsonl` gets a line a second with the live numbers
of each arm. A page that cannot start is one note: the run goes on without it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.page.server import PageServer
from tailgate.loadtests.trials.status import Status
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError

_EVERY_S = 1.0
_LAST_WAIT_S = 3.0
_MOST_NOTES = 60
_SHOWN = ("phase", "detail", "trial", "trials", "planned", "duration_s")
_SHOWN_OF_LOAD = ("finished", "failed", "t_s", "lag_ms")
OFF = "off"


def page_port(text: str) -> int | None:
    """Return the port of --page, 0 for a free one; None for `off`. Raises ConfigError."""
    if text == OFF:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise ConfigError(
            f'--page "{text}" is no port of this machine: give one such as 8080, 0 for a free one, or {OFF}'
        )
    return int(text)


class LivePage:
    """The page of the run whose `status` is given, served to this machine at `port` from `open` until `close`."""

    def __init__(self, port: int, status: Status) -> None:
        self._port, self._status = port, status
        self.url = ""  # while it is served
        self._run_dir = Path()
        self._server: PageServer | None = None
        self._began_ns = now_ns()
        self._written_load_s = -1.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="live-page", daemon=True)

    def open(self, run_dir: Path) -> None:
        """Serve the page of the run in `run_dir`, and note its address."""
        self._run_dir = run_dir
        try:
            self._server = PageServer(run_dir, self._port)
        except OSError as error:
            why = error.strerror or error
            self._status.note(f"there is no live page, and the run goes on: port {self._port}: {why}")
            return
        self.url = f"http://127.0.0.1:{self._server.port}/"
        self._status.note(f"live page: {self.url}")
        self._write()
        self._server.open()
        self._thread.start()

    def close(self, ended: Mapping[str, Any]) -> None:
        """Show browsers how the run `ended`, and stop the page."""
        if self._server is None:
            return
        self._closing.set()
        self._thread.join()
        self._write(ended)
        self._server.finish(_LAST_WAIT_S)
        self._server.close()

    def _write_until_closed(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._write()

    def _write(self, ended: Mapping[str, Any] | None = None) -> None:
        status, load, at_ns = self._status, self._status.load, now_ns()
        replicas = {
            name: {**asdict(state), "text": state.text(), "running": state.running(at_ns)}
            for name, state in dict(status.replicas).items()
        }
        content = {
            **{"at_ns": at_ns, "began_ns": self._began_ns, **{name: getattr(status, name) for name in _SHOWN}},
            **{"replicas": replicas, "load": {name: getattr(load, name) for name in _SHOWN_OF_LOAD}},
            **{"notes": status.notes[-_MOST_NOTES:], "ended": ended},
        }
        with suppress(OSError, ValueError):
            write_document(self._run_dir / "status.json", content)
        if not load.arms or load.t_s == self._written_load_s:
            return
        self._written_load_s = load.t_s
        line = {"at_ns": at_ns, "trial": status.trial, "arms": {name: asdict(arm) for name, arm in load.arms.items()}}
        with suppress(OSError, ValueError), (self._run_dir / "load.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
