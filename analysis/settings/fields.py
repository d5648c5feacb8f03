"""Settings as frozen dataclasses: each number is held to the range that its field declares.

A field says its range where it is declared: `alpha: Annotated[float, Range(0.0001, 0.5)] = 0.05`. `check_fields(self,
"gates")` in `__post_init__` holds all of them to that, and each `Literal` to its choices.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from analysis.records.tables import RecordError


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold, both ends included."""

    low: float
    high: float

    def check(self, key: str, value: float) -> None:
        """The value is in the range. Raises RecordError."""
        if not self.low <= value <= self.high:
            raise RecordError(f"{key} is {value:g}: give a value from {self.low:g} to {self.high:g}")


def check_fields(settings: Any, table: str) -> None:
    """Each field of the dataclass is in its Range or among its Literal's choices; None passes. Raises RecordError,
    which names `table`.field."""
    kind: Any = type(settings)
    for name, hint in _hints(kind).items():
        key, value = f"{table}.{name}", getattr(settings, name)
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise RecordError(f"{key} is {value!r}: use {' or '.join(choices)}")
        if (allowed := _range_of(hint)) is not None and value is not None:
            allowed.check(key, value)


def numbers_of(kind: type, values: Mapping[str, Any], table: str) -> dict[str, Any]:
    """Those of `values` that the dataclass `kind` declares with a Range, as the numbers it declares.

    A whole number may be written 20.0. What is no number raises RecordError, which names `table`.field.
    """
    numbers: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if name in values and _range_of(hint) is not None:
            number = finite(f"{table}.{name}", values[name])
            if typing.get_args(hint)[0] is int:
                if number != int(number):
                    raise RecordError(f"{table}.{name} is {number:g}: give a whole number")
                number = int(number)
            numbers[name] = number
    return numbers


def finite(key: str, value: Any) -> float:
    """The value as a finite number. Raises RecordError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RecordError(f"{key} is {value!r}: give a number")
    return float(value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _range_of(hint: Any) -> Range | None:
    metadata = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    return next((item for item in metadata if isinstance(item, Range)), None)
