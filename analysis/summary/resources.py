"""The memory of arms, as rows of the summary."""

from __future__ import annotations

from typing import Any

from analysis.run.memory import RunMemory


def memory_row(memory: RunMemory, arm: str) -> dict[str, Any] | None:
    """The peak of each of the arm's figures of memory, of one replica; None where nothing was seen."""
    return {name: {"peak_bytes": max(peaks.values())} for name, peaks in memory.arms[arm].items()} or None
