"""An interim analysis: the judge on what has settled, and whether an arm is decided.

An arm has failed once a gate fails, and passed once every gate with interim evidence passes. What is asked after the
traffic, or what clients cannot see, is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailgate.analysis.checks.check import Check
from tailgate.analysis.checks.traffic import sample_ratio
from tailgate.analysis.judging.comparisons import step_comparisons
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.judging.ramp import RampAccount, Standing, ramp_of
from tailgate.analysis.judging.verdict import KIND_ORDER
from tailgate.analysis.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutlook:
    """Where an arm stands. A FAIL is final, a PASS unless later evidence contradicts it. `outlook_s` are the
    seconds that will likely decide it, None where that is unknown."""

    arm: str
    reason: str
    decision: str | None = None
    decided_s: float | None = None
    outlook_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interim:
    """What is known of the run so far. `step` is where the candidate of a ramp stands."""

    arms: tuple[ArmOutlook, ...]
    step: Standing | None
    gates: tuple[Gate, ...]
    checks: tuple[Check, ...]


def analyse(run: Run) -> Interim:
    """Make the interim analysis of the run so far."""
    seen = judge(run, at_end=False)
    # No step of a ramp can wait for the end of the run.
    ramp = ramp_of(run)
    to_the_end = ramp is None and run.limits.max_memory_ratio is not None
    arms = [
        outlook_of(arm, [gate for gate in seen.gates if gate.arm == arm], seconds=run.seconds, to_the_end=to_the_end)
        for arm in run.treatments
    ]
    step = None if ramp is None else _standing(run, ramp, arms, seen.checks)
    return Interim(arms=tuple(arms), step=step, gates=seen.gates, checks=seen.checks)


def _standing(run: Run, ramp: RampAccount, arms: Sequence[ArmOutlook], checks: Sequence[Check]) -> Standing:
    outlook = next(item for item in arms if item.arm == ramp.candidate)
    compared = step_comparisons(run, ramp.candidate, ramp.limits.step_margin)
    slower = next((item.reason for item in compared if item.verdict == FAIL), None)
    own = run.of_arm(ramp.candidate) & run.usable
    return Standing(
        failed=outlook.reason if outlook.decision == FAIL else slower,
        safe=bool(compared) and all(item.verdict == PASS for item in compared),
        passed=outlook.decision == PASS,
        requests=int((own & (run.requests.start_ns >= ramp.last.at_ns)).sum()),
        uneven=next((check.reason for check in checks if check.rule is sample_ratio and not check.ok), None),
    )


def outlook_of(arm: str, gates: Sequence[Gate], *, seconds: float, to_the_end: bool = False) -> ArmOutlook:
    """Return the arm's outlook by its gates. `to_the_end`: it has gates that only the end of the run decides."""
    failing = [gate for gate in gates if gate.verdict == FAIL]
    failed = min(failing, key=lambda gate: KIND_ORDER.index(gate.kind), default=None)
    if failed is not None:
        at_s = None if failed.path is None else failed.path.decided_s
        return ArmOutlook(arm=arm, decision=FAIL, decided_s=seconds if at_s is None else at_s, reason=failed.reason)
    waited = [gate for gate in gates if gate.kind != "parity" and not gate.unseen]
    still = [gate for gate in waited if gate.verdict == INCONCLUSIVE]
    if still:
        left = [None if gate.path is None or gate.path.outcome is not None else gate.path.outlook_s for gate in still]
        known = [value for value in left if value is not None]
        return ArmOutlook(arm=arm, outlook_s=max(known) if len(known) == len(left) else None, reason=still[0].reason)
    if not waited or to_the_end:
        return ArmOutlook(arm=arm, reason="Some gates are decided at the end of the run.")
    at_s = max((gate.path.decided_s or 0.0 for gate in waited if gate.path is not None), default=seconds)
    return ArmOutlook(arm=arm, decision=PASS, decided_s=at_s, reason="Every gate with interim evidence has passed.")
