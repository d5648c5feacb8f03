"""The display of a run on stderr: on a terminal its state in place, otherwise a line every 5 s; with --verbose a line
every second, and all that the run's processes log."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

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
    parts.append(f"{load.finished}{of} requests" + (f", {load.failed} failed" if load.failed else ""))
    parts += [
        f"{name} "
        + (f"ttft p50 {_ms(arm.ttft_p50_ms)} p99 {_ms(arm.ttft_p99_ms)} " if load.streams else "")
        + f"e2e p99 {_ms(arm.e2e_p99_ms)}"
        for name, arm in load.arms.items()
    ]
    unwell = ((name, state) for name, state in status.replicas.items() if state.stage == "dead" or state.compiling)
    return parts + [f"{name} is {state.text()}" for name, state in unwell]


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
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._verbosity = verbosity
        in_place = self._console.is_terminal and not self._console.is_dumb_terminal and not verbosity
        self._live = Live(console=self._console, auto_refresh=False) if in_place else None
        self._every_s = every_s or (LIVE_EVERY_S if in_place else VERBOSE_EVERY_S if verbosity else PLAIN_EVERY_S)
        self._logged: dict[Path, int] = {}  # bytes shown of each log
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
        status, began = self._status, time.monotonic()
        phase, notes, shown_at = "", 0, -self._every_s
        # A closed terminal or pipe must not break the run.
        with suppress(OSError, ValueError), self._live or nullcontext():
            while True:
                elapsed, last = time.monotonic() - began, self._ended.is_set()
                if status.phase != phase or elapsed - shown_at >= self._every_s:
                    phase, shown_at = status.phase, elapsed
                    parts = parts_of(status, elapsed)
                    if self._live is not None:
                        self._live.update(Text("\n".join(parts)), refresh=True)
                    else:
                        self._console.print(" · ".join(parts))
                for note in status.notes[notes:]:
                    self._console.print(f"[{_clock(elapsed)}] {note}")
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
                self._console.print(printable(f"{path.stem}: {line}"))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
