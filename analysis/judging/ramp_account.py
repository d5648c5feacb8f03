"""What became of a ramp: how it ended, and how many requests were exposed to the candidate and hurt by it."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.checks.generator import unfinished_requests
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.plain_values import table
from analysis.records.weight_journal import BY_HAND, WeightChange
from analysis.run.run import Run
from analysis.settings.ramp_limits import RampLimits
from analysis.wording import counted

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
    """Return the account of the run's ramp; None if it was none."""
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
        reason += ", which the splitter had not taken when the run ended"
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
    """Whether the candidate was promoted."""
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
        reason=f"{ended}; it served {counted(account.exposed, 'request')}, of which {account.hurt} were hurt.",
    )
