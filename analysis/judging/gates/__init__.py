"""The requirements on one arm, a module for each family: what a gate asks, how it is judged and what its reason says.

Gates on latency, errors and goodput are estimates, so a run may be too short for them. Gates on compiles are counts of
what happened: they FAIL in a run of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailgate.analysis.judging.paths import Path

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
ORDER = (FAIL, INCONCLUSIVE, PASS)  # the worst first


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One requirement on one arm."""

    arm: str
    gate: str
    kind: str  # noninferiority | slo | goodput | recompile | error | parity | memory | ramp
    value: float | None
    limit: float | None
    unit: str  # ratio | ms | count | s | pct
    verdict: str
    reason: str
    interval: tuple[float | None, float | None] = (None, None)  # of its value; of an SLO, of the percentage that misses
    needed_s: float | None = None  # run length that would decide it; None when decided or out of reach
    needed_starts: int | None = None  # trials that it takes for that, where it is more than the run had
    blocked_by: tuple[str, ...] = ()  # checks that forbid to believe it
    caveat: str = ""  # the end of its reason, where failed checks turned its verdict; empty where none did
    allowance: str = ""  # the part of its reason that says what it allows for of what failed checks saw
    low: float | None = None  # limits of a ratio, which a machine may have moved
    lacks: str = ""  # why a ratio has no limits, in a few words
    high: float | None = None  # of an objective that no request missed, the slowest
    lasting: tuple[float, float] | None = None  # both, where trials are what it counts and one state may outlast some
    unseen: str = ""  # what decides it where only clients saw the arm, and no longer run does
    path: Path | None = None  # how its evidence grew, where interim analyses decide


def status(low: float | None, high: float | None, limit: float) -> str:
    """Return PASS if all of the interval keeps the limit, FAIL if none of it does, else INCONCLUSIVE.

    A count has its value at both ends. None is an unknown end, which decides nothing.
    """
    if high is not None and high <= limit:
        return PASS
    if low is not None and low > limit:
        return FAIL
    return INCONCLUSIVE


def count_gate(arm: str, name: str, kind: str, value: float | None, limit: float, unit: str, reason: str) -> Gate:
    """Return a gate on what happened, which needs no error bars; INCONCLUSIVE if the value is unknown."""
    verdict = status(value, value, limit)
    return Gate(arm=arm, gate=name, kind=kind, value=value, limit=limit, unit=unit, verdict=verdict, reason=reason)
