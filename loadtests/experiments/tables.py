"""The tables inside a parsed TOML table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servers.fields import ConfigError


def of(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The table [key], empty where there is none. Another value there raises ConfigError."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}: give a table [{key}]")
    return value


def take(table: dict[str, Any], key: str) -> dict[str, Any]:
    """As `of`, and `table` has no [key] any more."""
    value = of(table, key)
    table.pop(key, None)
    return value


def numbers(table: dict[str, Any], key: str) -> dict[str, float]:
    """As `take`, for a table of numbers."""
    values = take(table, key)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{key}.{name} is {value!r}: give a number")
    return {name: float(value) for name, value in values.items()}
