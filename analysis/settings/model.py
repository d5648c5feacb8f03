"""Settings that judge a run, as pydantic models, and their reading from a recorded experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.records.tables import RecordError

# Of a list as TOML has it; its items stay strict.
Listed = Field(strict=False)


class Settings(BaseModel):
    """The table `table` of an experiment. A validator's message begins with the key that it is about."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    table: ClassVar[str]

    @classmethod
    def recorded(cls, table: Mapping[str, Any]) -> Self:
        """Return the settings of a recorded experiment, without keys that only the version that wrote it knew.

        Raises RecordError with key, value and limit.
        """
        try:
            return cls.model_validate({key: value for key, value in table.items() if key in cls.model_fields})
        except ValidationError as error:
            found = error.errors()[0]
        if found["type"] == "value_error":
            raise RecordError(f"{cls.table}.{found['ctx']['error']}")
        key = ".".join((cls.table, *(name for name in found["loc"] if isinstance(name, str))))
        raise RecordError(f"{key} is {found['input']!r}: {found['msg'][:1].lower()}{found['msg'][1:]}")
