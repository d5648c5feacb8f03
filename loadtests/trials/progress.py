"""The display of a run on stderr: on a terminal its state in place, otherwise a line every 5 s; with --verbose a line
every second, and all that the run's processes log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from tailgate.loadtests.external.log_tail import LogTail
from tailgate.loadtests.trials.status import Status
from tailgate.servers.complaint import printable

PLAIN_EVERY_S = 5.0
VERBOSE_EVERY_S = 1.0
LIVE_EVERY_S = 0.25


def parts_of(status: Status, elapsed_s: float) -> list[str]:
    """Return the whole status: time and phase, the requests, and each arm or replica."""
    trial = f"trial {status.trial}/{status.trials} · " if status.trials > 1 else ""
    parts = [f"[{_clock(elapsed_s)}] · {trial}{status.phase} {status.detail}".rstrip()]
    load = status.load
    if not load.arms and not load.finished:
        return parts + [f"{name}: {state.text()}" for name, state in status.replicas.items()]
    of = f"/{status.planned}" if status.planned else ""
    parts.append(f"{load.finished}{of} requests of all arms" + (f", {load.failed} failed" if load.failed else ""))
    parts += [
        f"{name}, last 10 s: "
        + ("" if arm.ttft_p50_ms is None else f"ttft p50 {_ms(arm.ttft_p50_ms)} p99 {_ms(arm.ttft_p99_ms)} ")
        + f"e2e p99 {_ms(arm.e2e_p99_ms)}"
        for name, arm in load.arms.items()
    ]
    unwell = ((name, state) for name, state in status.replicas.items() if state.stage == "dead" or state.compiling)
    return parts + [f"{name} is {state.text()}" for name, state in unwell]


@contextmanager
def displayed(
    status: Status, *, verbosity: int = 0, stream: TextIO | None = None, every_s: float | None = None
) -> Iterator[None]:
    """Show `status` on `stream` until the end of the block; every phase and note is shown at least once.

    `verbosity` is -1 for nothing, and 1 for lines with those of the logs of the run.
    """
    if verbosity < 0:
        yield
        return
    console = Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    in_place = console.is_terminal and not console.is_dumb_terminal and not verbosity
    live = Live(console=console, auto_refresh=False) if in_place else None
    every_s = every_s or (LIVE_EVERY_S if in_place else VERBOSE_EVERY_S if verbosity else PLAIN_EVERY_S)
    ended = threading.Event()

    def show() -> None:
        began, logs = time.monotonic(), dict[Path, LogTail]()
        phase, notes, shown_at = "", 0, -every_s
        # A closed terminal or pipe must not break the run.
        with suppress(OSError, ValueError), live or nullcontext():
            while True:
                elapsed, last = time.monotonic() - began, ended.is_set()
                if status.phase != phase or elapsed - shown_at >= every_s:
                    phase, shown_at = status.phase, elapsed
                    parts = parts_of(status, elapsed)
                    if live is not None:
                        bar = [ProgressBar(status.planned, status.load.finished, width=60)] if status.planned else []
                        live.update(Group(Text("\n".join(parts)), *bar), refresh=True)
                    else:
                        console.print(" · ".join(parts))
                for note in status.notes[notes:]:
                    console.print(f"[{_clock(elapsed)}] {note}")
                    notes += 1
                if verbosity and status.run_dir is not None:
                    for line in _new_lines(status.run_dir, logs):
                        console.print(printable(line))
                if last and status.phase == phase:
                    return
                ended.wait(0.1)

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2.0)


def _new_lines(run_dir: Path, logs: dict[Path, LogTail]) -> Iterator[str]:
    """Yield the whole lines that the logs in `run_dir` have got since the last call, each with its log's name."""
    for path in sorted(run_dir.rglob("*.log")):
        if path not in logs:
            logs[path] = LogTail(path, at=0)
        yield from (f"{path.stem}: {line}" for line in logs[path].lines())


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
