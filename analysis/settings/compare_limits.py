"""What is compared of two runs, and how much worse the later one may be: a [compare] table, with its defaults.

A figure is judged where it has a limit; all others are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from analysis.records.tables import RecordError
from analysis.settings.fields import Range, check_fields, finite, numbers_of
from analysis.settings.gate_limits import DAY_SPREAD, RESTART_SPREAD, TUNING_SPREAD

# How the speed of the machine bears on a figure: not at all; a slower one has it at most that much longer; or nobody
# knows by how much, since a queue grows faster than the service that makes it.
Machine = Literal["none", "proportional", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of an arm, with a value for each trial."""

    key: str
    label: str
    unit: str  # ms | s | pct | rps | bytes | count
    limit: float | None = None  # how much worse it may be, as a share; for counts how many more. None: it is shown
    less_is_better: bool = True
    counted: bool = False  # a count of what happened, not an estimate
    traffic: bool = True  # it was measured under the traffic
    machine: Machine = "proportional"
    least: float = 0.0  # what less is taken for where it is judged, since nothing has no logarithm
    luck: float = 1.0  # how many times more it differs between starts and days than a latency does


FIGURES: Final = (
    Figure(key="p50_ttft_ms", label="p50 TTFT", unit="ms"),
    Figure(key="p99_ttft_ms", label="p99 TTFT", unit="ms", limit=0.10, machine="unknown"),
    Figure(key="p50_tpot_ms", label="decode time (p50 TPOT)", unit="ms", limit=0.05),
    Figure(key="p99_tpot_ms", label="p99 TPOT", unit="ms", machine="unknown"),
    Figure(key="p50_itl_ms", label="p50 ITL", unit="ms"),
    Figure(key="p99_itl_ms", label="p99 ITL", unit="ms", machine="unknown"),
    Figure(key="p50_e2e_ms", label="p50 E2E", unit="ms"),
    Figure(key="p99_e2e_ms", label="p99 E2E", unit="ms", limit=0.10, machine="unknown"),
    Figure(
        key="good_pct",
        label="goodput",
        unit="pct",
        limit=0.05,
        less_is_better=False,
        machine="unknown",
        least=0.05,
    ),
    Figure(key="error_pct", label="errors", unit="pct", machine="unknown", least=0.05),
    Figure(key="request_rate", label="requests", unit="rps", less_is_better=False, machine="unknown"),
    Figure(key="output_token_rate", label="output tokens", unit="rps", less_is_better=False, machine="unknown"),
    Figure(
        key="warmup_compiles",
        label="compiles at start",
        unit="count",
        limit=0.0,
        counted=True,
        traffic=False,
        machine="none",
    ),
    Figure(
        key="recompiles",
        label="recompiles while serving",
        unit="count",
        limit=0.0,
        counted=True,
        machine="none",
    ),
    Figure(key="compile_s", label="compiling at start", unit="s", traffic=False, least=0.01, luck=5.0),
    Figure(key="serving_compile_s", label="compiling while serving", unit="s", machine="unknown", least=0.01, luck=5.0),
    Figure(key="startup_s", label="start-up", unit="s", limit=0.20, traffic=False, luck=5.0),
    Figure(key="device_peak_bytes", label="device memory, peak", unit="bytes", limit=0.10, machine="none"),
    Figure(key="process_peak_bytes", label="process memory, peak", unit="bytes", limit=0.10, machine="none"),
)
FIGURE_OF: Final[Mapping[str, Figure]] = {figure.key: figure for figure in FIGURES}

_SHARE = Range(0.0, 10.0)
_COUNT = Range(0.0, 1e6)
LARGEST_LOG: Final = 700.0  # of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareLimits:
    """How two runs are judged. A value out of range raises RecordError, one line that names compare.KEY."""

    alpha: Annotated[float, Range(0.0001, 0.5)] = 0.05
    # Standard deviation of log latency over starts of one build, and over days; each counts as four of them.
    restart_spread: Annotated[float, Range(0.0, 1.0)] = RESTART_SPREAD
    tuning_spread: Annotated[float, Range(0.0, 1.0)] = TUNING_SPREAD  # beside it where an arm searches for kernels
    day_spread: Annotated[float, Range(0.0, 1.0)] = DAY_SPREAD
    machine_drift: Annotated[float, Range(0.0, 1.0)] = 0.05  # of a reference, from which on tails are open
    need_references: bool = True  # on other machines, no speed is judged without references of both
    limits: Mapping[str, float | None] = field(default_factory=dict)  # by figure, where it is not the default

    def __post_init__(self) -> None:
        check_fields(self, "compare")
        for key, limit in self.limits.items():
            figure = FIGURE_OF.get(key)
            if figure is None:
                raise RecordError(f"compare.limits.{key} is unknown: use {', '.join(FIGURE_OF)}")
            if limit is not None:
                (_COUNT if figure.counted else _SHARE).check(f"compare.limits.{key}", limit)
            if limit is not None and not figure.less_is_better and limit >= 1.0:
                raise RecordError(f"compare.limits.{key} is {limit:g}: give a share below 1 that may be lost")

    def limit_of(self, figure: Figure) -> float | None:
        """How much worse the figure may be; None where it is not judged."""
        return self.limits.get(figure.key, figure.limit)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> CompareLimits:
        """The limits in a [compare] table, defaults elsewhere. Another key or type raises RecordError."""
        numbers = ("alpha", "restart_spread", "tuning_spread", "day_spread", "machine_drift")
        for key in table:
            if key not in (*numbers, "need_references", "limits"):
                raise RecordError(
                    f"compare.{key} is unknown: it takes {', '.join(numbers)}, need_references and limits"
                )
        known: dict[str, Any] = numbers_of(cls, table, "compare")
        if "need_references" in table:
            if not isinstance(table["need_references"], bool):
                raise RecordError(f"compare.need_references is {table['need_references']!r}: use true or false")
            known["need_references"] = table["need_references"]
        limits = table.get("limits", {})
        if not isinstance(limits, Mapping):
            raise RecordError(f"compare.limits is {limits!r}: give a table [compare.limits]")
        known["limits"] = {str(key): _limit(str(key), value) for key, value in limits.items()}
        return cls(**known)


def _limit(key: str, value: Any) -> float | None:
    if value is False:
        return None
    if isinstance(value, bool):
        raise RecordError(f"compare.limits.{key} is true: give a share such as 0.1, or false to judge it no more")
    return finite(f"compare.limits.{key}", value)


def bound_of(figure: Figure, limit: float) -> float:
    """The worsening that the limit still accepts."""
    return math.log1p(limit) if figure.less_is_better else -math.log1p(-limit)


def ratio_of(figure: Figure, effect: float) -> float:
    """The ratio of the candidate to the baseline that a worsening means; inf where it is beyond any number."""
    change = effect if figure.less_is_better else -effect
    return math.exp(change) if change < LARGEST_LOG else math.inf
