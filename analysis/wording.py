"""How numbers, lengths of time and lists read in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Digits = Callable[[float, int], str]
fixed: Digits = "{:.{}f}".format


def _plain(number: float | None) -> str:
    return f"{number:.10g}" if isinstance(number, float) else str(number)


def counted(number: float | None, noun: str, show: Callable[[Any], str] = _plain) -> str:
    """Return the count with its noun: "1 stall", "3 stalls". `show` formats the number; if it shows "1", it is one."""
    shown = show(number)
    plural = f"{noun[:-1]}ies" if re.search(r"[^aeiou]y$", noun) else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{shown} {noun if shown == '1' else plural}"


def listed(words: Sequence[str]) -> str:
    """Join the words as a list: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def digits(value: float, most: int = 3) -> str:
    """Format the number to `most` digits, without a power of ten if large: "0.0123", "119", "4,203"."""
    return f"{value:.{most}g}" if abs(value) < 10**most - 0.5 else f"{value:,.0f}"


def percent(share: float, most: int = 3) -> str:
    """Format the share in percent: "0.123 %"."""
    return f"{digits(100.0 * share, most)} %"


def enough(limit: float, values: Iterable[float | None], show: Digits = digits, least: int = 3) -> int:
    """Return the digits, `least` or more, with which no value reads as a limit that it differs from: 1.0997 at 1.1."""
    others = [one for one in values if one is not None and not math.isclose(one, limit, rel_tol=1e-7)]
    return next((n for n in range(least, 10) if show(limit, n) not in [show(one, n) for one in others]), least)


def bytes_text(size: float) -> str:
    """Format the size in a readable unit: "604 MiB", "15.2 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{digits(size)} TiB"


def sentence(faults: Sequence[str]) -> str:
    """Join the faults into one sentence without its full stop. A device's name at its start (cuda:0) stays as it is."""
    text = "; ".join(faults)
    return text if ":" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def duration_text(seconds: float) -> str:
    """Format the length in a readable unit: "90 seconds", "20 minutes", "3.5 hours"."""
    if seconds < 180:
        return counted(round(seconds), "second")
    if seconds < 2 * 3600:
        return f"{math.ceil(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
