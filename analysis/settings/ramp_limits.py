"""How a rollout moves traffic to its candidate: the [ramp] table of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from analysis.records.tables import RecordError
from analysis.settings.fields import Range, check_fields, finite, numbers_of

OnInconclusive = Literal["hold", "rollback"]
Load = Literal["experiment", "none"]
_PERCENT = Range(0.01, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RampLimits:
    """`steps` are percent of the traffic. A step lasts `step_s` at least, and what is still open after `most_step_s`
    holds it there or rolls it back, as `on_inconclusive` says. Words are those of Argo Rollouts and OME.

    A step below the last is left once the candidate is surely at most `step_margin` slower at the median and at p90,
    and had `least_requests`. In the first `initial_delay_s` of a step no gate rolls back, nor does the next one begin.
    More than `failure_limit` alarms roll back, whenever they come; an alarm is a death, a compile of `stall_limit_s` or
    longer, more recompiles than the gates allow, a burst of errors. With `load` "none" nothing is sent: the traffic is
    that of users. A value out of range raises RecordError, one line that names ramp.KEY.
    """

    load: Load = "experiment"
    candidate: str = ""  # empty: the only arm beside the control
    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, 100.0)
    initial_delay_s: Annotated[float, Range(0.0, 86_400.0)] = 0.0
    step_s: Annotated[float, Range(1.0, 86_400.0)] = 300.0
    most_step_s: Annotated[float, Range(1.0, 604_800.0)] = 1800.0
    step_margin: Annotated[float, Range(0.0, 10.0)] = 0.25
    least_requests: Annotated[int, Range(0, 1_000_000)] = 30
    failure_limit: Annotated[int, Range(0, 1_000_000)] = 0
    stall_limit_s: Annotated[float, Range(0.0, 86_400.0)] = 1.0
    on_inconclusive: OnInconclusive = "hold"

    def __post_init__(self) -> None:
        check_fields(self, "ramp")
        for step in self.steps:
            _PERCENT.check("ramp.steps", step)
        if not self.steps or list(self.steps) != sorted(set(self.steps)) or self.steps[-1] != 100.0:
            raise RecordError(
                f"ramp.steps is {list(self.steps)}: give percents that rise to 100, such as 1, 5, 50, 100"
            )
        if self.step_s > self.most_step_s:
            raise RecordError(f"ramp.step_s is {self.step_s:g}: give at most ramp.most_step_s, {self.most_step_s:g}")

    @property
    def least_step_s(self) -> float:
        """How long a step lasts at least."""
        return max(self.step_s, self.initial_delay_s)

    @property
    def longest_s(self) -> float:
        """How long the ramp can take: every step its longest, and the last its least."""
        return max(self.most_step_s, self.initial_delay_s) * (len(self.steps) - 1) + self.least_step_s

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> RampLimits:
        """The ramp that `table` describes, defaults elsewhere; other keys are ignored. RecordError as for any value."""
        known = numbers_of(cls, table, "ramp")
        known |= {key: table[key] for key in ("load", "candidate", "on_inconclusive") if key in table}
        if "steps" in table:
            steps = table["steps"]
            if not isinstance(steps, (list, tuple)):
                raise RecordError(f"ramp.steps is {steps!r}: give a list of percents")
            known["steps"] = tuple(finite("ramp.steps", step) for step in steps)
        return cls(**known)
