"""Results as they come: a JSON line each on stderr, all of them in one JSON object at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


class Ledger:
    """Collects rows. Each is on stderr as soon as it is added: a later kill loses none."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.missed: list[str] = []  # goals
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        """Show a progress line."""
        print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, section: str, **values: Any) -> None:
        """Keep a result and show it."""
        row: Row = {"section": section, **rounded(values)}
        self.rows.append(row)
        self.note(json.dumps(row))

    def reach(self, what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        """Keep a goal and how far it was reached."""
        reached = value >= limit if at_least else value <= limit
        self.add("goals", what=what, value=value, goal=f"{'≥' if at_least else '≤'} {limit:g}", reached=reached)
        if not reached:
            self.missed.append(f"{what} is {value:.4g}")

    def result(self, benchmark: str, *, about: Row) -> Row:
        """Return all results as one JSON object."""
        return {"benchmark": benchmark, "ok": not self.missed, "missed": self.missed, **about, "results": self.rows}


def rounded(value: Any) -> Any:
    """Round floats in `value` to six significant digits, at any depth, so that JSON stays readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the size, extremes and median of a sample of at least one."""
    return {"n": len(values), "min": min(values), "median": float(np.median(values)), "max": max(values)}
