"""TOML as settings are written: not deep, so that a damaged or hostile file takes no time to refuse."""

from __future__ import annotations

import re
import tomllib
from typing import Any

LARGEST_BYTES = 1 << 20
DEEPEST = 32

_BETWEEN_KEYS = re.compile(r"[\s=\[\]{},]+")


class TomlError(ValueError):
    """A text is no TOML, or goes deeper than any setting lies. One line."""


def parse(text: str) -> dict[str, Any]:
    """The table that `text` holds. Raises TomlError.

    The parser of the standard library takes time in the square of a key's depth, so that is looked at first.
    """
    parts = max((_depth(key) for key in _BETWEEN_KEYS.split(text.replace(" ", "").replace("\t", ""))), default=0)
    if parts > DEEPEST:
        raise TomlError(f"a key has {parts} parts; the limit is {DEEPEST}: no setting lies so deep")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TomlError(f"not valid TOML: {_short(str(error))}") from None
    except RecursionError:
        raise TomlError(f"values are nested too deep; the limit is {DEEPEST}: no setting lies so deep") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise TomlError(f"a value cannot be read: {error}") from None


def _short(text: str) -> str:
    """A key of any length that the parser names is cut; where it stands is said at the end."""
    return text if len(text) <= 500 else f"{text[:400]} ... {text[-90:]}"


def _depth(key: str) -> int:
    return sum(1 for part in key.split(".") if part)
