"""What all reports say of memory and energy."""

from __future__ import annotations

from functools import partial

from analysis.report.tables import Figure, Shown, Table, figures_of
from analysis.report.values import (
    DASH,
    Row,
    at,
    byte_size,
    count,
    figure,
    is_number,
    percent,
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
    energy: list[Shown] = [
        ("Energy", name, partial(_energy, key=key), ("energy",))
        for name, key in (
            ("power of its card", "watts"),
            ("energy a token", "per_token_j"),
            ("energy a request", "per_request_j"),
            ("energy a token, above idle", "above_idle_per_token_j"),
            ("energy a request, above idle", "above_idle_per_request_j"),
        )
    ]
    return [row for row in figures_of(arms, (*memory, *energy)) if row.known]


def _energy(energy: object, *, key: str) -> str:
    """The mean over trials, and how much trials vary; of what every arm has, why it is not known."""
    mean, varies = at(energy, key, "mean"), at(energy, key, "cv_pct")
    unit = "W" if key == "watts" else "J"
    if is_number(mean):
        return f"{figure(mean)} {unit}" + (f" ± {percent(varies)}" if is_number(varies) else "")
    obstacles = at(energy, "obstacles")
    return text(obstacles) if isinstance(obstacles, list) and obstacles and "above" not in key else DASH


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
