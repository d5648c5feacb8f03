"""Service-level objectives: what the experiment promises, whether an arm keeps it, and how many requests do.

A target on a quantile is judged as a share: p99 of TTFT within 2,000 ms means that at most 1 % of the requests take
longer. A failed request counts as longer than any limit (its TTFT counts as it was, if a token had come).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.limits import check_goodput
from analysis.quantiles import quantile
from analysis.records import METRICS, RecordError, Requests

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_KEY = re.compile(r"p(?P<whole>\d{1,2})(?:_(?P<part>\d+))?_(?P<metric>[a-z0-9]+(?:_[a-z]+)*)_ms")
_FEWEST_FOR_FAIL = 3  # one or two bad requests cannot be told from bad luck


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """One objective. `quantile` is None for the error rate; `limit` is in ms, or in percent for the error rate."""

    key: str
    metric: str
    quantile: float | None
    limit: float

    @property
    def allowed_share(self) -> float:
        """The share of requests that may miss the limit."""
        return self.limit / 100.0 if self.quantile is None else 1.0 - self.quantile


def parse_slo(table: Mapping[str, Any]) -> tuple[SloTarget, ...]:
    """The targets of an [slo] table: p99_ttft_ms, p50_e2e_ms, p99_9_max_itl_ms, error_pct; other keys RecordError."""
    targets = []
    for key, limit in table.items():
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not math.isfinite(limit) or limit < 0:
            raise RecordError(f"slo.{key} is {limit!r}: give a number that is not negative")
        if key == "error_pct":
            targets.append(SloTarget(key=key, metric="error", quantile=None, limit=float(limit)))
            continue
        match = _KEY.fullmatch(key)
        if match is None or match["metric"] not in METRICS:
            raise RecordError(f"slo.{key} is unknown: use keys like p99_ttft_ms ({', '.join(METRICS)}) or error_pct")
        q = float(f"{match['whole']}.{match['part'] or 0}") / 100.0
        if q <= 0:
            raise RecordError(f"slo.{key} asks for quantile 0: use p1 to p99_99")
        targets.append(SloTarget(key=key, metric=match["metric"], quantile=q, limit=float(limit)))
    return tuple(targets)


def parse_goodput(table: Mapping[str, Any]) -> tuple[tuple[SloTarget, ...], float | None]:
    """The limits of a [goodput] table as targets, and the share of requests that must meet them all.

    An empty table gives none and None. What `check_goodput` refuses raises RecordError.
    """
    limits, share = check_goodput(table)
    # A limit for each request has no quantile; `meets_all` asks for none.
    targets = [SloTarget(key=key, metric=key, quantile=0.5, limit=limit) for key, limit in limits.items()]
    return tuple(targets), share


def misses(requests: Requests, target: SloTarget) -> tuple[Bools, Bools]:
    """Which requests miss the target, and which count for it at all (not those whose value is undefined)."""
    completed = requests.ok | requests.failed
    if target.quantile is None:
        return requests.failed.copy(), completed
    values = requests.metric_ms(target.metric)
    known = ~np.isnan(values) & (completed | requests.cut)
    # The deadline that a failure counts with elsewhere may lie below the limit; failing is never within it.
    lost = requests.failed if target.metric != "ttft" else requests.failed & (requests.first_ns <= 0)
    with np.errstate(invalid="ignore"):
        return known & (lost | (values > target.limit)), known


def meets_all(requests: Requests, targets: Sequence[SloTarget]) -> Bools:
    """Which requests completed within every per-request limit: the numerator of goodput."""
    good = requests.ok.copy()
    for target in targets:
        if target.quantile is not None:
            missed, _ = misses(requests, target)
            good &= ~missed
    return good


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """Whether a share of requests keeps below what is allowed; limits are one-sided at level alpha each."""

    missed: int
    requests: int
    allowed: float
    low: float
    high: float
    design_effect: float
    verdict: str


def judge_share(missed: Bools, block: Ints, *, allowed: float, alpha: float) -> ShareResult:
    """PASS when the share that missed is surely at most `allowed`, FAIL when it is surely above, else INCONCLUSIVE.

    Limits are Clopper and Pearson's on a sample shrunk by the design effect: misses come in bunches, so their count
    over blocks varies more than independent requests would. Fewer than three misses never FAIL; no request decides
    nothing. `block` numbers the time block of each request.
    """
    size, count = len(missed), int(missed.sum())
    if size == 0:
        return ShareResult(
            missed=0, requests=0, allowed=allowed, low=0.0, high=1.0, design_effect=1.0, verdict="INCONCLUSIVE"
        )
    effect = design_effect(missed, block)
    shrunk, bad = size / effect, count / effect
    low = float(stats.beta.ppf(alpha, bad, shrunk - bad + 1.0)) if bad > 0 else 0.0
    high = float(stats.beta.ppf(1.0 - alpha, bad + 1.0, shrunk - bad)) if shrunk > bad else 1.0
    verdict = "INCONCLUSIVE"
    if high <= allowed:
        verdict = "PASS"
    elif low > allowed and count >= _FEWEST_FOR_FAIL:
        verdict = "FAIL"
    return ShareResult(
        missed=count, requests=size, allowed=allowed, low=low, high=high, design_effect=effect, verdict=verdict
    )


def design_effect(missed: Bools, block: Ints) -> float:
    """How many times more the count of misses varies over blocks than with independent requests; at least 1."""
    share = float(missed.mean()) if missed.size else 0.0
    if not 0.0 < share < 1.0:
        return 1.0
    _, index = np.unique(block, return_inverse=True)
    totals = np.bincount(index)
    if len(totals) < 2:
        return 1.0
    residual = np.bincount(index, weights=missed.astype(np.float64)) - share * totals
    variance = float((residual**2).sum()) * len(totals) / (len(totals) - 1)
    return max(1.0, variance / (missed.size * share * (1.0 - share)))


def observed(requests: Requests, mask: Bools, target: SloTarget) -> float:
    """What the target limits, as seen: a quantile in ms, or the error rate in percent; NaN of no request.

    A quantile that falls among failures is their deadline, so at least that.
    """
    if target.quantile is None:
        counted = mask & (requests.ok | requests.failed)
        return 100.0 * float(requests.failed[counted].mean()) if counted.any() else math.nan
    return quantile(requests.metric_ms(target.metric)[mask], target.quantile)
