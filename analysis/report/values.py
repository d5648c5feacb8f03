"""How one value of a summary reads. Anything missing, null or not finite reads as an en dash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps

from tailgate.analysis.records.plain_values import number
from tailgate.analysis.wording import bytes_text, digits, fixed

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


def _of_numbers(show: Callable[..., str]) -> Callable[..., str]:
    """Restrict `show` to numbers; anything else is an en dash."""

    @wraps(show)
    def shown(value: object, *most: int) -> str:
        known = number(value)
        return DASH if known is None else show(known, *most)

    return shown


# With three significant digits, and commas between thousands: 8412.3 is "8,412", 0.4567 is "0.457".
figure, seconds, percent, rate = (
    _of_numbers(lambda value, most=3, unit=unit: f"{digits(value, most)}{unit}") for unit in ("", " s", " %", " /s")
)
count, byte_size = map(_of_numbers, ("{:,.0f}".format, bytes_text))


@_of_numbers
def milliseconds(value: float, most: int = 3) -> str:
    """Show milliseconds below one second, else seconds: 84.25 is "84.3 ms", 8412 is "8.41 s"."""
    return seconds(value / 1e3, most) if abs(value) >= 999.5 else f"{digits(value, most)} ms"


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
def ratio(value: float, most: int = 3) -> str:
    return f"×{fixed(value, most)}" if abs(value) < 10 else f"×{digits(value, most)}"


UNITS = {"ratio": ratio, "ms": milliseconds, "s": seconds, "pct": percent}


def quantity(value: object, unit: str, most: int = 3) -> str:
    """Show `value` with its unit; a plain number for a count."""
    return UNITS.get(unit, figure)(value, most)


def interval(low: object, high: object, unit: str = "ratio", most: int = 3) -> str:
    """Show "[0.610, 1.440]" for ratios, or for quantities of `unit`; an open end is an en dash."""
    if low is None and high is None:
        return DASH
    shown = [quantity(value, unit, most).lstrip("×") for value in (low, high)]
    return f"[{', '.join(shown)}]"
