"""What an [slo] table asks for: keys such as p99_ttft_ms = 500 and error_pct = 0.5."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tailgate.analysis.records.tables import RecordError
from tailgate.analysis.settings.metrics import JUDGED_METRICS

_KEY = re.compile(rf"p([1-9]\d?)(?:_(\d+))?_({'|'.join(JUDGED_METRICS)})_ms")

# The table's JSON Schema.
SLO_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "error_pct": {
            "type": "number",
            "minimum": 0,
            "maximum": 100,
            "description": "Percentage of requests that fail.",
        }
    },
    "patternProperties": {
        f"^{_KEY.pattern}$": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Limit in ms of a quantile of a metric, such as `p99_ttft_ms` or `p99_9_itl_ms`: Q is 1 to "
            f"99_99…, METRIC one of {', '.join(JUDGED_METRICS)}.",
        }
    },
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """One objective. `quantile` is None for the error rate; `limit` is in ms, or in percent for the error rate."""

    key: str
    metric: str
    quantile: float | None
    limit: float

    @property
    def allowed_share(self) -> float:
        """The share of requests (of gaps for ITL) that may miss the limit."""
        return self.limit / 100.0 if self.quantile is None else 1.0 - self.quantile


def parse_slo(table: Mapping[str, Any]) -> tuple[SloTarget, ...]:
    """Return the targets of an [slo] table. Raises RecordError."""
    return tuple(_target(key, value) for key, value in table.items())


def merged(table: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return the [slo] table with the targets in `texts`, such as "p99_ttft_ms=500", instead of those of the same key.

    Raises RecordError.
    """
    changed = dict(table)
    for text in texts:
        key, _, value = text.partition("=")
        try:
            changed[key] = float(value)
        except ValueError:
            raise RecordError(f'--slo "{text}" is not KEY=LIMIT: give one such as p99_ttft_ms=500') from None
    parse_slo(changed)
    return changed


def _target(key: str, value: Any) -> SloTarget:
    match = _KEY.fullmatch(key)
    if match is None and key != "error_pct":
        raise RecordError(
            f"slo.{key} is unknown: give error_pct or pQ_METRIC_ms, with METRIC of {', '.join(JUDGED_METRICS)}, "
            "such as p99_ttft_ms"
        )
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if match is None:
        if not usable or not 0 <= value <= 100:
            raise RecordError(f"slo.{key} is {value!r}: give a percentage from 0 to 100")
        return SloTarget(key=key, metric="error", quantile=None, limit=float(value))
    if not usable or not 0 < value < math.inf:
        raise RecordError(f"slo.{key} is {value!r}: give milliseconds above 0")
    quantile = round(float(f"{match[1]}.{match[2] or 0}") / 100.0, 10)
    return SloTarget(key=key, metric=match[3], quantile=quantile, limit=float(value))
