"""How one value of a summary reads. Anything missing, null or not finite reads as an en dash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps

from tailgate.analysis.records.plain_values import number
from tailgate.analysis.wording import bytes_text, digits

DASH = "–"


def text(value: object) -> str:
    """Show `value` as text; an en dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return count(value) if isinstance(value, int) else figure(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(item)}" for key, item in value.items()) or DASH
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value)) or DASH
    return (value.strip() if isinstance(value, str) else "") or DASH


def _of_numbers(show: Callable[[float], str]) -> Callable[[object], str]:
    """Restrict `show` to numbers; anything else is an en dash."""

    @wraps(show)
    def shown(value: object) -> str:
        known = number(value)
        return DASH if known is None else show(known)

    return shown


@_of_numbers
def figure(value: float) -> str:
    """Show three significant digits, with commas between thousands: 8412.3 is "8,412", 0.4567 is "0.457"."""
    return digits(value)


@_of_numbers
def count(value: float) -> str:
    return f"{value:,.0f}"


@_of_numbers
def seconds(value: float) -> str:
    return f"{digits(value)} s"


@_of_numbers
def milliseconds(value: float) -> str:
    """Show milliseconds below one second, else seconds: 84.25 is "84.3 ms", 8412 is "8.41 s"."""
    return seconds(value / 1e3) if abs(value) >= 999.5 else f"{digits(value)} ms"


@_of_numbers
def span(value: float) -> str:
    """Show seconds in their two largest units: 90 is "90 s", 1260 is "21 min", 5400 is "1 h 30 min"."""
    if value <= 120:
        return milliseconds(value * 1e3) if value else "0 s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


@_of_numbers
def percent(value: float) -> str:
    return f"{digits(value)} %"


@_of_numbers
def ratio(value: float) -> str:
    """Show one digit more than elsewhere: a ratio of 1.096 against a limit of 1.1 must not read as a tie."""
    return f"×{value:.3f}" if abs(value) < 10 else f"×{digits(value)}"


@_of_numbers
def byte_size(value: float) -> str:
    return bytes_text(value)


@_of_numbers
def rate(value: float) -> str:
    return f"{digits(value)} /s"


UNITS: dict[str, Callable[[object], str]] = {
    "ratio": ratio,
    "ms": milliseconds,
    "s": seconds,
    "pct": percent,
    "count": count,
}


def quantity(value: object, unit: str) -> str:
    """Show `value` with its unit; a plain number for an unknown unit."""
    return UNITS.get(unit, text)(value)


def interval(low: object, high: object, unit: str = "ratio") -> str:
    """Show "[0.610, 1.440]" for ratios, or for quantities of `unit`; an open end is an en dash."""
    if low is None and high is None:
        return DASH
    shown = [quantity(value, unit).lstrip("×") for value in (low, high)]
    return f"[{', '.join(shown)}]"
