"""The memory of arms, as rows of the summary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.run.memory import RunMemory
from analysis.run.run import Run


def memory_row(memory: RunMemory, arm: str) -> dict[str, Any] | None:
    """The peak of each of the arm's figures of memory, of one replica; None where nothing was seen."""
    return {name: {"peak_bytes": max(peaks.values())} for name, peaks in memory.arms[arm].items()} or None


def allocation_rows(run: Run, memory: RunMemory) -> list[dict[str, Any]]:
    """Allocations that failed or needed all cached memory back, in order of time."""
    return [asdict(event) | {"offset_s": run.offset_s(event.trial, event.at_ns)} for event in memory.events]
