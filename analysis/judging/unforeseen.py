"""What an arm did with shapes that no graph fits: ran them eagerly, or refused them. Counts of what happened."""

from __future__ import annotations

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.judging.wording import percent
from analysis.records.plain_values import mapping
from analysis.run.compiled import CompiledSteps, compiled_steps, eager_pct
from analysis.run.run import Run


def unforeseen_gates(run: Run, arm: str) -> list[Gate]:
    """The gates `eager steps` and `refused`: where the policy provides for such an outcome, or it came all the same."""
    if run.account(arm).external:
        return []
    policy = mapping(run.account(arm).config.get("compile"))
    gates = []
    counts = compiled_steps(run, arm)
    if policy.get("guarded") is True or eager_pct(counts):
        gates.append(eager_gate(arm, counts, run.limits.max_eager_steps_pct))
    own = run.of_arm(arm) & ~run.requests.broken & (run.requests.ok | run.requests.failed)
    refused = int(run.requests.refused[own].sum())
    if policy.get("strict") is True or refused:
        gates.append(refused_gate(arm, refused, int(own.sum()), run.limits.max_refused_pct))
    return gates


def eager_gate(arm: str, counts: list[CompiledSteps], limit_pct: float) -> Gate:
    """At most so many of the arm's steps ran as plain Python."""
    value = eager_pct(counts)
    eager, steps = sum(count.steps - count.compiled for count in counts), sum(count.steps for count in counts)
    verdict = INCONCLUSIVE if value is None else FAIL if value > limit_pct else PASS
    seen = f"{eager} of {steps} steps ran eagerly ({percent((value or 0.0) / 100.0)}), limit {limit_pct:g} %."
    return Gate(
        arm=arm,
        gate="eager steps",
        kind="recompile",
        value=value,
        limit=limit_pct,
        unit="pct",
        verdict=verdict,
        reason=seen if steps else "No step of this arm was recorded, so nothing is known.",
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
