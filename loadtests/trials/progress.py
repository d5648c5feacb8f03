"""What a run is doing right now, and its display on stderr: a live table on a terminal, otherwise a line every 5 s."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtests.trials.under_way import UnderWay
from servers.clock import now_ns

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.25


@dataclass(slots=True)
class ReplicaState:
    """Where one server process stands: waiting | starting | load | warmup | ready | dead."""

    stage: str = "waiting"
    done: int = 0
    total: int = 0
    detail: str = ""
    compiles: int = 0
    compiling: UnderWay | None = None  # while it serves

    def text(self) -> str:
        """Such as "warm-up 2/5 4x64"."""
        if self.compiling is not None:
            return self.compiling.text(now_ns())
        if self.stage == "warmup":
            counted = f" {self.done}/{self.total}" if self.total else ""
            return f"warm-up{counted} {self.detail}".rstrip()
        names = {"load": "loading", "serving": "ready"}
        return names.get(self.stage, self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLoad:
    """Live numbers of one arm; quantiles over the last seconds, None while there is no answer."""

    finished: int = 0
    failed: int = 0
    inflight: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    e2e_p50_ms: float | None = None
    e2e_p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Live numbers of the load generator, all its processes together."""

    finished: int = 0
    failed: int = 0
    t_s: float = 0.0
    arms: Mapping[str, ArmLoad] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether answers have first tokens, as far as any answer shows: a vector has none."""
        arms = self.arms.values()
        return any(arm.ttft_p50_ms is not None for arm in arms) or all(arm.e2e_p50_ms is None for arm in arms)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    """Where a process of the trial shows its metrics to Prometheus."""

    address: str  # "host:port", or the path of a Unix socket
    path: str


@dataclass(slots=True)
class Status:
    """What the orchestrator and its threads write and the display reads. Plain attributes, each set in one go.

    `pages` are those of the trial's processes, by name.
    """

    phase: str = "preparing"
    detail: str = ""  # of the phase; its change alone starts no new line
    trial: int = 1
    trials: int = 1
    planned: int = 0
    duration_s: float = 0.0
    replicas: dict[str, ReplicaState] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    page: str = ""  # address of the live page, with its token where one was made for whoever may see it
    notes: list[str] = field(default_factory=list)
    run_dir: Path | None = None
    pages: Mapping[str, MetricsPage] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """One line for the user that stays on the screen, such as an arm's death."""
        self.notes.append(text)


def read_load(folder: Path) -> Load:
    """The live numbers in the `progress-<worker>.json` files of `folder`; a file that is not there yet counts as zeros.

    Over several load processes the middle quantile is the mean weighted by answers, and the 99th the worst.
    """
    reports = []
    for path in sorted(folder.glob("progress-*.json")):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text(encoding="utf-8")))
    names = sorted({name for report in reports for name in report.get("arms", {})})
    return Load(
        finished=sum(report.get("finished", 0) for report in reports),
        failed=sum(report.get("failed", 0) for report in reports),
        t_s=max((report.get("t_s", 0.0) for report in reports), default=0.0),
        arms={name: _merged([report["arms"][name] for report in reports if name in report["arms"]]) for name in names},
    )


def read_workers(folder: Path) -> tuple[int, int] | None:
    """(load processes connected, expected) while some are awaited, as `workers.json` says; None otherwise."""
    try:
        account = json.loads((folder / "workers.json").read_text(encoding="utf-8"))
        return None if account.get("assigned") else (int(account["connected"]), int(account["expected"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _merged(parts: list[dict[str, Any]]) -> ArmLoad:
    def total(key: str) -> int:
        return sum(part.get(key) or 0 for part in parts)

    def middle(key: str) -> float | None:
        known = [(part[key], max(1, part.get("n") or 1)) for part in parts if part.get(key) is not None]
        return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None

    def worst(key: str) -> float | None:
        return max((part[key] for part in parts if part.get(key) is not None), default=None)

    return ArmLoad(
        finished=total("n"),
        failed=total("failed"),
        inflight=total("inflight"),
        **{key: middle(key) for key in ("ttft_p50_ms", "e2e_p50_ms")},
        **{key: worst(key) for key in ("ttft_p99_ms", "e2e_p99_ms")},
    )


def plain_line(status: Status, elapsed_s: float) -> str:
    """The whole status on one line, for logs."""
    parts = [f"[{_clock(elapsed_s)}]"]
    if status.trials > 1:
        parts.append(f"trial {status.trial}/{status.trials}")
    parts.append(f"{status.phase} {status.detail}".rstrip())
    load = status.load
    if load.arms or load.finished:
        of = f"/{status.planned}" if status.planned else ""  # a closed loop plans none
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
    """The status as a table for a terminal."""
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
    """An empty table whose columns stand at their left and at their right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table


class Display:
    """While entered, `status` is shown on `stream`; every phase and note is shown at least once."""

    def __init__(self, status: Status, *, stream: TextIO | None = None, every_s: float | None = None) -> None:
        self._status = status
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._every_s = every_s or (LIVE_EVERY_S if self._live else PLAIN_EVERY_S)
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
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
            status, elapsed = self._status, self._elapsed_s()
            if status.phase != phase or elapsed - shown_at >= self._every_s:
                phase, shown_at = status.phase, elapsed
                print(plain_line(status, elapsed), file=self._stream, flush=True)
            if status.page != page:
                page = status.page
                print(f"[{_clock(elapsed)}] live page: {status.page}", file=self._stream, flush=True)
            for note in status.notes[notes:]:
                print(f"[{_clock(elapsed)}] {note}", file=self._stream, flush=True)
                notes += 1
            if self._ended.is_set() and status.phase == phase:
                return
            self._ended.wait(0.1)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
