"""What a rollout must carry: the [rollout] table of an experiment, which decides nothing and says what an arm saves.

It stands apart from the weighing, so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.records.tables import RecordError

_RANGES = {"load_rps": (1e-6, 1e9), "gpus_per_replica": (1, 4096)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """`load_rps` is the load over all replicas, None for any; `gpus_per_replica` what one server process takes.

    A value out of range raises RecordError, one line that names rollout.KEY.
    """

    load_rps: float | None = None
    gpus_per_replica: int = 1

    def __post_init__(self) -> None:
        for key, (low, high) in _RANGES.items():
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                raise RecordError(f"rollout.{key} is {value:g}: give a value from {low:g} to {high:g}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Rollout:
        """The rollout that `table` describes, defaults elsewhere; other keys are ignored.

        Values of another type raise RecordError.
        """
        known: dict[str, Any] = {}
        for key in table.keys() & _RANGES.keys():
            value = table[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RecordError(f"rollout.{key} is {value!r}: give a number")
            if key == "gpus_per_replica" and value != int(value):
                raise RecordError(f"rollout.{key} is {value!r}: give a whole number")
            known[key] = float(value) if key == "load_rps" else int(value)
        return cls(**known)
