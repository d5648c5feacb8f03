"""How a count reads with its noun."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def _plain(number: float | None) -> str:
    return f"{number:.10g}" if isinstance(number, float) else str(number)


def counted(number: float | None, noun: str, show: Callable[[Any], str] = _plain) -> str:
    """The count with its noun: "1 stall", "3 stalls". `show` writes the number, and what it shows as 1 is one."""
    shown = show(number)
    return f"{shown} {noun if shown == '1' else _plural(noun)}"


def _plural(noun: str) -> str:
    """The noun of several, by the rules that the nouns of reports follow: runs, days, entries, processes."""
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}{'es' if noun.endswith('s') else 's'}"
