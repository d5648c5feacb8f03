"""The display of a run on stderr: a live table on a terminal, otherwise a line every 5 s; with --verbose one every
second, and all that the run's processes log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailgate.loadtests.trials.status import Status
from tailgate.servers.complaint import printable

PLAIN_EVERY_S = 5.0
VERBOSE_EVERY_S = 1.0
LIVE_EVERY_S = 0.25


def plain_line(status: Status, elapsed_s: float) -> str:
    """Return the whole status on one line, for logs."""
    parts = [f"[{_clock(elapsed_s)}]"]
    if status.trials > 1:
        parts.append(f"trial {status.trial}/{status.trials}")
    parts.append(f"{status.phase} {status.detail}".rstrip())
    load = status.load
    if load.arms or load.finished:
        of = f"/{status.planned}" if status.planned else ""
        parts.append(f"{load.finished}{of} requests" + (f", {load.failed} failed" if load.failed else ""))
        parts += [
            f"{name} "
            + (f"ttft p50 {_ms(arm.ttft_p50_ms)} p99 {_ms(arm.ttft_p99_ms)} " if load.streams else "")
            + f"e2e p99 {_ms(arm.e2e_p99_ms)}"
            for name, arm in load.arms.items()
        ]
        parts += [f"{name} is dead" for name, state in status.replicas.items() if state.stage == "dead"]
        parts += [f"{name} is {state.text()}" for name, state in status.replicas.items() if state.compiling is not None]
    else:
        parts += [f"{name}: {state.text()}" for name, state in status.replicas.items()]
    return " · ".join(parts)


def live_table(status: Status, elapsed_s: float) -> Group:
    """Return the status as a table for a terminal."""
    head = Text.assemble(
        (f"{_clock(elapsed_s)} ", "dim"),
        (f"{status.phase} {status.detail}".rstrip(), "bold"),
        (f"  trial {status.trial} of {status.trials}" if status.trials > 1 else "", "dim"),
    )
    load = status.load
    if status.planned and (load.finished or load.arms):
        share = min(1.0, load.finished / status.planned)
        filled = round(share * 24)
        head.append(f"  {'━' * filled}", "green")
        head.append("━" * (24 - filled), "dim")
        head.append(f" {load.finished}/{status.planned} requests")
        if load.failed:
            head.append(f", {load.failed} failed", "red")
    table = _table("replica", "state", right=("compiles",))
    for name, state in status.replicas.items():
        style = {"dead": "red", "serving": "green", "ready": "green"}.get(state.stage, "")
        table.add_row(name, Text(state.text(), style=style), str(state.compiles))
    parts: list[Any] = [head, table]
    if load.arms:
        first = ("ttft p50", "ttft p99") if load.streams else ()
        heads = ("done", "failed", "in flight", *first, "e2e p50", "e2e p99")
        numbers = _table("arm, last 10 s", right=heads)
        for name, arm in load.arms.items():
            numbers.add_row(
                name,
                *(str(value) for value in (arm.finished, arm.failed, arm.inflight)),
                *(_ms(value) for value in (arm.ttft_p50_ms, arm.ttft_p99_ms) if load.streams),
                *(_ms(value) for value in (arm.e2e_p50_ms, arm.e2e_p99_ms)),
            )
        parts.append(numbers)
    parts += [Text(note, style="yellow") for note in status.notes[-5:]]
    parts += [Text(f"live page: {status.page}", style="cyan")] if status.page else []
    return Group(*parts)


def _table(*left: str, right: Sequence[str]) -> Table:
    """Return an empty table with columns aligned left and right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table


class Display:
    """While entered, `status` is shown on `stream`; every phase and note is shown at least once.

    `verbosity` is -1 for nothing, and 1 for lines with those of the logs of the run.
    """

    def __init__(
        self,
        status: Status,
        *,
        verbosity: int = 0,
        stream: TextIO | None = None,
        every_s: float | None = None,
    ) -> None:
        self._status = status
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._verbosity = verbosity
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal and not verbosity
        plain_s = VERBOSE_EVERY_S if verbosity else PLAIN_EVERY_S
        self._every_s = every_s or (LIVE_EVERY_S if self._live else plain_s)
        self._logged: dict[Path, int] = {}  # bytes shown of each log
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._verbosity >= 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._verbosity >= 0:
            self._thread.join(timeout=2.0)

    def _show(self) -> None:
        with suppress(OSError, ValueError):  # a closed terminal or pipe must not break the run
            if self._live:
                self._show_table()
            else:
                self._show_lines()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _show_table(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                last = self._ended.wait(self._every_s)
                live.update(live_table(self._status, self._elapsed_s()), refresh=True)
                if last:
                    return

    def _show_lines(self) -> None:
        phase, page, notes, shown_at = "", "", 0, -self._every_s
        while True:
            status, elapsed, last = self._status, self._elapsed_s(), self._ended.is_set()
            if status.phase != phase or elapsed - shown_at >= self._every_s:
                phase, shown_at = status.phase, elapsed
                print(plain_line(status, elapsed), file=self._stream, flush=True)
            if status.page != page:
                page = status.page
                print(f"[{_clock(elapsed)}] live page: {status.page}", file=self._stream, flush=True)
            for note in status.notes[notes:]:
                print(f"[{_clock(elapsed)}] {note}", file=self._stream, flush=True)
                notes += 1
            if self._verbosity > 0 and status.run_dir is not None:
                self._print_logs(status.run_dir)
            if last and status.phase == phase:
                return
            self._ended.wait(0.1)

    def _print_logs(self, run_dir: Path) -> None:
        """Print the whole lines that the logs in `run_dir` have got since the last call."""
        for path in sorted(run_dir.rglob("*.log")):
            try:
                with path.open("rb") as file:
                    file.seek(self._logged.get(path, 0))
                    text = file.read()
            except OSError:  # the next call reads it
                continue
            text = text[: text.rfind(b"\n") + 1]
            self._logged[path] = self._logged.get(path, 0) + len(text)
            for line in text.decode(errors="replace").splitlines():
                print(printable(f"{path.stem}: {line}"), file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
