"""What an [slo] table asks for, in keys (`p99_ttft_ms = 500`) or as the field writes it (`p99_ttft_ms <= 500`).

It is separate from the judging, so that reading an experiment does not load the statistics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.records.tables import RecordError
from analysis.settings.metrics import JUDGED_METRICS

_FIELD_NAMES = {"e2el": "e2e"}  # as vLLM's serving benchmark has it

_KEY = re.compile(r"p(?P<whole>\d{1,2})(?:[_.](?P<part>\d+))?_(?P<metric>[a-z0-9]+(?:_[a-z]+)*?)(?P<ms>_ms)?")
_EXPRESSION = re.compile(
    r"(?P<key>[A-Za-z][\w.]*)\s*(?P<operator>[<>=!≤≥]*)\s*(?P<limit>[-+]?[\d.]+(?:e[-+]?\d+)?)?\s*(?P<unit>\S*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """One objective. `quantile` is None for the error rate; `limit` is in ms, or in percent for the error rate.

    With `strict` a value on the limit misses it.
    """

    key: str
    metric: str
    quantile: float | None
    limit: float
    strict: bool = False

    @property
    def allowed_share(self) -> float:
        """The share of requests (of gaps for ITL) that may miss the limit."""
        return self.limit / 100.0 if self.quantile is None else 1.0 - self.quantile

    @property
    def text(self) -> str:
        """The target as the field writes it: "p99_ttft_ms <= 500", "error_rate <= 0.5%"."""
        operator = "<" if self.strict else "<="
        if self.quantile is None:
            return f"error_rate {operator} {self.limit:.10g}%"
        return f"{self.key} {operator} {self.limit:.10g}"


def parse_slo(table: Mapping[str, Any]) -> tuple[SloTarget, ...]:
    """The targets of an [slo] table: keys like p99_ttft_ms and error_pct, then those in its list `targets`.

    Anything else, and two limits for one key, raise RecordError.
    """
    targets: dict[str, SloTarget] = {}
    for key, value in table.items():
        if key == "targets":
            _add(targets, parse_targets(value, "slo.targets"), "slo")
        else:
            _add(targets, [_of_key(key, value)], "slo")
    return tuple(targets.values())


def parse_targets(texts: Any, where: str) -> list[SloTarget]:
    """The targets that a list of texts like "p99_ttft_ms <= 500" names."""
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise RecordError(f'{where} is {texts!r}: give a list such as ["p99_ttft_ms <= 500"]')
    return [parse_target(text, where) for text in texts]


def parse_target(text: str, where: str) -> SloTarget:
    """The target in "p99_ttft_ms <= 500", "p50_itl < 40ms", "p99_e2e <= 2s" or "error_rate <= 0.5%".

    RecordError names `where`, the text and the remedy.
    """
    entry = f'{where} holds "{text}"'
    match = _EXPRESSION.fullmatch(text.strip())
    if match is None:
        raise RecordError(f"{entry}: write KEY <= LIMIT, such as p99_ttft_ms <= 500")
    key, operator, number, unit = match["key"], match["operator"], match["limit"], match["unit"]
    if operator not in ("<", "<=", "≤"):
        what = f'"{operator}" is no limit from above' if operator else "the operator is missing"
        raise RecordError(f"{entry}: {what}: write <= or <, such as {key} <= 500")
    if number is None and unit:
        raise RecordError(f'{entry}: "{unit}" is no finite number: write one such as 500 or 0.5')
    if number is None:
        raise RecordError(f"{entry}: the number is missing: write one after {operator}, such as {key} {operator} 500")
    try:
        limit = float(number)
    except ValueError:
        raise RecordError(f'{entry}: "{number}" is no number: write one such as 500 or 0.5') from None
    if key in ("error_rate", "error_pct"):
        # A bare 0.5 may mean half of all requests or half a percent.
        if unit != "%" and (key == "error_rate" or unit):
            raise RecordError(f"{entry}: write the error rate in percent, such as error_rate <= 0.5%")
        target = _error_target(limit, entry)
    else:
        unlimited, with_unit = _unlimited(key, f"{entry}: {key}", "error_rate")
        target = _latency_target(unlimited, _milliseconds(limit, unit, key, with_unit, entry), entry)
    return replace(target, strict=operator == "<")


def merged(table: Mapping[str, Any], texts: Sequence[str], where: str = "--slo") -> dict[str, Any]:
    """The [slo] table with the targets in `texts`, which replace those of the same key."""
    fresh: dict[str, SloTarget] = {}
    _add(fresh, parse_targets(list(texts), where), where)
    kept = [target for target in parse_slo(table) if target.key not in fresh]
    return {"targets": [target.text for target in (*kept, *fresh.values())]}


def _add(known_targets: dict[str, SloTarget], targets: Sequence[SloTarget], where: str) -> None:
    for target in targets:
        known = known_targets.setdefault(target.key, target)
        if known != target:
            raise RecordError(f"{where} has both {known.text} and {target.text}: keep one")


def _of_key(key: str, value: Any) -> SloTarget:
    entry = f"slo.{key}"
    # The key first: what an unknown one should hold is unknown too.
    unlimited = None if key == "error_pct" else _unlimited(key, entry, "error_pct", needs_unit=True)[0]
    entry = f"{entry} is {_finite(entry, value):g}"
    return _error_target(value, entry) if unlimited is None else _latency_target(unlimited, value, entry)


def _unlimited(key: str, entry: str, errors: str, *, needs_unit: bool = False) -> tuple[SloTarget, bool]:
    """The target that a latency key names, without its limit, and whether the key names the unit."""
    match = _KEY.fullmatch(key)
    metric = _FIELD_NAMES.get(match["metric"], match["metric"]) if match is not None else ""
    if match is None or metric not in JUDGED_METRICS or (needs_unit and not match["ms"]):
        raise RecordError(
            f"{entry} is unknown: write pQ_METRIC_ms with METRIC of {', '.join(JUDGED_METRICS)}, such as p99_ttft_ms, "
            f"or {errors}"
        )
    quantile = round(float(f"{match['whole']}.{match['part'] or 0}") / 100.0, 10)
    if quantile <= 0:
        raise RecordError(f"{entry} asks for quantile 0: use p1 to p99_99")
    part = f"_{match['part']}" if match["part"] else ""
    key = f"p{match['whole']}{part}_{metric}_ms"
    return SloTarget(key=key, metric=metric, quantile=quantile, limit=math.nan), bool(match["ms"])


def _finite(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RecordError(f"{key} is {value!r}: give a number")
    return float(value)


def _latency_target(unlimited: SloTarget, limit_ms: float, entry: str) -> SloTarget:
    if not 0 < limit_ms < math.inf:
        raise RecordError(f"{entry}: give milliseconds above 0")
    return replace(unlimited, limit=float(limit_ms))


def _error_target(limit: float, entry: str) -> SloTarget:
    if not 0 <= limit <= 100:
        raise RecordError(f"{entry}: give a percentage from 0 to 100")
    return SloTarget(key="error_pct", metric="error", quantile=None, limit=float(limit))


def _milliseconds(limit: float, unit: str, key: str, with_unit: bool, entry: str) -> float:
    if unit == "ms" or (not unit and with_unit):
        return limit
    if unit == "s" and not with_unit:
        return 1000.0 * limit
    bare = key.removesuffix("_ms")
    if not unit:
        raise RecordError(f"{entry}: the unit is missing: write {bare}_ms <= {limit:g} or {bare} <= {limit:g}ms")
    raise RecordError(f'{entry}: "{unit}" is no unit of {key}: write {bare} <= 500ms or {bare} <= 0.5s')
