"""What all reports say of memory."""

from __future__ import annotations

from analysis.report.tables import Figure, Shown, figures_of
from analysis.report.values import (
    Row,
    byte_size,
)

MEMORY = (
    ("device", "process on its card"),
    ("card", "all of its card"),
    ("reserved", "kept by the allocator"),
    ("allocated", "in tensors"),
    ("process", "process on the host"),
    ("engine", "engine on the host"),
)


def resources(arms: list[Row]) -> list[Figure]:
    """The figures that are known of any of `arms`, with a value for each in their order."""
    memory: list[Shown] = [
        ("Memory", f"peak, {name}", byte_size, ("memory", key, "peak_bytes")) for key, name in MEMORY
    ]
    return [row for row in figures_of(arms, memory) if row.known]
