"""Settings as frozen dataclasses: read from plain tables, and checked field by field.

A field says its range where it is declared: `slots: Annotated[int, Range(1, 4096)] = 8`. `check_fields(self, "engine")`
in `__post_init__` holds all of them to that, and each `Literal` to its choices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from servers.complaint import shortened

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is unknown, out of range or impossible. The message is one line: key, value, limit, remedy. A value of
    many characters is not repeated whole."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(" ".join(message.splitlines())))


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may hold, both ends included."""

    low: float
    high: float


def check_range(key: str, value: float, allowed: Range) -> None:
    """The value is in the range. Raises ConfigError."""
    if not allowed.low <= value <= allowed.high:
        raise ConfigError(f"{key} is {value}: give a value from {allowed.low} to {allowed.high}")


def check_choice(key: str, value: object, allowed: tuple[object, ...]) -> None:
    """The value is one of `allowed`. Raises ConfigError."""
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}: use one of {', '.join(str(item) for item in allowed)}")


def check_fields(settings: Any, table: str = "") -> None:
    """Each field of the dataclass is in its Range and among its Literal's choices; None passes. Raises ConfigError,
    which names `table`.field, or the field alone where there is no table."""
    kind: Any = type(settings)
    for name, allowed in _limits(kind):
        value, key = getattr(settings, name), f"{table}.{name}" if table else name
        if isinstance(allowed, tuple):
            check_choice(key, value, allowed)
        elif value is not None:
            check_range(key, value, allowed)


@functools.cache
def _limits(kind: type) -> list[tuple[str, Range | tuple[object, ...]]]:
    limits: list[tuple[str, Range | tuple[object, ...]]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is Literal:
            limits.append((name, typing.get_args(hint)))
        elif typing.get_origin(hint) is Annotated:
            limits += [(name, item) for item in hint.__metadata__ if isinstance(item, Range)]
    return limits


def override(base: T, table: Mapping[str, Any], *, where: str) -> T:
    """`base` with the keys of `table` replaced; unknown keys and bad values raise ConfigError naming `where`.key.

    A setting that is itself a table of names (compile.options) keeps the names that `table` does not mention.
    """
    if not table:
        return base
    converted = _converted(type(base), table, where)
    for key, value in converted.items():
        if isinstance(value, Mapping):
            converted[key] = {**getattr(base, key), **value}
    return replace(base, **converted)  # type: ignore[type-var]


def build(kind: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """An instance of the dataclass `kind` from `table`; unknown keys and bad values raise ConfigError."""
    return kind(**_converted(kind, table, where))


def _converted(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    known = [item.name for item in fields(kind)]
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}.{key} is unknown: {where} takes {', '.join(known)}")
    return {key: _value(hints[key], value, f"{where}.{key}") for key, value in table.items()}


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}: give a table")
        return build(hint, value, where=where)
    origin = typing.get_origin(hint)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}: give a table")
        inner = typing.get_args(hint)[1]
        if inner is Any:
            return dict(value)
        items = value.items() if dataclasses.is_dataclass(inner) else _by_dotted_name(value)
        return {str(key): _value(inner, item, f"{where}.{key}") for key, item in items}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} is {value!r}: give a list")
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, item, where) for item in value)
    if origin is Literal:
        check_choice(where, value, typing.get_args(hint))
        return value
    if origin in (types.UnionType, typing.Union):
        for option in typing.get_args(hint):
            try:
                return _value(option, value, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} is {value!r}: expected {hint}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} is a number of {value.bit_length()} bits: give one below 1e308") from None
    if isinstance(hint, type) and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise ConfigError(f"{where} is {value!r}: expected {hint.__name__}")
    return value


def _by_dotted_name(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of `table` by their whole names. TOML reads a name with dots, such as triton.enable_pdl, as tables
    where nobody quoted it."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _by_dotted_name(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def span_s(text: str) -> float | None:
    """The seconds in a length of time above 0 such as "90s", "60m" or "1.5h"; a bare number is seconds. None for any
    other text."""
    match = _SPAN.fullmatch(text.strip())
    unit = _UNITS_S.get(match[2]) if match else None
    value = float(match[1]) * unit if match is not None and unit is not None else 0.0
    return value if 0.0 < value < math.inf else None
