"""How figures read in reasons and advice: counts, shares, lengths of time, lists of faults."""

from __future__ import annotations

import math
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """The count with its noun: "1 stall", "3 stalls"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """The share in percent, three digits: "0.123 %"."""
    return f"{100.0 * share:.3g} %"


def sentence(faults: Sequence[str]) -> str:
    """The faults as one sentence without its full stop."""
    text = "; ".join(faults)
    return text[:1].upper() + text[1:]


def duration_text(seconds: float) -> str:
    """The length in the unit a reader thinks in: "90 seconds", "20 minutes", "3.5 hours"."""
    if seconds < 180:
        return f"{seconds:.0f} seconds"
    if seconds < 2 * 3600:
        return f"{math.ceil(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
