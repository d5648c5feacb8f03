"""Settings as pydantic models: each field declares its range, and one line says what is wrong with a value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tailgate.servers.complaint import ConfigError, did_you_mean

_USABLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Of a list as TOML and JSON have it; its items stay strict.
Listed = Field(strict=False)


class Settings(BaseModel):
    """A table of settings. `read` makes one of what a user wrote; a direct construction raises ValidationError.

    The docstrings of a table and of its keys are what the reference and the JSON Schema say to users. A validator's
    message begins with the key that it is about, seen from the table: "port is 80 but ...". That of a field alone
    begins behind the key: 'is "a b": ...'. `elsewhere` holds the remedy for keys that another table has.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, table: Any) -> Any:
        for key in table if isinstance(table, Mapping) else ():
            if key in cls.elsewhere:
                raise ValueError(f"{key} {cls.elsewhere[key]}")
            if key not in cls.model_fields:
                raise PydanticCustomError("unknown_key", "unknown", {"own": key, "instead": _instead(str(key), cls)})
        return table

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with `changes`. Raises ConfigError."""
        return read(type(self), {**dict(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return plain tables that `read` makes an equal instance of."""
        return self.model_dump(mode="json")


# Begins the end of a docstring that states another default than the model has.
DEFAULT = "Default: "
S = TypeVar("S", bound=BaseModel)


def _instead(key: str, model: type[BaseModel]) -> str:
    """Return which key of the model, or of a table in it, was probably meant."""
    return did_you_mean(key, key_paths(model)).rstrip() or f"use one of {', '.join(model.model_fields)}"


def key_paths(model: type[BaseModel]) -> dict[str, str]:
    """Return the path of each key of the model and of its tables by the last part; of several the first, the model's
    own before all. An entry of a list is NAME: {"slots": "engine.slots", "weight": "arms.NAME.weight"}."""
    found = {name: name for name in model.model_fields}
    for name, field in model.model_fields.items():
        kinds = _models(field.annotation)
        listed = ".NAME" if get_origin(field.annotation) in (tuple, list) else ""
        for kind in kinds:
            for key, path in key_paths(kind).items():
                found.setdefault(key, f"{name}{listed}.{path}")
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def read(kind: type[S], table: Mapping[str, Any], *, where: str = "") -> S:
    """Return the settings in `table`, which is called `where`. Raises ConfigError with key, value, limit and remedy."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(complaint(error, kind, table, where)) from None


def matching(pattern: str, remedy: str) -> AfterValidator:
    """Return what holds a text to the whole `pattern`."""
    whole = re.compile(pattern)

    def check(text: str) -> str:
        if not whole.fullmatch(text):
            raise ValueError(f"is {as_toml(text)}: {remedy}")
        return text

    return AfterValidator(check)


_REMEDIES = {
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give less than {lt}",
    "less_than_equal": "give {le} or less",
    "too_short": "give {min_length} or more",
    "too_long": "give {max_length} or fewer",
    "literal_error": "use {expected}",
    "finite_number": "give a finite number",
    "bool_type": "give true or false",
    "string_type": "give a text in quotes",
    "invalid-json-value": "give text, numbers, true, lists or tables",
    **dict.fromkeys(("int_type", "int_from_float"), "give a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "give a number, without a unit"),
    **dict.fromkeys(("tuple_type", "list_type"), "give a list in [ ], or tables under [[ ]]"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "give a table"),
}


def complaint(error: ValidationError, model: type[BaseModel], table: Mapping[str, Any], where: str) -> str:
    """Return what is wrong first, in one line. A list's entry is called by its name, as in arms.NAME.weight."""
    found = error.errors(include_url=False)
    key, value = _place(found[0]["loc"], table, where, is_missing=found[0]["type"] == "missing")
    kind, context = found[0]["type"], found[0].get("ctx", {})
    if kind == "unknown_key":
        elsewhere = key_paths(model).get(context["own"])  # a key of another table
        instead = f"did you mean {elsewhere}?" if elsewhere else context["instead"]
        return f"{key}.{context['own']} is unknown: {instead}".removeprefix(".")
    if kind == "value_error":
        between = ("." if isinstance(value, Mapping | BaseModel) else " ") if key else ""
        return f"{key}{between}{context['error']}"
    if kind == "extra_forbidden":  # of a model that is no Settings
        for step in found[0]["loc"][:-1]:
            model = model.model_fields[str(step)].annotation  # type: ignore[assignment]
        return f"{key} is unknown: {_instead(str(found[0]['loc'][-1]), model)}"
    if kind == "missing":
        return f"{key} is missing: add it to the file, or --set {key}=VALUE"
    if kind == "union_tag_invalid":
        return f"{key}.kind is {as_toml(context['tag'])}: use {context['expected_tags']}".replace("'", '"')
    alike = (each for each in found if _place(each["loc"], table, where, is_missing=False)[0] == key)
    return f"{key} is {as_toml(value)}: {' or '.join(dict.fromkeys(map(_remedy, alike)))}"


_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def _remedy(found: Any) -> str:
    """Return what to write instead: one of several where a setting takes several types."""
    length = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|m|min|h)", str(found["input"]))
    if length and found["type"] == "float_type" and str(found["loc"][-1]).endswith("_s"):
        return f"give {float(length[1]) * _SECONDS[length[2]]:g}, in seconds"
    remedy = _REMEDIES.get(found["type"])
    if remedy is None:
        return str(found["msg"][:1].lower() + found["msg"][1:])
    limits = {key: f"{value:g}" if isinstance(value, float) else value for key, value in found.get("ctx", {}).items()}
    meant = did_you_mean(str(found["input"]), re.findall("'([^']*)'", str(limits.get("expected", ""))))
    return meant + remedy.format(**limits).replace("'", '"')


def _place(loc: Sequence[str | int], table: Any, where: str, *, is_missing: bool) -> tuple[str, Any]:
    """Return the key at `loc`, as a user writes it, and its value. The kind of a list's entry in `loc` is no key."""
    key, value = where, table
    for position, step in enumerate(loc):
        if position and isinstance(loc[position - 1], int) and isinstance(step, str):
            continue
        if isinstance(value, Mapping) and (step in value or (is_missing and position == len(loc) - 1)):
            key, value = f"{key}.{step}".removeprefix("."), value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
            name = value.get("name", value.get("preset")) if isinstance(value, Mapping) else None
            is_usable = isinstance(name, str) and _USABLE_NAME.fullmatch(name)
            key = f"{key}.{name}" if is_usable else f"{key}[{step}]"
    return key, value


def as_toml(value: Any) -> str:
    """Return the value as a user writes it."""
    return json.dumps(value, ensure_ascii=False, default=repr)
