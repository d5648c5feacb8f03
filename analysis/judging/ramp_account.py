"""What became of a ramp: how it ended, and how many requests were exposed to the candidate and hurt by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.checks.generator import unfinished_requests
from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.plain_values import table
from analysis.records.weight_journal import BY_HAND, WeightChange
from analysis.run.run import Run
from analysis.settings.ramp_limits import RampLimits
from analysis.wording import counted

OUTCOMES = {"promoted": PASS, "rollback": FAIL}
_DECIDED = ("hold", "promoted", "rollback", BY_HAND)  # what ends a ramp; any other change begins a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RampAccount:
    """`exposed` are the candidate's requests, `hurt` those of them that failed, that a compile delayed, or that had not
    ended after the longest that a request may last."""

    candidate: str
    limits: RampLimits
    changes: Sequence[WeightChange]
    exposed: int
    hurt: int

    @property
    def last(self) -> WeightChange:
        """How it stands at the end."""
        return self.changes[-1]

    @property
    def outcome(self) -> str:
        """promoted, rollback, or hold where it ended in between."""
        return self.last.action if self.last.action in OUTCOMES else "hold"

    @property
    def why(self) -> str:
        """Why it ended so."""
        last, why = self.last, self.last.why.rstrip(".")
        if last.action not in _DECIDED:
            return "the run ended before that step was decided"
        # Decided is not done: the splitter may be gone.
        is_due = self.outcome == "rollback" and last.done_ns is None
        return f"{why}, which the splitter had not taken when the run ended" if is_due else why

    @property
    def rollback_s(self) -> float | None:
        """Seconds from what caused the rollback to the splitter's having taken it; None where there was none."""
        last = self.last
        if self.outcome != "rollback" or last.done_ns is None:
            return None
        return (last.done_ns - (last.cause_ns or last.at_ns)) / 1e9


def ramp_of(run: Run) -> RampAccount | None:
    """The account of the run's ramp; None where it was none."""
    changes = [change for change in run.records.weights if change.step is not None]
    if not changes:
        return None
    limits = RampLimits.recorded(table(run.records.experiment, "ramp"))
    candidate = limits.candidate or next(iter(run.treatments), "")
    own = run.of_arm(candidate) & ~run.requests.broken
    hurt = own & (run.requests.failed | run.attribution.hit)
    unfinished = unfinished_requests(run.records.generators)[candidate]
    return RampAccount(
        candidate=candidate,
        limits=limits,
        changes=changes,
        exposed=int(own.sum()) + unfinished,
        hurt=int(hurt.sum()) + unfinished,
    )


def ramp_gate(account: RampAccount) -> Gate:
    """Whether the candidate was promoted."""
    last = account.last
    were = "was" if account.exposed == 1 else "were"
    seen = f"{counted(account.exposed, 'request')} {were} exposed to it and {account.hurt} hurt"
    at = f"at {account.limits.steps[last.step or 0]:g} %"
    reason = {
        "promoted": f"It reached all of the traffic; {seen}.",
        "rollback": f"It was rolled back {at}: {account.why}; {seen}.",
        "hold": f"It was held {at}: {account.why}; {seen}.",
    }[account.outcome]
    return Gate(
        arm=account.candidate,
        gate="ramp",
        kind="ramp",
        value=account.limits.steps[last.step or 0] if account.outcome != "rollback" else 0.0,
        limit=100.0,
        unit="pct",
        verdict=OUTCOMES.get(account.outcome, INCONCLUSIVE),
        reason=reason,
    )
