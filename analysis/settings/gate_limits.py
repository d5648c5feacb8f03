"""What an arm must hold: the limits of an experiment's [gates] table, with their defaults and ranges.

It stands apart from the gates so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from analysis.records.tables import RecordError
from analysis.settings.fields import Range, check_fields, finite, numbers_of
from analysis.settings.metrics import EMBED, EMBED_METRICS, JUDGED_METRICS

# The standard deviation of an arm's log latency over fresh starts, where the run's own starts do not show it better.
RESTART_SPREAD = 0.01
TUNING_SPREAD = 0.03
MIN_BLOCKS = 18
# The same over the days of one build, which separate runs do not share.
DAY_SPREAD = 0.01

_MARGIN = Range(0.0, 10.0)
_QUANTILE = Range(0.5, 0.9999)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBudget:
    """The compiles that an arm may make while it serves. A value out of range raises RecordError."""

    max_recompiles: Annotated[int, Range(0, 1_000_000)] = 0  # per arm and trial
    max_stall_s: Annotated[float, Range(0.0, 86_400.0)] = 1.0  # the longest that compiles held up one request
    max_stall_s_per_min: Annotated[float, Range(0.0, 60.0)] = 0.5
    max_requests_hit_pct: Annotated[float, Range(0.0, 100.0)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "gates.cold")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits(CompileBudget):
    """What an arm must hold to replace the control. Limits on compiles are for those while serving.

    With `cold`, compiles during the first `cold_s` have this budget, and the others the table's own; without, all have
    the one. A value out of range raises RecordError, one line that names gates.KEY.
    """

    margin: Annotated[float, _MARGIN] = 0.10  # the rise of the quantile over the control's that is still accepted
    margins: Mapping[str, float] = field(default_factory=dict)  # by metric, where it is not `margin`
    metrics: tuple[str, ...] = ("ttft", "e2e")
    quantiles: tuple[float, ...] = (0.99,)
    alpha: Annotated[float, Range(0.0001, 0.5)] = 0.05
    max_error_pct: Annotated[float, Range(0.001, 100.0)] = 0.5  # no finite run shows that none fails
    # Of an arm that compiles: steps that ran as plain Python, and requests whose shape it refused.
    max_eager_steps_pct: Annotated[float, Range(0.0, 100.0)] = 1.0
    max_refused_pct: Annotated[float, Range(0.0, 100.0)] = 0.0
    # To the control's at the same load; None: goodput is reported alone.
    min_goodput_ratio: Annotated[float | None, Range(0.0, 10.0)] = None
    # The highest memory of a replica to that of the control's; None: memory is reported alone.
    max_memory_ratio: Annotated[float | None, Range(0.0, 1000.0)] = None
    cold_s: Annotated[float, Range(0.0, 86_400.0)] = 30.0  # after the first request, judged apart
    cold: CompileBudget | None = None
    min_blocks: Annotated[int, Range(2, 100_000)] = MIN_BLOCKS  # twenty less the two that a cold start may take
    max_generator_lag_ms: Annotated[float, Range(0.0, 60_000.0)] = 50.0
    # Of the reference beside the traffic: from before a trial to after it, over trials, between the arms' devices.
    max_bed_drift: Annotated[float, Range(0.001, 0.9)] = 0.05
    # Of the processors' time of a host during a trial: taken by the hypervisor, and by work that is not of the run.
    # Pauses of the whole host for 2 % of the time set the p99 TTFT of both arms, which hides what they differ by.
    max_steal_pct: Annotated[float, Range(0.0, 100.0)] = 1.0
    max_other_cpu_pct: Annotated[float, Range(0.0, 100.0)] = 10.0
    # Gates are decided by evidence that may be looked at while it forms, and the run ends when all are.
    sequential: bool = False
    # Of log latency over starts of one arm; counts as four starts.
    restart_spread: Annotated[float, Range(0.0, 1.0)] = RESTART_SPREAD
    # The same over compiles that search for kernels by timing them; 0: they are taken to find the same.
    tuning_spread: Annotated[float, Range(0.0, 1.0)] = TUNING_SPREAD
    # Of log latency over days, where arms had separate runs; counts as four days.
    day_spread: Annotated[float, Range(0.0, 1.0)] = DAY_SPREAD
    block_s: Annotated[float, Range(0.1, 86_400.0)] = 30.0  # in an experiment, by default the traffic's

    def __post_init__(self) -> None:
        check_fields(self, "gates")
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
            _QUANTILE.check("gates.quantiles", quantile)
        for metric, margin in self.margins.items():
            if metric not in self.metrics:
                raise RecordError(f"gates.margins.{metric} is for a metric that is not in gates.metrics: add it there")
            _MARGIN.check(f"gates.margins.{metric}", margin)

    @property
    def quantile(self) -> float:
        """The highest quantile that gates: what decides how many requests a tail needs."""
        return max(self.quantiles)

    def margin_of(self, metric: str) -> float:
        """The accepted rise of the metric."""
        return self.margins.get(metric, self.margin)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], task: str = "generate") -> GateLimits:
        """The limits in `table`, defaults for the task elsewhere; other keys are ignored.

        Values of another type raise RecordError. Lenient, because records may come from another version or from
        elsewhere: whole numbers may be written 20.0.
        """
        full = filled(table, task)
        known = numbers_of(cls, full, "gates")
        known |= {key: full[key] for key in ("cold",) if key in full}
        if "sequential" in full:
            if not isinstance(full["sequential"], bool):
                raise RecordError(f"gates.sequential is {full['sequential']!r}: give true or false")
            known["sequential"] = full["sequential"]
        if "metrics" in full:
            metrics = full["metrics"]
            if not isinstance(metrics, list) or not all(isinstance(name, str) for name in metrics):
                raise RecordError(f"gates.metrics is {metrics!r}: give a list of names")
            known["metrics"] = tuple(metrics)
        if "quantiles" in full:
            if not isinstance(full["quantiles"], list):
                raise RecordError(f"gates.quantiles is {full['quantiles']!r}: give a list of numbers")
            known["quantiles"] = tuple(finite("gates.quantiles", item) for item in full["quantiles"])
        if "margins" in full:
            if not isinstance(full["margins"], Mapping):
                raise RecordError(f"gates.margins is {full['margins']!r}: give a table")
            known["margins"] = {str(key): finite(f"gates.margins.{key}", it) for key, it in full["margins"].items()}
        return cls(**known)


def filled(table: Mapping[str, Any], task: str = "generate") -> dict[str, Any]:
    """A [gates] table in today's keys: `quantile` as a list, and as `cold` a CompileBudget, with the table's own limits
    where the one that is written is silent. Embeddings are by default judged by the one metric that they have.

    RecordError when it has both `quantile` and `quantiles`, or `cold` is no table or holds another key.
    """
    full = dict(table)
    if task == EMBED:
        full.setdefault("metrics", list(EMBED_METRICS))
    if "quantile" in full:
        if "quantiles" in full:
            raise RecordError(
                f"gates has quantile = {full['quantile']!r} and quantiles = {full['quantiles']!r}: keep quantiles"
            )
        value = full.pop("quantile")
        _QUANTILE.check("gates.quantile", finite("gates.quantile", value))
        full["quantiles"] = [value]
    cold = full.get("cold")
    if cold is not None:
        if not isinstance(cold, Mapping):
            raise RecordError(f"gates.cold is {cold!r}: give a table [gates.cold]")
        known = [item.name for item in fields(CompileBudget)]
        for key in cold:
            if key not in known:
                raise RecordError(f"gates.cold.{key} is unknown: it takes {', '.join(known)}")
        own = numbers_of(CompileBudget, full, "gates")
        full["cold"] = CompileBudget(**(own | numbers_of(CompileBudget, cold, "gates.cold")))
    return full


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
