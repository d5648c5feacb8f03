"""The ranges of settings, said where their fields are declared: `count: Annotated[int, Range(1, 1000)] = 1`."""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from servers.config import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold, both ends included."""

    low: float
    high: float


def check_fields(settings: Any, table: str = "") -> None:
    """Every field of the dataclass is in its Range. Raises ConfigError, which names `table`.field."""
    kind: Any = type(settings)
    for name, allowed in _ranges(kind):
        value, key = getattr(settings, name), f"{table}.{name}" if table else name
        if not allowed.low <= value <= allowed.high:
            raise ConfigError(f"{key} is {value:g}: give a value from {allowed.low:g} to {allowed.high:g}")


@functools.cache
def _ranges(kind: type) -> list[tuple[str, Range]]:
    hints = typing.get_type_hints(kind, include_extras=True).items()
    annotated = [(name, hint) for name, hint in hints if typing.get_origin(hint) is Annotated]
    return [(name, item) for name, hint in annotated for item in hint.__metadata__ if isinstance(item, Range)]
