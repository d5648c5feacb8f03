"""Which rates a saturation search sends: a geometric staircase first, then closer steps around each arm's knee.

Pure: what was learned of earlier trials comes in as brackets, and the same brackets give the same rates.
"""

from __future__ import annotations

from collections.abc import Sequence

# How far a bracket that is open on one side is searched further, as a factor.
_FURTHER = 4.0
# Steps closer than this are within what one trial differs from the next: the ends of the bracket are tried again.
_CLOSEST = 1.02
HIGHEST_RATE = 1e6


def staircase(low: float, high: float, steps: int) -> tuple[float, ...]:
    """`steps` rates from `low` to `high` with equal ratios between neighbours."""
    ratio = (high / low) ** (1 / (steps - 1))
    return tuple(_rounded(low * ratio**index) for index in range(steps))


def closer(
    brackets: Sequence[tuple[float | None, float | None]], steps: int, *, low: float, high: float
) -> tuple[float, ...]:
    """The rates of the next trial: `steps` of them, shared out over the (low, high) brackets of all arms, rising.

    An arm that failed everywhere is searched below the lowest rate tried, one that held everywhere above the highest.
    Arms whose knees lie in the same bracket share its steps.
    """
    spans: set[tuple[float, float]] = set()
    for passed, failed in brackets:
        start, end = passed, failed
        if start is None:
            start = low if end is None else end / _FURTHER
        if end is None:
            end = high if passed is None else min(passed * _FURTHER, HIGHEST_RATE)
        spans.add((start, end))
    chosen = sorted(spans)[:steps]
    rates: list[float] = []
    for index, (start, end) in enumerate(chosen):
        share = steps // len(chosen) + (index < steps % len(chosen))
        if end / start < _CLOSEST ** (share + 1):
            rates += [start if place % 2 == 0 else end for place in range(share)]
        else:
            rates += [start * (end / start) ** ((place + 1) / (share + 1)) for place in range(share)]
    return tuple(sorted(_rounded(rate) for rate in rates))


def _rounded(rate: float) -> float:
    """Four digits: what is sent is what is written."""
    return float(f"{rate:.4g}")
