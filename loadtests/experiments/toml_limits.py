"""Settings as TOML text: read, and held to what any setting can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.records import documents
from tailgate.servers.complaint import ConfigError


def read_toml(path: Path) -> str:
    """Return the text of the file. Raises ConfigError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table that `text` holds. Raises ConfigError, which begins with `where`, for what no setting can be."""
    if "\\u0000" in text or "\\U00000000" in text:
        raise ConfigError(f"{where} holds a NUL character: remove it")
    try:
        return documents.parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}: correct it there") from None


def table_of(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the table [key], empty where there is none. Another value there raises ConfigError."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}: give a table [{key}]")
    return value
