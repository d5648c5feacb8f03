"""What a ramp does next: stay, hold, go on to the next step, roll back, or end. Pure.

A step is left upwards only by what is sure, and rolled back from anywhere by harm that is sure. Alarms roll back
without a decision (`analysis.judging.alarms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.settings.ramp_limits import RampLimits
from analysis.wording import counted

Action = Literal["stay", "hold", "advance", "rollback", "promoted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the ramp stands at an interim analysis. `step` counts from 0; `step_s` is how long it has lasted.

    `failed` is the reason of a gate that has failed for good. `safe`: the candidate is surely no slower than a step
    allows; `passed`: every gate with interim evidence has passed. `requests` of the candidate were judged in the step;
    `uneven` says how its share differs from its weight.
    """

    step: int
    step_s: float
    failed: str | None = None
    safe: bool = False
    passed: bool = False
    requests: int = 0
    uneven: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the ramp does, and why."""

    action: Action
    why: str


def decide(standing: Standing, limits: RampLimits) -> Decision:
    """Return what follows from the standing."""
    if standing.failed is not None:
        return Decision(action="rollback", why=standing.failed)
    if standing.step_s < limits.step_s:
        return Decision(action="stay", why=f"it lasts {limits.step_s:g} s at least")
    if standing.step == len(limits.steps) - 1:
        return Decision(action="promoted", why="it holds all of the traffic without an alarm")
    share = limits.steps[standing.step + 1]
    lacking = lacks(standing, limits, to_whole=share == 100.0)
    if lacking is None:
        return Decision(action="advance", why=f"nothing speaks against {share:g} %")
    if standing.step_s >= limits.most_step_s:
        return Decision(action=limits.on_inconclusive, why=f"still open after {limits.most_step_s:g} s: {lacking}")
    return Decision(action="stay", why=lacking)


def lacks(standing: Standing, limits: RampLimits, *, to_whole: bool) -> str | None:
    """Return what the next step lacks, `to_whole` if it is all of the traffic; None if it lacks nothing."""
    if standing.requests < limits.least_requests:
        return f"the candidate had {standing.requests} of {counted(limits.least_requests, 'request')}"
    if standing.uneven is not None:
        return standing.uneven
    if to_whole:
        return None if standing.passed else "not every gate has passed, and beyond this step no control is left"
    return (
        None if standing.safe else f"it is not sure that the candidate is at most {100 * limits.step_margin:g} % slower"
    )
