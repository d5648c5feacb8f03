"""What a run answers about its candidate: PASS, FAIL or INCONCLUSIVE, and yes or no to a webhook of Flagger. Pure.

FAIL is what surely happened. PASS takes a run that goes on, a recent interim analysis of the present weights, and
requests at them. Everything else is INCONCLUSIVE, with what it lacks. A webhook gets the answer that neither promotes
nor rolls back an open candidate, as far as the hook can wait: a no to rollout counts towards the rollback, a yes to
rollback rolls back, and the first increase, from 0, can have no evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from tailgate.analysis.judging.ramp import Standing, lacks
from tailgate.analysis.settings.ramp_limits import RampLimits

Goal = Literal["step", "promotion"]
GOALS: Final[tuple[Goal, ...]] = ("step", "promotion")
HOOKS: Final[Mapping[str, Goal]] = {
    "confirm-rollout": "step",
    "rollout": "step",
    "confirm-traffic-increase": "step",
    "confirm-promotion": "promotion",
    "rollback": "step",
}
_SILENT_S: Final = 15.0  # a run renews its evidence ten times a second
_MOST_REASONS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run knows of its candidate at `at_ns`, 0 before its traffic.

    `failed` is what surely happened, the most urgent first. `missing` says why nothing is sure of its `standing` now,
    None where that can be. `unseen`: the candidate had too few requests since the run began for any judgement.
    `interim` is the number of the last interim analysis.
    """

    run: str = ""
    limits: RampLimits = field(default_factory=RampLimits)
    at_ns: int = 0
    failed: tuple[str, ...] = ()
    missing: str | None = None
    standing: Standing = field(default_factory=Standing)
    unseen: bool = True
    interim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The verdict, and why."""

    verdict: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verdict}: {'; '.join(self.reasons)}"


def answer(evidence: Evidence, goal: Goal, *, now_ns: int) -> Answer:
    """Return whether the candidate may have more of the traffic (step), or all of it (promotion), at `now_ns`."""
    if evidence.failed:
        return Answer(verdict=FAIL, reasons=evidence.failed[:_MOST_REASONS])
    standing, limits = evidence.standing, evidence.limits
    lacking = _silence(evidence, now_ns) or evidence.missing or lacks(standing, limits, to_whole=goal == "promotion")
    if lacking is not None:
        return Answer(verdict=INCONCLUSIVE, reasons=(lacking,))
    margin = f"it is surely at most {100.0 * limits.step_margin:g} % slower than the control"
    return Answer(verdict=PASS, reasons=("every gate with interim evidence has passed" if standing.passed else margin,))


def hook_answer(hook: str, evidence: Evidence, *, first: bool, now_ns: int) -> tuple[bool, Answer]:
    """Return (whether Flagger goes on, why). `first`: no increase of traffic was allowed yet."""
    found = answer(evidence, HOOKS[hook], now_ns=now_ns)
    before_traffic = hook == "confirm-rollout" or (hook == "confirm-traffic-increase" and first and evidence.unseen)
    if hook == "rollback":
        return found.verdict == FAIL, found
    if hook == "rollout" or (before_traffic and not _silence(evidence, now_ns)):
        return found.verdict != FAIL, found
    return found.verdict == PASS, found


def _silence(evidence: Evidence, now_ns: int) -> str:
    if not evidence.at_ns:
        return "the traffic is not watched yet"
    silent_s = (now_ns - evidence.at_ns) / 1e9
    return f"run {evidence.run} has made no interim analysis for {silent_s:.0f} s" if silent_s > _SILENT_S else ""
