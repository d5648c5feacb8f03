"""What an arm must hold: the [gates] table of an experiment.

It is separate from the gates so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.settings.metrics import EMBED, EMBED_METRICS, JUDGED_METRICS

# Of a list as TOML has it; its items stay strict.
Listed = Field(strict=False)


class Settings(BaseModel):
    """The table `table` of an experiment. A validator's message begins with the key that it is about."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    table: ClassVar[str]

    @classmethod
    def recorded(cls, table: Mapping[str, Any]) -> Self:
        """Return the settings of a recorded experiment, without keys that only the version that wrote it knew.

        Raises RecordError with key, value and limit.
        """
        try:
            return cls.model_validate({key: value for key, value in table.items() if key in cls.model_fields})
        except ValidationError as error:
            found = error.errors()[0]
        if found["type"] == "value_error":
            raise RecordError(f"{cls.table}.{found['ctx']['error']}")
        key = ".".join((cls.table, *(name for name in found["loc"] if isinstance(name, str))))
        raise RecordError(f"{key} is {found['input']!r}: {found['msg'][:1].lower()}{found['msg'][1:]}")


RESTART_SPREAD = 0.01
DAY_SPREAD = 0.01
MIN_BLOCKS = 18  # twenty less the two that a cold start may take


class GateLimits(Settings):
    """What an arm must hold to replace the control, and what a run must hold to be judged."""

    table: ClassVar[str] = "gates"

    max_recompiles: int = Field(default=0, ge=0, le=1_000_000)
    """Compiles while serving, for each arm and trial."""
    max_stall_s: float = Field(default=1.0, ge=0.0, le=86_400.0)
    """Longest time in s that compiles delay one request. A longer stall that nothing explains leaves the gate open."""
    max_stall_s_per_min: float = Field(default=0.5, ge=0.0, le=60.0)
    """Seconds of each minute that a replica compiles while serving."""
    max_requests_hit_pct: float = Field(default=1.0, ge=0.0, le=100.0)
    """Percentage of requests that a compile delays."""
    margin: float = Field(default=0.10, ge=0.0, le=1.0)
    """Share by which a latency quantile may exceed the control's."""
    margins: Mapping[str, Annotated[float, Field(ge=0.0, le=1.0)]] = {}
    """Margin of single metrics: `{ e2e = 0.2 }`."""
    metrics: Annotated[tuple[str, ...], Listed, Field(min_length=1)] = ("ttft", "e2e")
    """Metrics that gate, of `ttft`, `e2e`, `tpot`, `max_itl`, `itl`; all are reported. Default: `["ttft", "e2e"]`, or
    `["e2e"]` for encoders, which have no other."""
    quantiles: Annotated[tuple[Annotated[float, Field(ge=0.5, le=0.9999)], ...], Listed, Field(min_length=1)] = (0.99,)
    """Quantiles that gate."""
    alpha: float = Field(default=0.05, ge=0.0001, le=0.5)
    """Error rate of a comparison."""
    max_error_pct: float = Field(default=0.5, ge=0.001, le=100.0)  # no finite run shows that none fails
    """Percentage of requests that fail."""
    max_eager_steps_pct: float = Field(default=1.0, ge=0.0, le=100.0)
    """Percentage of the steps of a compiled arm that run eagerly, of the kind of step with the largest share."""
    max_refused_pct: float = Field(default=0.0, ge=0.0, le=100.0)
    """Percentage of requests that a strict arm refuses because no graph fits."""
    max_memory_ratio: float | None = Field(default=None, ge=0.0, le=1000.0)
    """Peak memory of a replica as a multiple of the control's. Without it memory is reported and does not gate."""
    cold_s: float = Field(default=30.0, ge=0.0, le=86_400.0)
    """Time in s after the first request of a trial that latency comparisons leave out."""
    min_blocks: int = Field(default=MIN_BLOCKS, ge=2, le=100_000)
    """Blocks that a verdict on a latency needs."""
    max_generator_lag_ms: float = Field(default=50.0, ge=0.0, le=60_000.0)
    """p99 of the load generator's own lag in ms. Above it the run is not judged."""
    max_machine_drift: float = Field(default=0.05, ge=0.001, le=0.9)
    """Share by which the slower speed of a device or host may fall short of the faster: around a trial, between trials,
    and between the arms' devices."""
    # Pauses of the whole host for 2 % of the time set the p99 TTFT of both arms, which hides what they differ by.
    max_steal_pct: float = Field(default=1.0, ge=0.0, le=100.0)
    """Percentage of a host's processor time that the hypervisor may take during a trial."""
    max_other_cpu_pct: float = Field(default=10.0, ge=0.0, le=100.0)
    """Percentage of a host's processor time that other processes may take during a trial."""
    sequential: bool = False
    """Decide gates by interim analyses, and end the run when every arm is decided. `--until-decided` sets it."""
    restart_spread: float = Field(default=RESTART_SPREAD, ge=0.0, le=1.0)
    """Assumed standard deviation of log latency between fresh starts of one arm. It counts as four starts next to the
    run's own."""
    tuning_spread: float = Field(default=0.03, ge=0.0, le=1.0)
    """Assumed standard deviation of log latency, in addition, between compiles that tune kernels by timing them. 0
    assumes equal results."""
    day_spread: float = Field(default=DAY_SPREAD, ge=0.0, le=1.0)
    """Assumed standard deviation of log latency between days, where arms had separate runs. It counts as four days."""
    block_s: float = Field(default=30.0, ge=0.1, le=86_400.0)
    """Length of a block in s. Default: `traffic.block_s`."""

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        for key, values in (("metrics", self.metrics), ("quantiles", self.quantiles)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} is {list(values)}: name each once")
        for metric in self.metrics:
            if metric not in JUDGED_METRICS:
                raise ValueError(f"metrics holds {metric!r}: use {', '.join(JUDGED_METRICS)}")
        for metric in self.margins:
            if metric not in self.metrics:
                raise ValueError(f"margins.{metric} is for a metric that is not in gates.metrics: add it there")
        return self

    @property
    def quantile(self) -> float:
        """The highest quantile that gates: what decides how many requests a tail needs."""
        return max(self.quantiles)

    def margin_of(self, metric: str) -> float:
        """Return the accepted rise of the metric."""
        return self.margins.get(metric, self.margin)


def usual_for(task: str) -> dict[str, Any]:
    """Return the [gates] of the task where an experiment is silent: embeddings have one metric to be judged by."""
    return {"metrics": list(EMBED_METRICS)} if task == EMBED else {}


def asks_for_verdicts(limits: GateLimits, task: str) -> bool:
    """Return whether a limit of a gate is set. What blocks and load generator must keep is none."""
    usual = GateLimits.recorded(usual_for(task))
    return limits.model_copy(update=usual.model_dump(include={"block_s", "alpha", "max_generator_lag_ms"})) != usual
