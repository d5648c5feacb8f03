"""One requirement of parity, judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One requirement, judged. `low` and `high` are the interval of `value` where it is an estimate."""

    name: str
    verdict: str
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
