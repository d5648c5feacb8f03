"""How a rollout moves traffic to its candidate, and the load that it must carry: [ramp] and [rollout]."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailgate.analysis.settings.gate_limits import Listed, Settings


class RampLimits(Settings):
    """How `tailgate ramp` moves traffic to the candidate: when it increases, and when it goes back."""

    table: ClassVar[str] = "ramp"

    candidate: str = ""
    """Arm that traffic moves to. Default: the only arm besides the control."""
    steps: Annotated[tuple[Annotated[float, Field(ge=0.01, le=100.0)], ...], Listed] = (1.0, 5.0, 25.0, 50.0, 100.0)
    """Percent of the traffic, rising to 100."""
    step_s: float = Field(default=300.0, ge=1.0, le=86_400.0)
    """Least duration of a step in s."""
    most_step_s: float = Field(default=1800.0, ge=1.0, le=604_800.0)
    """Longest duration of a step in s. Gates that are still open then are inconclusive."""
    step_margin: float = Field(default=0.25, ge=0.0, le=10.0)
    """Share by which the candidate may be slower at p50 and p90. Traffic increases only when it is surely within."""
    least_requests: int = Field(default=30, ge=0, le=1_000_000)
    """Requests of the candidate that a step needs."""
    stall_limit_s: float = Field(default=1.0, ge=0.0, le=86_400.0)
    """Length in s from which a compile while serving is an alarm."""
    on_inconclusive: Literal["hold", "rollback"] = "hold"
    """What an inconclusive step does: stay at its share, or go back to 0 %."""

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
    """The load that a rollout must carry, for the number of GPUs that each arm needs."""

    table: ClassVar[str] = "rollout"

    load_rps: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Requests/s over all replicas: a search for load says how many GPUs each arm needs for it."""
    gpus_per_replica: int = Field(default=1, ge=1, le=4096)
    """GPUs that one server process takes."""
