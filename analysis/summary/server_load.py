"""The load of external arms by their own account, as a part of the summary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from analysis.records.plain_values import number
from analysis.run.run import Run
from analysis.run.server_load import GAUGES, server_load


def server_load_rows(run: Run) -> list[dict[str, Any]]:
    """The figures of each arm whose pages were read."""
    table = run.records.server_load
    read = set() if table is None else set(table["arm"].to_pylist())
    return [_arm(run, arm) for arm in run.arms if run.account(arm).scrapes or arm in read]


def _arm(run: Run, arm: str) -> dict[str, Any]:
    """The arm's figures over all trials, and how often its pages answered."""
    seen = [
        server_load(run.records.server_load, arm=arm, trial=trial.number, start_ns=trial.start_ns, end_ns=trial.end_ns)
        for trial in run.trials
    ]
    columns: dict[str, list[float]] = {name: [] for name in (*GAUGES, "preemptions")}
    for item in filter(None, seen):
        for name, value in asdict(item).items():
            columns[name] += [] if value is None else [value]
    pages = run.account(arm).scrapes
    counts = {key: sum(int(number(page.get(key)) or 0) for page in pages) for key in ("answered", "failed", "late")}
    return {
        "arm": arm,
        **{f"most_{name}": max(columns[name], default=None) for name in GAUGES},
        "preemptions": sum(columns["preemptions"]) if columns["preemptions"] else None,
        **counts,
        "why": next((str(page["why"]) for page in pages if page.get("why")), None),
    }
