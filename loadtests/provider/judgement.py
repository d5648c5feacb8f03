"""PASS, FAIL or INCONCLUSIVE for a candidate now, by what is known of its run. Pure.

FAIL is what surely happened, and stays. PASS is true of now alone: it takes somebody who looks, a look that is fresh,
and requests in the window. Everything else is INCONCLUSIVE, with what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.judging.alarms import Alarm
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS
from analysis.judging.ramp import Standing, lacks
from analysis.records.plain_values import mapping, rows_of, text_of
from analysis.settings.ramp_limits import RampLimits
from loadtests.provider.question import Question

_MOST_REASONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run tells of one arm at one instant.

    `unwatched` says why nobody watches the arm now, `stale` why there is no fresh look at it; empty where there is.
    `rolled_back` is why the run itself took the arm back. `requests` ended in the window, `ever` since the run began.
    """

    run: str
    arm: str
    limits: RampLimits
    unwatched: str = ""
    stale: str = ""
    look: Mapping[str, Any] | None = None
    rolled_back: str = ""
    alarms: Sequence[Alarm] = ()
    requests: int = 0
    ever: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer, and why."""

    verdict: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verdict}: {'; '.join(self.reasons)}"


def judge(evidence: Evidence, question: Question) -> Judgement:
    """What the evidence says to the question."""
    found = _judge(evidence, question)
    if found.verdict == INCONCLUSIVE and question.inconclusive == "fail":
        return replace(found, verdict=FAIL, reasons=("still open, and inconclusive=fail", *found.reasons))
    return found


def _judge(evidence: Evidence, question: Question) -> Judgement:
    outlook = mapping(mapping(mapping(evidence.look).get("arms")).get(evidence.arm))
    step = mapping(mapping(evidence.look).get("step"))
    gates = [row for row in rows_of(mapping(evidence.look).get("gates")) if row.get("arm") == evidence.arm]
    gates = [row for row in gates if row.get("gate") == question.gate] if question.gate else gates
    failures = _failures(evidence, outlook, step, gates, of_gate=bool(question.gate))
    if failures:
        return Judgement(verdict=FAIL, reasons=tuple(failures[:_MOST_REASONS]))
    missing = evidence.unwatched or evidence.stale
    if missing:
        return Judgement(verdict=INCONCLUSIVE, reasons=(missing,))
    if question.gate and not gates:
        return Judgement(verdict=INCONCLUSIVE, reasons=(f'the last look has no gate "{question.gate}"',))
    still = [row for row in gates if row.get("verdict") != PASS]
    passed = not still if question.gate else outlook.get("decision") == PASS
    standing = Standing(
        step=0,
        step_s=0.0,
        safe=passed or bool(step.get("safe")),
        passed=passed,
        requests=evidence.requests,
        uneven=text_of(step, "uneven") or None,
    )
    if question.gate and still:
        return Judgement(verdict=INCONCLUSIVE, reasons=(text_of(still[0], "reason", "the gate is open"),))
    lacking = lacks(standing, evidence.limits, to_whole=question.goal == "promotion")
    if lacking is not None:
        reasons = (lacking, text_of(outlook, "reason")) if not passed else (lacking,)
        return Judgement(verdict=INCONCLUSIVE, reasons=tuple(filter(None, reasons)))
    return Judgement(verdict=PASS, reasons=(_surely(evidence, question, passed=passed),))


def _failures(
    evidence: Evidence,
    outlook: Mapping[str, Any],
    step: Mapping[str, Any],
    gates: Sequence[Mapping[str, Any]],
    *,
    of_gate: bool,
) -> list[str]:
    """What surely happened, the most urgent first."""
    found = [alarm.why for alarm in evidence.alarms]
    if evidence.rolled_back:
        found.append(f"the run has rolled it back: {evidence.rolled_back}")
    if of_gate:
        return found + [text_of(row, "reason", "the gate failed") for row in gates if row.get("verdict") == FAIL]
    if outlook.get("decision") == FAIL:
        found.append(text_of(outlook, "reason", "a gate failed"))
    if step.get("failed"):
        found.append(str(step["failed"]))
    return found


def _surely(evidence: Evidence, question: Question, *, passed: bool) -> str:
    if question.gate:
        return f"{question.gate} has passed"
    if passed:
        return "every gate that may be looked at has passed"
    return f"it is surely at most {100.0 * evidence.limits.step_margin:g} % slower than the control"
