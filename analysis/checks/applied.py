"""What failed checks do to gates: each turns the verdicts that it concerns INCONCLUSIVE.

Two kinds of FAIL stand nevertheless, since they count what happened: recompiles while serving, and errors, unless the
control failed too. A gate also stands where what the checks saw can have moved its ratio by too little to turn it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tailgate.analysis.checks.check import Check
from tailgate.analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate

# What goodput rests on is what objectives rest on, and memory needs what counts of errors need.
_RESTS_ON = {"goodput": "slo", "memory": "error"}


def apply_checks(gates: Sequence[Gate], checks: Sequence[Check]) -> list[Gate]:
    """Return the gates, with every PASS and estimated FAIL that a failed check forbids turned INCONCLUSIVE."""
    return [_checked(gate, [check for check in checks if not check.ok and _concerns(check, gate)]) for gate in gates]


def blocking(gate: Gate, checks: Iterable[Check]) -> list[Check]:
    """Return the failed checks that keep the gate open."""
    return [check for check in checks if not check.ok and check.check in gate.blocked_by and _concerns(check, gate)]


def _concerns(check: Check, gate: Gate) -> bool:
    kinds = {gate.kind, _RESTS_ON.get(gate.kind, gate.kind)}
    named = gate.gate in (check.gates or [gate.gate])
    return bool(kinds & set(check.opens)) and check.arm in (None, gate.arm) and named


def _withstands(gate: Gate, shift: float) -> bool:
    """Return whether the gate's verdict survives an error of the ratio by up to `shift`, in logarithms."""
    # A PASS rests on the upper limit, a FAIL on the lower one: the other may be unknown.
    limit = {PASS: gate.high, FAIL: gate.low}.get(gate.verdict)
    if gate.limit is None or limit is None or min(gate.limit, limit) <= 0:
        return False
    distance = math.log(gate.limit) - math.log(limit)
    return distance >= shift if gate.verdict == PASS else -distance > shift


def _by_trials(gate: Gate, failed: Sequence[Check]) -> tuple[Gate, list[Check]]:
    """Drop the checks of what affects some trials, which the variance between trials covers if the decision also holds
    where a disturbance lasts for several of them; and allow for them in the gate's reason."""
    among = [check for check in failed if check.among_trials]
    if not among or gate.lasting is None or gate.limit is None:
        return gate, list(failed)
    low, high = gate.lasting
    if not {PASS: high <= gate.limit, FAIL: low > gate.limit}.get(gate.verdict, True):
        return gate, list(failed)
    if gate.verdict != INCONCLUSIVE:
        sure = f"between {low:.2f} and {high:.2f} if a disturbance lasts for several trials"
        gate = _allowing(gate, f"The verdict allows for {_names(among)}: {sure}.")
    return gate, [check for check in failed if not check.among_trials]


def _allowing(gate: Gate, allowance: str) -> Gate:
    return replace(gate, allowance=f"{gate.allowance} {allowance}".lstrip(), reason=f"{gate.reason} {allowance}")


def _names(checks: Iterable[Check]) -> str:
    return ", ".join(dict.fromkeys(check.check for check in checks))


def _checked(gate: Gate, failed: Sequence[Check]) -> Gate:
    gate, failed = _by_trials(gate, [check for check in failed if check.spares != gate.verdict])
    if gate.verdict == PASS and gate.kind == "slo":
        failed = [check for check in failed if not check.rule.slows]  # on quiet machines requests would be faster
    shift = sum(check.shift or 0.0 for check in failed)
    if shift and _withstands(gate, shift):
        moved = _names(check for check in failed if check.shift)
        failed = [check for check in failed if not check.shift]
        gate = _allowing(gate, f"The effect of {moved} on the ratio is at most ×{math.exp(shift):.2f}.")
    if not failed:
        return gate
    blocked = tuple(dict.fromkeys(check.check for check in failed))
    if gate.verdict == FAIL and all(gate.kind in check.rule.keeps for check in failed):
        return gate
    if gate.verdict == INCONCLUSIVE:
        return replace(gate, blocked_by=blocked)
    # By name: the reason of a check concerns several gates and is reported once, with the checks.
    failed_checks = f"{'a check' if len(blocked) == 1 else 'checks'} failed: {', '.join(blocked)}"
    caveat = f"It would be {gate.verdict}, but {failed_checks}."
    return replace(gate, verdict=INCONCLUSIVE, blocked_by=blocked, caveat=caveat, reason=f"{gate.reason} {caveat}")
