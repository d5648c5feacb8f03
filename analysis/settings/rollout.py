"""What a rollout must carry: the [rollout] table of an experiment, which decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from analysis.settings.fields import Range, check_fields, numbers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """`load_rps` is the load over all replicas, None for any; `gpus_per_replica` what one server process takes.

    A value out of range or of another type raises RecordError, one line that names rollout.KEY.
    """

    load_rps: Annotated[float | None, Range(1e-6, 1e9)] = None
    gpus_per_replica: Annotated[int, Range(1, 4096)] = 1

    def __post_init__(self) -> None:
        check_fields(self, "rollout")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Rollout:
        """The rollout that `table` describes, defaults elsewhere; other keys are ignored."""
        return cls(**numbers_of(cls, table, "rollout"))
