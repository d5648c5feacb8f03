"""A ramp: how it went, and what it does next: stay, hold, go on to the next step, roll back, or end.

Traffic increases only when the candidate is surely no worse, and a sure harm rolls back from any step. Alarms roll back
without a decision (`tailgate.analysis.judging.alarms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tailgate.analysis.checks.generator import unfinished_requests
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from tailgate.analysis.records.plain_values import table
from tailgate.analysis.records.weight_journal import BY_HAND, WeightChange
from tailgate.analysis.run.run import Run
from tailgate.analysis.settings.ramp_limits import RampLimits
from tailgate.analysis.wording import counted

OUTCOMES = {"promoted": PASS, "rollback": FAIL, "hold": INCONCLUSIVE}
_WORDS = {"rollback": "was rolled back", "hold": "was held"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RampAccount:
    """How a ramp went until its `last` change. `outcome` is promoted, rollback, or hold where it ended in between.

    `exposed` are the candidate's requests, `hurt` those of them that failed, that a compile delayed, or that had not
    ended after the longest that a request may last. `rollback_s` counts from the cause until the splitter had taken it.
    """

    candidate: str
    limits: RampLimits
    last: WeightChange
    outcome: str
    reason: str
    exposed: int
    hurt: int
    rollback_s: float | None


def ramp_of(run: Run) -> RampAccount | None:
    """Return None if the run was no ramp."""
    changes = [change for change in run.records.weights if change.step is not None]
    if not changes:
        return None
    limits, last = RampLimits.recorded(table(run.records.experiment, "ramp")), changes[-1]
    candidate = limits.candidate or next(iter(run.treatments), "")
    own = run.of_arm(candidate) & ~run.requests.broken
    hurt = own & (run.requests.failed | run.attribution.hit)
    unfinished = unfinished_requests(run.records.generators)[candidate]
    reason, rollback_s = last.why.rstrip("."), None
    if last.action not in (*OUTCOMES, BY_HAND):
        reason = "the run ended before that step was decided"
    elif last.action == "rollback" and last.done_ns is None:
        # Decided is not done: the splitter may be gone.
        reason += ", but the splitter had not applied it when the run ended"
    elif last.action == "rollback" and last.done_ns is not None:
        rollback_s = (last.done_ns - (last.cause_ns or last.at_ns)) / 1e9
    return RampAccount(
        candidate=candidate,
        limits=limits,
        last=last,
        outcome=last.action if last.action in OUTCOMES else "hold",
        reason=reason,
        exposed=int(own.sum()) + unfinished,
        hurt=int(hurt.sum()) + unfinished,
        rollback_s=rollback_s,
    )


def ramp_gate(account: RampAccount) -> Gate:
    outcome, share = account.outcome, account.limits.steps[account.last.step or 0]
    ended = f"It {_WORDS[outcome]} at {share:g} %: {account.reason}" if outcome in _WORDS else "It reached all traffic"
    return Gate(
        arm=account.candidate,
        gate="ramp",
        kind="ramp",
        value=0.0 if outcome == "rollback" else share,
        limit=100.0,
        unit="pct",
        verdict=OUTCOMES[outcome],
        reason=f"{ended}; it served {counted(account.exposed, 'request')}: {account.hurt} failed or were delayed.",
    )


Action = Literal["stay", "hold", "advance", "rollback", "promoted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the candidate of a ramp stands at an interim analysis.

    `failed` is why a gate, or the comparison of a step, has failed. `safe`: it is surely no slower than a step allows;
    `passed`: every gate with interim evidence has passed. `requests` of it were judged since the last change of
    weights; `uneven` says how its share differs from its weight.
    """

    failed: str | None = None
    safe: bool = False
    passed: bool = False
    requests: int = 0
    uneven: str | None = None


def decide(standing: Standing, limits: RampLimits, *, step: int, step_s: float) -> tuple[Action, str]:
    """Return what the ramp does, and why, in step number `step` (from 0) that has lasted `step_s`."""
    if standing.failed is not None:
        return "rollback", standing.failed
    if step_s < limits.step_s:
        return "stay", f"a step lasts at least {limits.step_s:g} s"
    if step == len(limits.steps) - 1:
        return "promoted", "it serves all of the traffic without an alarm"
    share = limits.steps[step + 1]
    lacking = lacks(standing, limits, to_whole=share == 100.0)
    if lacking is None:
        return "advance", f"every condition for {share:g} % is met"
    if step_s >= limits.most_step_s:
        return limits.on_inconclusive, f"still open after {limits.most_step_s:g} s: {lacking}"
    return "stay", lacking


def lacks(standing: Standing, limits: RampLimits, *, to_whole: bool) -> str | None:
    """Return what the next step lacks, `to_whole` if it is all of the traffic; None if it lacks nothing."""
    if standing.requests < limits.least_requests:
        return f"the candidate had {standing.requests} of {counted(limits.least_requests, 'request')}"
    if standing.uneven is not None:
        return standing.uneven
    if to_whole and not standing.passed:
        return "not every gate has passed, and the next step leaves no control to compare with"
    if not to_whole and not standing.safe:
        return f"the candidate is not yet shown to be at most {100 * limits.step_margin:g} % slower"
    return None
