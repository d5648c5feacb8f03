"""How a rollout moves traffic to its candidate, and the load that it must carry: [ramp] and [rollout]."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailgate.analysis.settings.gate_limits import Listed, Settings


class RampLimits(Settings):
    """`steps` are percent of the traffic. A step lasts `step_s` at least, and what is still open after `most_step_s`
    holds it there or rolls it back, as `on_inconclusive` says.

    A step below the last is left once the candidate is surely at most `step_margin` slower at the median and at p90,
    and had `least_requests`. An alarm rolls back whenever it comes: a death, a compile of `stall_limit_s` or longer,
    more recompiles than the gates allow, a burst of errors. With `load` "none" the traffic is that of users.
    """

    table: ClassVar[str] = "ramp"

    load: Literal["experiment", "none"] = "experiment"
    candidate: str = ""  # empty: the only arm other than the control
    steps: Annotated[tuple[Annotated[float, Field(ge=0.01, le=100.0)], ...], Listed] = (1.0, 5.0, 25.0, 50.0, 100.0)
    step_s: float = Field(default=300.0, ge=1.0, le=86_400.0)
    most_step_s: float = Field(default=1800.0, ge=1.0, le=604_800.0)
    step_margin: float = Field(default=0.25, ge=0.0, le=10.0)
    least_requests: int = Field(default=30, ge=0, le=1_000_000)
    stall_limit_s: float = Field(default=1.0, ge=0.0, le=86_400.0)
    on_inconclusive: Literal["hold", "rollback"] = "hold"

    @model_validator(mode="after")
    def _steps_rise(self) -> Self:
        if not self.steps or list(self.steps) != sorted(set(self.steps)) or self.steps[-1] != 100.0:
            raise ValueError(f"steps is {list(self.steps)}: give percents that rise to 100, such as 1, 5, 50, 100")
        if self.step_s > self.most_step_s:
            raise ValueError(f"step_s is {self.step_s:g}: give at most ramp.most_step_s, {self.most_step_s:g}")
        return self

    @property
    def longest_s(self) -> float:
        """How long the ramp can take: every step its longest, and the last its least."""
        return self.most_step_s * (len(self.steps) - 1) + self.step_s


class Rollout(Settings):
    """`load_rps` is the load over all replicas, None for any; `gpus_per_replica` is what one server process takes."""

    table: ClassVar[str] = "rollout"

    load_rps: float | None = Field(default=None, ge=1e-6, le=1e9)
    gpus_per_replica: int = Field(default=1, ge=1, le=4096)
