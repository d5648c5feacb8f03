"""What the reports say of the load of external arms, by their own account."""

from __future__ import annotations

from analysis.report.tables import Table
from analysis.report.values import DASH, Row, at, count, is_number, percent, rows, text
from analysis.wording import counted


def server_load(summary: Row) -> Table:
    """The most of each arm, and what came of its pages; empty where none shows its load."""
    return Table(
        kinds={"Arm": "arm", "First failure": "reason"},
        rows=[
            {
                "Arm": text(arm.get("arm")),
                "Most running": count(arm.get("most_running")),
                "Most waiting": count(arm.get("most_waiting")),
                "Cache at most": percent(arm.get("most_cache_pct")),
                "Preemptions": count(arm.get("preemptions")),
                "Pages read": count(arm.get("answered")),
                "Failed": count(arm.get("failed")),
                "Late": count(arm.get("late")),
                "First failure": text(arm.get("why")),
            }
            for arm in rows(summary, "server_load", "arms")
        ],
    )


def beside(spike: Row) -> str:
    """What a server said of itself during the spike: "31 waiting, cache 99.5 %, 3 preemptions"."""
    parts = [
        f"{count(value)} {word}"
        for word, key in (("running", "running"), ("waiting", "waiting"))
        if is_number(value := at(spike, "server", key))
    ]
    if is_number(cache := at(spike, "server", "cache_pct")):
        parts.append(f"cache {percent(cache)}")
    if is_number(lost := at(spike, "server", "preemptions")):
        parts.append(counted(lost, "preemption", count))
    return ", ".join(parts) or DASH
