"""What external arms report of their load."""

from __future__ import annotations

from analysis.report.tables import Table
from analysis.report.values import DASH, count, percent, text
from analysis.summary.model import Spike, Summary
from analysis.wording import counted


def server_load(summary: Summary) -> Table:
    """The most of each external arm, and what came of its pages; empty where none shows its load."""
    return Table(
        kinds={"Arm": "arm", "First failure": "reason"},
        rows=[
            {
                "Arm": text(row.arm),
                "Most running": count(row.most_running),
                "Most waiting": count(row.most_waiting),
                "Cache at most": percent(row.most_cache_pct),
                "Preemptions": count(row.preemptions),
                "Pages read": count(row.answered),
                "Failed": count(row.failed),
                "Late": count(row.late),
                "First failure": text(row.why),
            }
            for row in summary.server_load
        ],
    )


def meanwhile(spike: Spike) -> str:
    """What a server reported during the spike: "31 waiting, cache 99.5 %, 3 preemptions"."""
    state = spike.server
    if state is None:
        return DASH
    parts = [
        "" if state.running is None else f"{count(state.running)} running",
        "" if state.waiting is None else f"{count(state.waiting)} waiting",
        "" if state.cache_pct is None else f"cache {percent(state.cache_pct)}",
        "" if state.preemptions is None else counted(state.preemptions, "preemption", count),
    ]
    return ", ".join(filter(None, parts)) or DASH
