"""What an arm must hold: the limits of an experiment's [gates] table, with their defaults and ranges.

It stands apart from the gates so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from analysis.records.tables import RecordError
from analysis.settings.metrics import JUDGED_METRICS

# What is compared: a latency of each request, and the gaps between tokens pooled over requests.


# How the limits of a comparison are found below six trials (see analysis.statistics.compare).
Method = Literal["label swap", "block bootstrap"]
METHODS: tuple[str, ...] = get_args(Method)

# Whose tail a gate compares: that of a typical block, or that of the whole run, which its worst stretches make.
Question = Literal["block", "run"]
QUESTIONS: tuple[str, ...] = get_args(Question)

# The standard deviation of an arm's log latency over fresh starts, where the run's own starts do not tell better.
RESTART_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBudget:
    """The compiles that an arm may make while it serves."""

    max_recompiles: int = 0  # per trial
    max_stall_s: float = 1.0  # the longest that compiles held up one request
    max_stall_s_per_min: float = 0.5
    max_requests_hit_pct: float = 1.0

    def __post_init__(self) -> None:
        _check_ranges(self, BUDGET_KEYS, "gates.cold")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """What an arm must hold to replace the control. Limits on compiles are for those while serving.

    With `cold`, compiles during the first `cold_s` have this budget, and the others the table's own; without, all have
    the one. A value out of range raises RecordError, one line that names gates.KEY.
    """

    margin: float = 0.10  # the rise of the quantile over the control's that is still accepted
    margins: Mapping[str, float] = field(default_factory=dict)  # by metric, where it is not `margin`
    metrics: tuple[str, ...] = ("ttft", "e2e")
    quantiles: tuple[float, ...] = (0.99,)
    alpha: float = 0.05
    max_recompiles: int = 0  # per arm and trial
    max_stall_s: float = 1.0  # the longest that compiles held up one request
    max_stall_s_per_min: float = 0.5
    max_requests_hit_pct: float = 1.0
    max_error_pct: float = 0.5
    min_goodput_ratio: float | None = None  # to the control's at the same load; None: goodput is reported alone
    cold_s: float = 30.0  # after the first request, judged apart
    cold: CompileBudget | None = None
    min_blocks: int = 18  # twenty less the two that a cold start may take
    max_generator_lag_ms: float = 50.0
    draws: int = 9999
    method: Method = "label swap"
    question: Question = "block"
    restart_spread: float = RESTART_SPREAD  # of log latency over starts of one arm; counts as four starts
    block_s: float = 30.0  # in an experiment, by default the traffic's

    def __post_init__(self) -> None:
        _check_ranges(self, [key for key in _RANGES if key != "quantile"], "gates")
        if not self.metrics:
            raise RecordError(f"gates.metrics is empty: name one or more of {', '.join(JUDGED_METRICS)}")
        for metric in self.metrics:
            if metric not in JUDGED_METRICS:
                raise RecordError(f"gates.metrics holds {metric!r}: use {', '.join(JUDGED_METRICS)}")
        if len(set(self.metrics)) < len(self.metrics):
            raise RecordError(f"gates.metrics is {list(self.metrics)}: name each metric once")
        if not self.quantiles or len(set(self.quantiles)) < len(self.quantiles):
            raise RecordError(f"gates.quantiles is {list(self.quantiles)}: name one or more, each once, such as 0.99")
        for quantile in self.quantiles:
            _check_range("gates.quantiles", quantile, *_RANGES["quantile"])
        if self.method not in METHODS:
            raise RecordError(f"gates.method is {self.method!r}: use {' or '.join(METHODS)}")
        if self.question not in QUESTIONS:
            raise RecordError(f"gates.question is {self.question!r}: use {' or '.join(QUESTIONS)}")
        for metric, margin in self.margins.items():
            if metric not in self.metrics:
                raise RecordError(f"gates.margins.{metric} is for a metric that is not in gates.metrics: add it there")
            _check_range(f"gates.margins.{metric}", margin, *_RANGES["margin"])

    @property
    def quantile(self) -> float:
        """The highest quantile that gates: what decides how many requests a tail needs."""
        return max(self.quantiles)

    @property
    def budget(self) -> CompileBudget:
        """The compiles that are allowed: all while serving, or those past the cold start where `cold` has its own."""
        return CompileBudget(**{key: getattr(self, key) for key in BUDGET_KEYS})

    def margin_of(self, metric: str) -> float:
        """The accepted rise of the metric."""
        return self.margins.get(metric, self.margin)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> GateLimits:
        """The limits in `table`, defaults elsewhere; other keys are ignored. Values of another type raise RecordError.

        Lenient, because records may come from another version or from elsewhere: whole numbers may be written 20.0.
        """
        known: dict[str, Any] = {}
        for key, value in filled(table).items():
            if key == "metrics":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise RecordError(f"gates.metrics is {value!r}: give a list of names")
                known[key] = tuple(value)
            elif key == "quantiles":
                if not isinstance(value, list):
                    raise RecordError(f"gates.quantiles is {value!r}: give a list of numbers")
                known[key] = tuple(_number(key, item) for item in value)
            elif key == "margins":
                if not isinstance(value, Mapping):
                    raise RecordError(f"gates.margins is {value!r}: give a table")
                known[key] = {str(name): _number(f"margins.{name}", item) for name, item in value.items()}
            elif key == "cold":
                numbers: dict[str, Any] = {name: _number(f"cold.{name}", item) for name, item in value.items()}
                known[key] = CompileBudget(**numbers)
            elif key in ("method", "question"):
                known[key] = value
            elif key in _RANGES:
                known[key] = _number(key, value)
        return cls(**known)


def filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """A [gates] table in today's keys: `quantile` as a list, and in `cold` the table's own limits where it says none.

    RecordError when it has both `quantile` and `quantiles`, or `cold` is no table or holds another key.
    """
    full = dict(table)
    if "quantile" in full:
        if "quantiles" in full:
            raise RecordError(
                f"gates has quantile = {full['quantile']!r} and quantiles = {full['quantiles']!r}: keep quantiles"
            )
        value = full.pop("quantile")
        _check_range("gates.quantile", _number("quantile", value), *_RANGES["quantile"])
        full["quantiles"] = [value]
    cold = full.get("cold")
    if cold is not None:
        if not isinstance(cold, Mapping):
            raise RecordError(f"gates.cold is {cold!r}: give a table [gates.cold]")
        for key, value in cold.items():
            if key not in BUDGET_KEYS:
                raise RecordError(f"gates.cold.{key} is unknown: it takes {', '.join(BUDGET_KEYS)}")
            _number(f"cold.{key}", value)
        full["cold"] = {key: full[key] for key in BUDGET_KEYS if key in full} | dict(cold)
    return full


def _number(key: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RecordError(f"gates.{key} is {value!r}: give a number")
    return int(value) if key.removeprefix("cold.") in _WHOLE else float(value)


def _check_ranges(limits: Any, keys: Sequence[str], where: str) -> None:
    for key in keys:
        value = getattr(limits, key)
        if value is not None:
            _check_range(f"{where}.{key}", value, *_RANGES[key])


def _check_range(told: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RecordError(f"{told} is {value:g}: give a value from {low:g} to {high:g}")


BUDGET_KEYS = ("max_recompiles", "max_stall_s", "max_stall_s_per_min", "max_requests_hit_pct")
_WHOLE = frozenset({"max_recompiles", "min_blocks", "draws"})
_RANGES = {
    "margin": (0.0, 10.0),
    "quantile": (0.5, 0.9999),
    "alpha": (0.0001, 0.5),
    "max_recompiles": (0, 1_000_000),
    "max_stall_s": (0.0, 86_400.0),
    "max_stall_s_per_min": (0.0, 60.0),
    "max_requests_hit_pct": (0.0, 100.0),
    "max_error_pct": (0.0, 100.0),
    "min_goodput_ratio": (0.0, 10.0),
    "cold_s": (0.0, 86_400.0),
    "min_blocks": (2, 100_000),  # one block has no spread
    "max_generator_lag_ms": (0.0, 60_000.0),
    "draws": (99, 1_000_000),
    "restart_spread": (0.0, 1.0),
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
