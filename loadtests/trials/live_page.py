"""Serve the live page of a run: its process, and the two small files with what only the orchestrator knows.

`status.json` is what the run does now, replaced each second; `load.jsonl` gets a line a second with the live numbers
of each arm. A page that cannot start, or that dies, is one note: the run never waits for it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.records.documents import write_document
from loadtests.page.serving import TOKEN_VARIABLE, Served, page_token
from loadtests.trials.processes import child_environment
from loadtests.trials.status import Status
from servers.address import host_port
from servers.clock import now_ns
from servers.processes import Child, messages_of

# -P: a directory called `loadtests` where the user stands must not be imported instead.
_COMMAND = (sys.executable, "-P", "-m", "loadtests.page")
_EVERY_S = 1.0
_STOP_GRACE_S = 5.0
_MOST_NOTES = 60
OFF = "off"
DEFAULT = "127.0.0.1:0"


def page_address(text: str) -> tuple[str, int] | None:
    """Return (host, port) of --page, port 0 for a free one; None for `off`. Raises ConfigError."""
    wrong = f'--page "{text}" is not HOST:PORT: give one such as 127.0.0.1:8080, port 0 for a free one, or {OFF}'
    return None if text == OFF else host_port(text, wrong, lowest=0)


class LivePage:
    """The page of the run whose `status` is given, served at `host`:`port` from `open` until `close`.

    Raises ConfigError for a token that cannot be used.
    """

    def __init__(self, host: str, port: int, status: Status) -> None:
        self._address = ("--host", host, "--port", str(port))
        self._status = status
        self._token, self._is_new_token = page_token(host)
        self._run_dir = Path()
        self._child: Child | None = None
        self._began_ns = now_ns()
        self._written_load_s = -1.0
        self._noted = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="live-page", daemon=True)

    def open(self, run_dir: Path) -> None:
        """Start to serve the page of the run in `run_dir`; its address comes into the status once it listens.

        Call it from a thread that lives as long as the run.
        """
        self._run_dir = run_dir
        command = [*_COMMAND, str(run_dir.resolve()), *self._address]
        environment = child_environment() | ({TOKEN_VARIABLE: self._token} if self._token else {})
        log = run_dir / "logs" / "page.log"
        try:
            self._child = Child("page", command, log_path=log, environment=environment, parse=messages_of(Served))
        except OSError as error:
            self._note(str(error))
            return
        self._write()
        self._thread.start()

    def close(self, ended: Mapping[str, Any]) -> None:
        """Show browsers how the run `ended`, and stop the page. A second call does nothing."""
        if self._child is None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=_STOP_GRACE_S)
        self._write(ended)
        with suppress(OSError):
            self._child.stop(_STOP_GRACE_S)

    @property
    def pid(self) -> int | None:
        """The page's process id; None before `open`."""
        return None if self._child is None else self._child.pid

    def _write_until_closed(self) -> None:
        written_s = 0.0
        while not self._closing.wait(0.1):
            self._watch()
            if time.monotonic() - written_s >= _EVERY_S:
                self._write()
                written_s = time.monotonic()

    def _watch(self) -> None:
        """Take the address that the page prints, and note its end."""
        assert self._child is not None
        messages, ended = self._child.hear()
        for message in messages:
            assert isinstance(message, Served)
            self._status.page = f"{message.url}?token={self._token}" if self._is_new_token else message.url
        if ended is not None:
            self._note(f"it {self._child.ending(ended)}")

    def _note(self, why: str) -> None:
        if not self._noted:
            self._noted = True
            self._status.note(f"there is no live page, and the run goes on: {why}")

    def _write(self, ended: Mapping[str, Any] | None = None) -> None:
        status, load = self._status, self._status.load
        content = {
            "at_ns": now_ns(),
            "began_ns": self._began_ns,
            **{name: getattr(status, name) for name in ("phase", "detail", "trial", "trials", "planned", "duration_s")},
            "replicas": {
                name: {
                    "stage": state.stage,
                    "text": state.text(),
                    "running": state.running(now_ns()),
                    "compiling": asdict(compiling) if (compiling := state.compiling) is not None else None,
                }
                for name, state in dict(status.replicas).items()
            },
            "load": {"finished": load.finished, "failed": load.failed, "t_s": load.t_s},
            "notes": status.notes[-_MOST_NOTES:],
            "ended": None if ended is None else dict(ended),
        }
        with suppress(OSError, ValueError):
            write_document(self._run_dir / "status.json", content)
        if not load.arms or load.t_s == self._written_load_s:
            return
        self._written_load_s = load.t_s
        arms = {name: asdict(arm) for name, arm in load.arms.items()}
        line = {"at_ns": now_ns(), "trial": status.trial, "t_s": load.t_s, "arms": arms}
        with suppress(OSError, ValueError), (self._run_dir / "load.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
