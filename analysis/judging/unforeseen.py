"""What an arm did with shapes that no graph fits: ran them eagerly, or refused them. Counts of what happened."""

from __future__ import annotations

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.records.plain_values import mapping
from analysis.run.compiled import EagerSteps, compiled_steps, most_eager
from analysis.run.run import Run
from analysis.wording import percent


def unforeseen_gates(run: Run, arm: str) -> list[Gate]:
    """The gates `eager steps` and `refused`: where the policy provides for such an outcome, or it came all the same."""
    if run.account(arm).external:
        return []
    policy = mapping(run.account(arm).config.get("compile"))
    gates = []
    most = most_eager(compiled_steps(run, arm))
    if policy.get("guarded") is True or (most is not None and most.eager):
        gates.append(eager_gate(arm, most, run.limits.max_eager_steps_pct))
    own = run.of_arm(arm) & ~run.requests.broken & (run.requests.ok | run.requests.failed)
    refused = int(run.requests.refused[own].sum())
    if policy.get("strict") is True or refused:
        gates.append(refused_gate(arm, refused, int(own.sum()), run.limits.max_refused_pct))
    return gates


def eager_gate(arm: str, most: EagerSteps | None, limit_pct: float) -> Gate:
    """At most so many of the arm's steps ran as plain Python, of the kind of step with the largest share."""
    if most is None:
        verdict, reason = INCONCLUSIVE, "No step of this arm was recorded, so nothing is known."
    else:
        verdict = FAIL if most.pct > limit_pct else PASS
        reason = (
            f"{most.eager} of {most.steps} {most.kind} steps ran eagerly ({percent(most.pct / 100.0)}), "
            f"limit {limit_pct:g} %."
        )
    return Gate(
        arm=arm,
        gate="eager steps",
        kind="recompile",
        value=None if most is None else most.pct,
        limit=limit_pct,
        unit="pct",
        verdict=verdict,
        reason=reason,
    )


def refused_gate(arm: str, refused: int, requests: int, limit_pct: float) -> Gate:
    """At most so many of the arm's requests were refused because no graph fitted their step."""
    value = 100.0 * refused / requests if requests else None
    verdict = INCONCLUSIVE if value is None else FAIL if value > limit_pct else PASS
    share = percent((value or 0.0) / 100.0)
    seen = f"{refused} of {requests} requests were refused, since no graph fitted their step ({share})"
    return Gate(
        arm=arm,
        gate="refused",
        kind="error",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=verdict,
        reason=f"{seen}, limit {limit_pct:g} %." if requests else "No request completed or failed.",
    )
