"""The gates on compiles of an arm of somebody else whose log tells of some: judged by it, and from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.judging.gates import FAIL, INCONCLUSIVE, PASS, Gate


def logged_gates(told: Sequence[Gate], seen: Sequence[Gate], *, tells: str, spots: Sequence[str]) -> list[Gate]:
    """One gate of each pair that judges the same, by the events of the log and from outside.

    What the log tells was: it fails an arm. What it does not tell may have been all the same where `spots` say that it
    leaves compiles out: then the view from outside decides. Where it tells of all that `tells` says, an arm passes that
    fails neither way and has no stall beyond the limit that neither explains.
    """
    return [_both(by_log, outside, tells, spots) for by_log, outside in zip(told, seen, strict=True)]


def _both(told: Gate, seen: Gate, tells: str, spots: Sequence[str]) -> Gate:
    if told.verdict == FAIL:
        return replace(told, reason=f"By its log: {told.reason}")
    if spots:
        return replace(seen, reason=f"{seen.reason} Its log may leave compiles out: {'; '.join(spots)}.")
    if seen.verdict == FAIL:
        return replace(seen, reason=f"{seen.reason} Its log, which tells of {tells}, shows fewer.")
    if told.verdict == INCONCLUSIVE:
        return told
    value = told.value if seen.value is None or seen.verdict != PASS else max(told.value or 0.0, seen.value)
    reason = f"{seen.reason} By its log, which tells of {tells}: {told.reason}"
    return replace(seen, reason=reason, value=value if seen.verdict == PASS else seen.value)
