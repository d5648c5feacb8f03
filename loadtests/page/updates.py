"""What is new in a run directory, for one browser: lines, rows and documents as they are, for the page's script."""

from __future__ import annotations

import json
import tomllib
from collections import deque
from pathlib import Path
from typing import Any

from tailgate.analysis.records.documents import content_of
from tailgate.analysis.records.plain_values import CONTROL
from tailgate.loadtests.page.tails import LinesTail, TableTail

REPORT = "report.html"
_LINES = ("load", "interim", "weights")
_EVENT_COLUMNS = ("arm", "kind", "phase", "start_ns", "end_ns", "shape", "reason", "request_ids")
_MACHINE_COLUMNS = (
    *("kind", "name", "at_ns", "cpus", "cpu_s", "steal_s", "memory_bytes", "memory_limit_bytes"),
    *("sm_mhz", "power_w", "power_limit_w", "temperature_c", "utilisation_pct", "throttle", "foreign_processes"),
)
# Of the newest rows so many: of machines the page shows the last minutes.
_TABLES = {
    "events": ("compile_events.arrow", _EVENT_COLUMNS, 20_000),
    "machines": ("machines.arrow", _MACHINE_COLUMNS, 3000),
}


class Updates:
    """Reads the directory on from where the last message ended. A long history comes in several messages."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lines = {name: LinesTail(run_dir / f"{name}.jsonl") for name in _LINES}
        self._tables: dict[Path, TableTail] = {}
        self._first = True

    def event(self, *, last: bool) -> bytes:
        """Return what is new as a server-sent event; `last` says that none follows."""
        message: dict[str, Any] = {"first": self._first, "last": last, "now": self._now()}
        if self._first:
            message["run"], self._first = described(self._run_dir), False
        message |= {name: rows for name, tail in self._lines.items() if (rows := tail.new())}
        message |= {name: self._rows(*table) for name, table in _TABLES.items()}
        for event in message["events"]:
            event["hit"] = len(event.pop("request_ids", None) or ())
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
        return f"data: {CONTROL.sub('', text)}\n\n".encode()

    def _rows(self, file: str, columns: tuple[str, ...], most: int) -> list[dict[str, Any]]:
        """Return the newest rows of a table in all trials."""
        newest: deque[dict[str, Any]] = deque(maxlen=most)
        for path in sorted(self._run_dir.glob(f"trial-[0-9]*/{file}")):
            for batch in self._tables.setdefault(path, TableTail(path, columns)).batches():
                newest.extend(batch.slice(max(0, batch.num_rows - most)).to_pylist())
        return list(newest)

    def _now(self) -> dict[str, Any]:
        """Return the status of the run; with its end its verdict, where it has one."""
        status = content_of(self._run_dir / "status.json")
        if ended := status.get("ended"):
            has_report = (self._run_dir / REPORT).exists()
            summary = content_of(self._run_dir / "summary.json") if has_report else {}
            judged = {"report": has_report, "verdict": summary.get("overall"), "headline": summary.get("headline")}
            status["ended"] = {**ended, **judged}
        return status


def described(run_dir: Path) -> dict[str, Any]:
    """Return what is known from the start: names, arms, and how the run is judged."""
    experiment = tomllib.loads((run_dir / "experiment.toml").read_text(encoding="utf-8"))
    arms = [
        {key: arm.get(key) for key in ("name", "preset", "control", "weight")}
        | {"reports_compiles": "compile" in arm or any((arm.get("telemetry") or {}).values())}
        for arm in experiment["arms"]
    ]
    return {
        "name": experiment["name"],
        "id": run_dir.name,
        "arms": sorted(arms, key=lambda arm: not arm["control"]),
        "design": experiment["traffic"]["design"],
        "max_lag_ms": experiment["gates"]["max_generator_lag_ms"],
        "judged_once": not experiment["gates"]["sequential"],
    }
