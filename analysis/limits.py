"""What an arm must hold: the limits of an experiment's [gates] table, with their defaults and ranges.

It stands apart from the gates so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records import METRICS, RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What an arm must hold to replace the control. Limits on compiles are for those while serving.

    A value out of range raises RecordError, one line that names gates.KEY.
    """

    margin: float = 0.10  # the rise of the quantile over the control's that is still accepted
    metrics: tuple[str, ...] = ("ttft", "e2e")
    quantile: float = 0.99
    alpha: float = 0.05
    max_recompiles: int = 0  # per arm and trial
    max_stall_s: float = 1.0  # the longest that compiles held up one request
    max_stall_s_per_min: float = 0.5
    max_requests_hit_pct: float = 1.0
    max_error_pct: float = 0.5
    cold_s: float = 30.0  # after the first request, judged apart
    min_blocks: int = 20
    max_generator_lag_ms: float = 50.0
    draws: int = 9999
    block_s: float = 30.0  # in an experiment, by default the traffic's

    def __post_init__(self) -> None:
        for key, (low, high) in _RANGES.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise RecordError(f"gates.{key} is {value:g}: give a value from {low:g} to {high:g}")
        if not self.metrics:
            raise RecordError(f"gates.metrics is empty: name one or more of {', '.join(METRICS)}")
        for metric in self.metrics:
            if metric not in METRICS:
                raise RecordError(f"gates.metrics holds {metric!r}: use {', '.join(METRICS)}")
        if len(set(self.metrics)) < len(self.metrics):
            raise RecordError(f"gates.metrics is {list(self.metrics)}: name each metric once")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> GateLimits:
        """The limits in `table`, defaults elsewhere; other keys are ignored. Values of another type raise RecordError.

        Lenient, because records may come from another version or from elsewhere: whole numbers may be written 20.0.
        """
        known: dict[str, Any] = {}
        for key, value in table.items():
            if key == "metrics":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise RecordError(f"gates.metrics is {value!r}: give a list of names")
                known[key] = tuple(value)
            elif key in _RANGES:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise RecordError(f"gates.{key} is {value!r}: give a number")
                known[key] = int(value) if key in {"max_recompiles", "min_blocks", "draws"} else float(value)
        return cls(**known)


_RANGES = {
    "margin": (0.0, 10.0),
    "quantile": (0.5, 0.9999),
    "alpha": (0.0001, 0.5),
    "max_recompiles": (0, 1_000_000),
    "max_stall_s": (0.0, 86_400.0),
    "max_stall_s_per_min": (0.0, 60.0),
    "max_requests_hit_pct": (0.0, 100.0),
    "max_error_pct": (0.0, 100.0),
    "cold_s": (0.0, 86_400.0),
    "min_blocks": (2, 100_000),  # one block has no spread
    "max_generator_lag_ms": (0.0, 60_000.0),
    "draws": (99, 1_000_000),
    "block_s": (0.1, 86_400.0),
}

# What each request must meet to count as good, in ms: the names that vLLM's serving benchmark has, and our own.
GOODPUT_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e", "e2e": "e2e", "max_itl": "max_itl"}
ATTAINMENT_PCT = 99.0


def check_goodput(table: Mapping[str, Any]) -> tuple[dict[str, float], float | None]:
    """The limit of each metric, and the share of requests that must meet them all; None for an empty table.

    Other keys and values raise RecordError.
    """
    limits: dict[str, float] = {}
    share = ATTAINMENT_PCT
    for key, limit in table.items():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
            raise RecordError(f"goodput.{key} is {limit!r}: give a number above 0")
        if key == "attainment_pct":
            if limit > 100:
                raise RecordError(f"goodput.attainment_pct is {limit:g}: give at most 100")
            share = float(limit)
            continue
        if key not in GOODPUT_METRICS:
            raise RecordError(f"goodput.{key} is unknown: use {', '.join(GOODPUT_METRICS)} in ms, and attainment_pct")
        if GOODPUT_METRICS[key] in limits:
            raise RecordError("goodput has e2e and e2el, which are the same: keep one")
        limits[GOODPUT_METRICS[key]] = float(limit)
    if table and not limits:
        raise RecordError("goodput.attainment_pct stands alone: give limits such as ttft = 200")
    return limits, share / 100.0 if limits else None
