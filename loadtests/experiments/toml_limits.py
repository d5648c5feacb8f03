"""Limits of any file of settings, whatever its keys mean: its size, its depth, its plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailgate.analysis.records import documents
from tailgate.analysis.records.documents import DEEPEST
from tailgate.servers.complaint import ConfigError

LARGEST_BYTES = 1 << 20
_WHOLE = 1 << 63
# What file systems take.
_LONGEST_NAME_BYTES = 255
_LONGEST_PATH_BYTES = 4095


def read_toml(path: Path) -> str:
    """Return the text of the file. Raises ConfigError for one that cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            body = file.read(LARGEST_BYTES + 1)
        if len(body) > LARGEST_BYTES:
            raise ConfigError(
                f"{path} has more than {LARGEST_BYTES} bytes: an experiment takes a few thousand, so give its own file"
            )
        return body.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table that `text` holds. Raises ConfigError for what is no TOML, or deeper than `DEEPEST`."""
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


def check_values(value: Any, where: str = "", depth: int = 0) -> None:
    """Raise ConfigError, naming `where` it stands, for a value in `value` that no setting can have."""
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError(f"{where} holds a NUL character: remove it")
    elif isinstance(value, int):
        if not -_WHOLE <= value < _WHOLE:
            raise ConfigError(f"{where} is a number beyond 64 bits: give a smaller one")
    elif isinstance(value, Mapping | list):
        if depth >= DEEPEST:
            raise ConfigError(f"{where}: values are nested too deep; the limit is {DEEPEST}: no setting lies so deep")
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in entries:
            inside = f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}".removeprefix(".")
            check_values(item, inside, depth + 1)


def check_path(text: str, where: str) -> str:
    """Return `text` if it is a valid path. Raises ConfigError."""
    if "\0" in text:
        raise ConfigError(f"{where} holds a NUL character: no path has one")
    body = text.encode("utf-8", "surrogateescape")
    longest = max(map(len, body.split(b"/")))
    if longest > _LONGEST_NAME_BYTES:
        raise ConfigError(
            f"{where} has a name of {longest} bytes; the limit is {_LONGEST_NAME_BYTES} for each: give a shorter one"
        )
    if len(body) > _LONGEST_PATH_BYTES:
        raise ConfigError(f"{where} has {len(body)} bytes; the limit is {_LONGEST_PATH_BYTES}: give a shorter path")
    return text


def expanded(text: str, where: str) -> Path:
    """Return the path, with ~ and ~user in full. Raises ConfigError."""
    try:
        return Path(check_path(text, where)).expanduser()
    except RuntimeError as error:
        raise ConfigError(f'{where} is "{text}", whose home cannot be found ({error}): write it in full') from None
