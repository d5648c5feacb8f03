"""What all reports say of memory."""

from __future__ import annotations

from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    Row,
    byte_size,
    count,
    figure,
    rows,
    text,
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


def memory_events(summary: Row) -> Table:
    """Allocations that failed or that needed all cached memory back, in order of time."""
    shown = [
        {
            "Arm": text(event.get("arm")),
            "Replica": text(event.get("replica")),
            "Trial": count(event.get("trial")),
            "At": f"{figure(event.get('offset_s'))} s",
            "What": text(event.get("kind")),
            "Times": count(event.get("count")),
        }
        for event in rows(summary, "memory", "events")
    ]
    return Table(rows=shown, kinds={"Arm": "arm", "Replica": "words", "What": "words"})
