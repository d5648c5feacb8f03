"""What a Flagger webhook is answered: go on (200) or not. Pure.

What "go on" means differs by hook, so the hook's type must be known, and Flagger's request does not hold it. Each
answer is the one that neither promotes nor rolls back what is open, as far as the hook can wait:

- confirm-rollout and pre-rollout come before any traffic: yes where the arm is watched and has not failed.
- confirm-traffic-increase waits for PASS. The first one, from 0, can have no evidence: yes as above, once, where the
  arm had fewer than `ramp.least_requests`.
- confirm-promotion waits for PASS of every gate.
- rollout counts a no towards the rollback: no only with FAIL.
- rollback rolls back with a yes: yes only with FAIL.
- post-rollout and event say what happened, and ask nothing.
"""

from __future__ import annotations

from typing import Final

from analysis.judging.gates import FAIL, PASS
from loadtests.provider.judgement import Evidence, Judgement, judge
from loadtests.provider.question import Goal, Question

GOAL_OF: Final[dict[str, Goal]] = {
    "confirm-rollout": "step",
    "pre-rollout": "step",
    "rollout": "step",
    "confirm-traffic-increase": "step",
    "confirm-promotion": "promotion",
    "rollback": "step",
    "post-rollout": "step",
    "event": "step",
}
TELLS = ("post-rollout", "event")
_BEFORE_TRAFFIC = ("confirm-rollout", "pre-rollout")


def answered(hook: str, evidence: Evidence, question: Question, *, first: bool) -> tuple[bool, Judgement]:
    """(whether Flagger goes on, why). `first`: no increase of traffic was allowed in this run yet."""
    found = judge(evidence, question)
    if hook == "rollback":
        return found.verdict == FAIL, found
    if hook == "rollout":
        return found.verdict != FAIL, found
    unseen = evidence.ever < evidence.limits.least_requests
    if hook in _BEFORE_TRAFFIC or (hook == "confirm-traffic-increase" and first and unseen):
        if found.verdict == FAIL:
            return False, found
        if evidence.unwatched:
            return False, Judgement(verdict=found.verdict, reasons=(evidence.unwatched,))
        return True, Judgement(verdict=found.verdict, reasons=("it is watched, and has not failed",))
    return found.verdict == PASS, found
