"""Settings as pydantic models: each field declares its range, and one line says what is wrong with a value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.records.tables import RecordError

# Of a list as TOML has it; its items stay strict.
Listed = Field(strict=False)


class Settings(BaseModel):
    """The table `table` of an experiment. `read` raises RecordError; a direct construction ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    table: ClassVar[str]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        """The settings in `table`, defaults elsewhere. RecordError in one line: key, value, limit and remedy."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise RecordError(_line(cls, error.errors()[0])) from None

    @classmethod
    def recorded(cls, table: Mapping[str, Any]) -> Self:
        """The settings of a recorded experiment, without keys that only the version that wrote it knew."""
        return cls.read({key: value for key, value in table.items() if key in cls.model_fields})


def unknown_key(key: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    """What is wrong with a key that is not among `known`, with the closest that is."""
    table, _, name = key.rpartition(".")
    (closest,) = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"{key} is unknown: the closest is {f'{table}.{closest}' if table else closest}"


_REMEDIES = {
    "float_type": "give a number",
    "finite_number": "give a number",
    "int_type": "give a whole number",
    "bool_type": "give true or false",
    "string_type": "give a text",
    "tuple_type": "give a list",
    "dict_type": "give a table",
    "mapping_type": "give a table",
    "model_type": "give a table",
}


def _line(model: type[Settings], error: Any) -> str:
    names: list[str] = []
    owner = inner = model
    for name in (str(item) for item in error["loc"] if isinstance(item, str)):
        if name not in inner.model_fields:
            break
        names.append(name)
        owner = inner
        inner = _inner(owner.model_fields[name].annotation) or owner
    key = ".".join((model.table, *(str(item) for item in error["loc"] if isinstance(item, str))))
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return unknown_key(key, tuple(inner.model_fields))
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "literal_error":
        choices = str(error["ctx"]["expected"]).replace("'", "")
        return f"{key} is {value!r}: use {choices}"
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    if kind in _REMEDIES:
        return f"{key} is {value!r}: {_REMEDIES[kind]}"
    low, high = _range(owner.model_json_schema()["properties"][names[-1]]) or (-math.inf, math.inf)
    return f"{key} is {shown}: give a value from {low:g} to {high:g}"


def _inner(annotation: Any) -> type[Settings] | None:
    """The settings that a field holds; None where it holds a value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Settings):
            return kind
    return None


def _range(schema: Any) -> tuple[float, float] | None:
    """The first range in the JSON schema of a field."""
    if isinstance(schema, dict) and {"minimum", "maximum"} <= schema.keys():
        return schema["minimum"], schema["maximum"]
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return next(filter(None, map(_range, parts)), None)
