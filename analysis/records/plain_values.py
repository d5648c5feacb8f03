"""Values that another program wrote, as the type that is expected or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tailgate.analysis.records.tables import RecordError

# C0 and C1 controls, illegal in XML 1.0 and able to drive a terminal, and marks that turn the direction of text, which
# can make one name look like another. Tab and newline stay.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff\ud800-\udfff]"
)
_LONGEST_S = 1e9  # thirty years
_LARGEST = 1e300


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _LARGEST and math.isfinite(value) else None  # an int may exceed every float


def text_of(row: Mapping[str, Any], key: str, otherwise: str = "") -> str:
    """Return the value under `key` if it is a text with something in it, else `otherwise`."""
    value = row.get(key)
    return value if isinstance(value, str) and value else otherwise


def seconds(value: Any) -> float | None:
    """Return the value if it is a time above 0 that a run could last, else None."""
    known = number(value)
    return known if known is not None and 0 < known < _LONGEST_S else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a table, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def table(experiment: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table `key` of an experiment, empty if there is none. Raises RecordError for what is no table."""
    value = experiment.get(key, {})
    if not isinstance(value, Mapping):
        raise RecordError(f"experiment.toml: {key} is {value!r}: give a table")
    return value


def rows_of(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables in a list; none if the value is no list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def first_of(infos: Iterable[Mapping[str, Any]], key: str) -> Any:
    """Return the first value under `key` that is not None."""
    return next((info[key] for info in infos if info.get(key) is not None), None)
