"""What a run of a few seconds on a machine that others use may still claim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from analysis.judging.validity import LENGTH_CHECKS

# A run of seconds cannot have them, or a machine with two processors for two servers and their load.
SHORT = LENGTH_CHECKS | {"block autocorrelation", "cross-check"}
BUSY = frozenset(
    {
        "busy host",
        "foreign work",
        "generator lag",
        "interference",
        "lag apart",
        "load processes",
        "steal",
        "token times",
    }
)


def pairs(rows: Iterable[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The rows of each pair, by arm."""
    by_pair: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_pair.setdefault(row["pair_id"], {})[row["arm"]] = row
    return list(by_pair.values())


def faults(summary: dict[str, Any]) -> list[str]:
    """Why the run is not believed, other than that it was short and its machine busy."""
    return [
        f"{check['check']}: {check['reason']}"
        for check in summary["validity"]
        if not check["ok"] and check["check"] not in SHORT | BUSY
    ]
