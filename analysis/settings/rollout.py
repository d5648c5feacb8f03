"""What a rollout must carry: the [rollout] table of an experiment, which decides nothing and prices an arm.

It stands apart from the weighing, so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from analysis.records.tables import RecordError
from analysis.settings.fields import Range, check_fields, numbers_of

_CURRENCY = re.compile(r"[^\W\d_]{1,8}|[$€£¥₹]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """`load_rps` is the load over all replicas, None for any; `gpus_per_replica` what one server process takes, and
    `gpu_hour_price` what one of those costs an hour, None where nobody asks.

    A value out of range raises RecordError, one line that names rollout.KEY.
    """

    load_rps: Annotated[float | None, Range(1e-6, 1e9)] = None
    gpus_per_replica: Annotated[int, Range(1, 4096)] = 1
    gpu_hour_price: Annotated[float | None, Range(0.0, 1e6)] = None
    currency: str = "USD"  # of the price, as it is written beside it

    def __post_init__(self) -> None:
        check_fields(self, "rollout")
        if not isinstance(self.currency, str) or not _CURRENCY.fullmatch(self.currency):
            raise RecordError(f"rollout.currency is {self.currency!r}: give a short name such as EUR")

    def price_of(self, gpu_s: float) -> float | None:
        """What so many GPU-seconds cost; None without a price."""
        return None if self.gpu_hour_price is None else gpu_s / 3600.0 * self.gpu_hour_price

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Rollout:
        """The rollout that `table` describes, defaults elsewhere; other keys are ignored.

        Values of another type raise RecordError.
        """
        named = {"currency": table["currency"]} if "currency" in table else {}
        return cls(**numbers_of(cls, table, "rollout"), **named)
