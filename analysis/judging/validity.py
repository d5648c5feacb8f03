"""Whether to believe the gates: conditions without which some of them mean nothing.

A check that fails turns the gates it affects INCONCLUSIVE. Two kinds of FAIL stand all the same, because they are
counts of what happened and no estimate: recompiles while serving, and errors (unless the control failed too, which
points at the test bed). The checks themselves are in `analysis.judging.checks`: `records` (is everything there),
`traffic` (was the load what it claims), `arms` (may the two be compared), `statistics` (can the data carry it); and in
`analysis.judging.generators` (did the load processes keep up).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate
from analysis.statistics.compare import TRIALS_FOR_T_TEST

# Kinds of gates that a check affects.
ESTIMATES = ("noninferiority", "slo", "cold")
ALL_KINDS = ("noninferiority", "slo", "cold", "recompile", "error")
PARITY = "parity"  # not among them: its prompts are not part of the traffic

# Arms were offered more than they can serve. It is reported first; an objective that is missed then stays missed.
OVERLOAD = "overload"

# Checks that a longer run of the same kind would pass.
LENGTH_CHECKS = frozenset({"blocks", "run length", "tail", "cut requests"})

# What machines differ by over a trial, over trials and from their kind.
SPEED_CHECKS = frozenset({"bed drift", "bed apart", "slow bed"})

# An arm stalled for longer than compiles may, and no event explains it.
UNKNOWN_STALLS = "stalls of unknown cause"

# Checks that no longer run passes: what they saw stays in the records.
LASTING_CHECKS = frozenset({UNKNOWN_STALLS, "compilers seen"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition without which some gates mean nothing. `arm` None concerns all arms."""

    check: str
    ok: bool
    arm: str | None = None
    value: float | None = None
    limit: float | None = None
    reason: str
    affects: tuple[str, ...]  # kinds of gates
    gates: tuple[str, ...] = ()  # the only ones of these kinds that it concerns; empty: all
    shift: float | None = None  # the most that it can have moved the log of a ratio by; None: nobody knows
    slows: bool = False  # what it saw can only have made requests slower
    spares: str = ""  # the verdict of a ratio that what it saw cannot have made
    among_trials: bool = False  # what it saw falls on some trials and not on others, so their differences have it in
    remedy: str = ""  # what to change where it is not ok; empty when a longer run is the answer


def faults_to_mend(checks: Iterable[Check], gates: Sequence[Gate], trials: int) -> list[Check]:
    """The failed checks that no longer run mends. From as many `trials` on as are each one observation, what fell on
    some of them is in what they differ by, and is a fault where one of the `gates` is open by it all the same."""

    def keeps_open(check: Check) -> bool:
        return any(check.check in gate.blocked_by and check.arm in (None, gate.arm) for gate in gates)

    failed = [check for check in checks if not check.ok and check.check not in LENGTH_CHECKS]
    by_trials = trials >= TRIALS_FOR_T_TEST
    return [check for check in failed if not (by_trials and check.among_trials) or keeps_open(check)]


def apply_checks(gates: Sequence[Gate], checks: Sequence[Check]) -> list[Gate]:
    """The gates, with every PASS and every estimated FAIL that a failed check forbids turned INCONCLUSIVE."""
    return [_checked(gate, [check for check in checks if not check.ok and _concerns(check, gate)]) for gate in gates]


_RESTS_ON = {"goodput": "slo", "memory": "error"}


def _concerns(check: Check, gate: Gate) -> bool:
    # What goodput rests on is what objectives rest on, and memory needs what counts of errors need.
    kinds = {gate.kind, _RESTS_ON.get(gate.kind, gate.kind)}
    named = gate.gate in (check.gates or [gate.gate])
    return bool(kinds & set(check.affects)) and check.arm in (None, gate.arm) and named


def _withstands(gate: Gate, shift: float) -> bool:
    """Whether the gate would say the same of a ratio that is wrong by up to `shift`, in logarithms."""
    # A PASS rests on the upper limit, a FAIL on the lower one: the other may be unknown.
    limit = {PASS: gate.high, FAIL: gate.low}.get(gate.verdict)
    if gate.limit is None or limit is None or min(gate.limit, limit) <= 0:
        return False
    apart = math.log(gate.limit) - math.log(limit)
    return apart >= shift if gate.verdict == PASS else -apart > shift


def _by_trials(gate: Gate, failed: Sequence[Check]) -> tuple[Gate, list[Check]]:
    """The gate and the checks that are left to it where its evidence is what trials differ by, which has in it what
    falls on some of them. What it decides must be so too where a state of the machines lasts for several trials."""
    among = [check for check in failed if check.among_trials]
    if not among or gate.lasting is None or gate.limit is None:
        return gate, list(failed)
    low, high = gate.lasting
    if not {PASS: high <= gate.limit, FAIL: low > gate.limit}.get(gate.verdict, True):
        return gate, list(failed)
    if gate.verdict != INCONCLUSIVE:
        names = ", ".join(dict.fromkeys(check.check for check in among))
        sure = f"between {low:.2f} and {high:.2f} where it outlasts a trial"
        gate = _allowing(gate, f"Its trials differ by what {names} saw, too: {sure}.")
    return gate, [check for check in failed if not check.among_trials]


def _allowing(gate: Gate, allowance: str) -> Gate:
    return replace(gate, allowance=f"{gate.allowance} {allowance}".lstrip(), reason=f"{gate.reason} {allowance}")


def _checked(gate: Gate, failed: Sequence[Check]) -> Gate:
    failed = [check for check in failed if check.spares != gate.verdict]
    gate, failed = _by_trials(gate, failed)
    if gate.verdict == PASS and gate.kind in ("slo", "cold"):
        failed = [check for check in failed if not check.slows]  # on quiet machines requests would be faster
    shift = sum(check.shift or 0.0 for check in failed)
    if shift and _withstands(gate, shift):
        moved = [check for check in failed if check.shift]
        failed = [check for check in failed if not check.shift]
        names = ", ".join(dict.fromkeys(check.check for check in moved))
        gate = _allowing(gate, f"What {names} saw can have moved it by ×{math.exp(shift):.2f}.")
    if not failed:
        return gate
    blocked = tuple(dict.fromkeys(check.check for check in failed))
    stands = gate.kind == "recompile" or (gate.kind == "error" and "control errors" not in blocked)
    stands = stands or (gate.kind == "slo" and blocked == (OVERLOAD,))
    if gate.verdict == FAIL and stands:
        return gate
    if gate.verdict == INCONCLUSIVE:
        return replace(gate, blocked_by=blocked)
    # By name: the reason of a check concerns several gates and is reported once, with the checks.
    because = f"the check{'' if len(blocked) == 1 else 's'} that failed: {', '.join(blocked)}"
    caveat = f"That would be a {gate.verdict}, but for {because}."
    return replace(gate, verdict=INCONCLUSIVE, blocked_by=blocked, caveat=caveat, reason=f"{gate.reason} {caveat}")
