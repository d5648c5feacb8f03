"""Settings as pydantic models: each field declares its range, and one line says what is wrong with a value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

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
        """Return the settings in `table`, defaults elsewhere. Raises RecordError with key, value and limit."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            found = error.errors()[0]
        key = ".".join((cls.table, *(name for name in found["loc"] if isinstance(name, str))))
        if found["type"] == "extra_forbidden":
            (closest,) = difflib.get_close_matches(str(found["loc"][-1]), cls.model_fields, n=1, cutoff=0.0)
            raise RecordError(f"{key} is unknown: the closest is {cls.table}.{closest}")
        if found["type"] == "value_error":
            raise RecordError(str(found["ctx"]["error"]))
        raise RecordError(f"{key} is {found['input']!r}: {found['msg'][:1].lower()}{found['msg'][1:]}")

    @classmethod
    def recorded(cls, table: Mapping[str, Any]) -> Self:
        """Return the settings of a recorded experiment, without keys that only the version that wrote it knew."""
        return cls.read({key: value for key, value in table.items() if key in cls.model_fields})
