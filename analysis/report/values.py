"""How one value of a summary reads. Anything missing, null or not finite reads as an en dash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from markupsafe import Markup

from analysis.records.plain_values import CONTROL
from analysis.records.schemas import EVENT_KINDS
from analysis.settings.metrics import METRIC_NAMES, gate_label, quantile_label
from analysis.wording import bytes_text, digits

Row = Mapping[str, Any]

DASH = "–"
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")


def at(source: object, *keys: str) -> Any:
    """The value below `keys`, or None where any step is missing or not a table."""
    for key in keys:
        if not isinstance(source, Mapping):
            return None
        source = source.get(key)
    return source


def rows(source: object, *keys: str) -> list[Row]:
    """The tables in the list below `keys`; an empty list where there is none."""
    items = at(source, *keys)
    return [row for row in items if isinstance(row, Mapping)] if isinstance(items, list | tuple) else []


def with_code(value: object) -> Markup:
    """Text as HTML, in which what stands between backticks is code."""
    parts = text(value).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite int or float; a bool is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def text(value: object) -> str:
    """`value` as text without control characters; an en dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return count(value) if isinstance(value, int) else figure(value)
    if isinstance(value, list | tuple):
        return ", ".join(text(item) for item in value) or DASH
    if not isinstance(value, str):
        return DASH
    return CONTROL.sub("", value).strip() or DASH


def figure(value: object) -> str:
    """Three significant digits, thousands apart by commas: 8412.3 is "8,412", 0.4567 is "0.457"."""
    return digits(value) if is_number(value) else DASH


def count(value: object) -> str:
    return f"{value:,.0f}" if is_number(value) else DASH


def milliseconds(value: object) -> str:
    """Milliseconds below one second, else seconds: 84.25 is "84.3 ms", 8412 is "8.41 s"."""
    if not is_number(value):
        return DASH
    return seconds(value / 1e3) if abs(value) >= 999.5 else f"{figure(value)} ms"


def column_ms(value: object) -> str:
    """A number for a column that is in ms already: as many decimals as its size deserves, zeros kept."""
    if not is_number(value):
        return DASH
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def seconds(value: object) -> str:
    return f"{figure(value)} s" if is_number(value) else DASH


def span(value: object) -> str:
    """A duration in s in the two largest units that matter: 90 is "90 s", 1260 is "21 min", 5400 is "1 h 30 min"."""
    if not is_number(value):
        return DASH
    if value <= 120:
        return seconds(value)
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def percent(value: object) -> str:
    return f"{figure(value)} %" if is_number(value) else DASH


def ratio(value: object) -> str:
    return f"×{figure(value) if abs(value) >= 10 else format(value, '.2f')}" if is_number(value) else DASH


def fine_ratio(value: object) -> str:
    """A ratio that differs from 1 by little: 1.0034 is "×1.003"."""
    return f"×{value:.3f}" if is_number(value) and abs(value) < 10 else ratio(value)


def interval(low: object, high: object, show: Callable[[object], str] | None = None) -> str:
    """ "[0.61, 1.44]" of ratios, or of what `show` shows, with an en dash for an open end."""
    if not is_number(low) and not is_number(high):
        return DASH
    shown = [(show or ratio)(value).lstrip("×") for value in (low, high)]
    return f"[{', '.join(shown)}]"


def byte_size(value: object) -> str:
    return bytes_text(value) if is_number(value) else DASH


def rate(value: object) -> str:
    return f"{figure(value)} /s" if is_number(value) else DASH


UNITS: dict[str, Callable[[object], str]] = {
    # One digit more than elsewhere: a value of 1.096 against a limit of 1.1 must not look like a tie.
    "ratio": fine_ratio,
    "ms": milliseconds,
    "s": seconds,
    "pct": percent,
    "count": count,
    "rps": rate,
    "bytes": byte_size,
}


def quantity(value: object, unit: object) -> str:
    """`value` with its unit; a plain number for a unit that is not known."""
    return UNITS.get(unit if isinstance(unit, str) else "", text)(value)


def label(name: object) -> str:
    """A gate's or a metric's name for readers: "slo p99_ttft" is "SLO p99 TTFT"."""
    return gate_label(text(name))


def metric_label(metric: object, quantile: object = None) -> str:
    """ "p99 TTFT" for ("ttft", 0.99); the metric alone without a quantile."""
    known = text(metric)
    return quantile_label(known, quantile) if is_number(quantile) else METRIC_NAMES.get(known, known)


def kind_label(kind: object) -> str:
    return EVENT_KINDS.get(kind, text(kind)) if isinstance(kind, str) else text(kind)


def verdict(value: object) -> str:
    """PASS, FAIL or INCONCLUSIVE; an en dash for anything else."""
    return value if isinstance(value, str) and value in VERDICTS else DASH


def moment(value: object) -> str:
    """An ISO time as "2025-11-21 08:00:00 UTC"; any other text as it is."""
    shown = text(value)
    time = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(Z|\+00:00)?", shown)
    return f"{time[1]} {time[2]}{' UTC' if time[3] else ''}" if time else shown


def first_line(value: object, limit: int = 120) -> str:
    """The first line of a text, cut after a word to `limit` characters with an ellipsis."""
    line = text(value).splitlines()[0].strip()
    if len(line) <= limit:
        return line
    words = line[:limit].rpartition(" ")[0]
    # One very long word is cut: the little before it says nothing.
    return (words if len(words) >= limit // 2 else line[: limit - 1]).rstrip(" ,;:") + "…"


def clean(value: Any) -> Any:
    """`value` with every float that JSON cannot hold turned into null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [clean(item) for item in value]
    return value
