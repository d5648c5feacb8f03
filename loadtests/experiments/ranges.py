"""The range of a setting, as metadata of its field."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from servers.config import ConfigError


def bounded(default: float, low: float, high: float) -> Any:
    """A field for numbers from `low` to `high`."""
    return field(default=default, metadata={"range": (low, high)})


def check_ranges(settings: Any, where: str = "") -> None:
    """Every bounded field of the dataclass is in its range. Otherwise ConfigError, which names where.FIELD."""
    for item in fields(settings):
        low, high = item.metadata.get("range", (None, None))
        value = getattr(settings, item.name)
        if low is not None and not low <= value <= high:
            key = f"{where}.{item.name}" if where else item.name
            raise ConfigError(f"{key} is {value:g}: give a value from {low:g} to {high:g}")
