"""Serve the live page of a run, and write the two small files with what only the run itself knows.

`status.json` is what the run does now, replaced each second; `load.jsonl` gets a line a second with the live numbers
of each arm. A page that cannot start is one note: the run goes on without it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import write_document
from tailgate.loadtests.page.server import PageServer
from tailgate.loadtests.trials.status import Status
from tailgate.servers.clock import now_ns

_START_S, _EVERY_S = 0.1, 1.0
_LAST_WAIT_S = 3.0
_MOST_NOTES = 60
_SHOWN = ("phase", "detail", "trial", "trials", "planned", "duration_s")
_SHOWN_OF_LOAD = ("finished", "failed", "t_s", "lag_ms")


@contextmanager
def live_page(status: Status, port: int, ended: Mapping[str, Any]) -> Iterator[None]:
    """Serve the page of the run behind `status` to this machine at `port`, from when its directory is there.

    At the end of the block show browsers how the run `ended`.
    """
    closing = threading.Event()
    thread = threading.Thread(target=_serve, args=(status, port, ended, closing), name="live-page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def _serve(status: Status, port: int, ended: Mapping[str, Any], closing: threading.Event) -> None:
    began_ns, written_s = now_ns(), -1.0
    while (run_dir := status.run_dir) is None:
        if closing.wait(_START_S):
            return
    try:
        server = PageServer(run_dir, port)
    except OSError as error:
        status.note(f"there is no live page, and the run goes on: port {port}: {error.strerror or error}")
        return
    status.note(f"live page: http://127.0.0.1:{server.port}/")
    _write_status(run_dir, status, began_ns)
    server.open()
    last = False
    while not last:
        last = closing.wait(_EVERY_S)
        _write_status(run_dir, status, began_ns, ended if last else None)
        written_s = _append_load(run_dir, status, written_s)
    server.finish(_LAST_WAIT_S)
    server.close()


def _write_status(run_dir: Path, status: Status, began_ns: int, ended: Mapping[str, Any] | None = None) -> None:
    load = status.load
    replicas = {name: {**asdict(state), "text": state.text()} for name, state in dict(status.replicas).items()}
    content = {
        **{"at_ns": now_ns(), "began_ns": began_ns, **{name: getattr(status, name) for name in _SHOWN}},
        **{"replicas": replicas, "load": {name: getattr(load, name) for name in _SHOWN_OF_LOAD}},
        **{"notes": status.notes[-_MOST_NOTES:], "ended": ended},
    }
    with suppress(OSError, ValueError):
        write_document(run_dir / "status.json", content)


def _append_load(run_dir: Path, status: Status, written_s: float) -> float:
    """Append the live numbers to load.jsonl if there are newer ones than `written_s`; return of when they are."""
    load = status.load
    if not load.arms or load.t_s == written_s:
        return written_s
    arms = {name: asdict(arm) for name, arm in load.arms.items()}
    with suppress(OSError, ValueError), (run_dir / "load.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at_ns": now_ns(), "trial": status.trial, "arms": arms}, separators=(",", ":")) + "\n")
    return load.t_s
