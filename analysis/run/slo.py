"""Service-level objectives: what the experiment promises, whether an arm keeps it, and how many requests do.

A target on a quantile is judged as a share: p99 of TTFT within 2,000 ms means that at most 1 % of the requests take
longer. A failed request counts as longer than any limit (its TTFT counts as it was, if a token had come).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from analysis.arrays import Bools, Ints
from analysis.records.requests import Requests
from analysis.records.scratch import parts
from analysis.run.gaps import gaps_of
from analysis.settings.gate_limits import check_goodput
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.quantiles import quantile

_FEWEST_FOR_FAIL = 3  # one or two bad requests may be bad luck


def parse_goodput(table: Mapping[str, Any]) -> tuple[tuple[SloTarget, ...], float | None]:
    """The limits of a [goodput] table as targets, and the share of requests that must meet them all.

    An empty table gives none and None. What `check_goodput` refuses raises RecordError.
    """
    limits, share = check_goodput(table)
    # A limit for each request has no quantile; `meets_all` uses none.
    targets = [SloTarget(key=key, metric=key, quantile=0.5, limit=limit) for key, limit in limits.items()]
    return tuple(targets), share


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What a target counts, one entry each: requests, or token gaps for ITL."""

    missed: Bools
    row: Ints  # the request
    at_ns: Ints  # when the request was due, or the gap ended
    ms: npt.NDArray[Any] | None = None  # how long each took, NaN where that is unknown; None: failures are counted


def units(requests: Requests, mask: Bools, target: SloTarget) -> Units:
    """What `target` counts of the requests in `mask`, and what of it missed the limit.

    ITL counts every gap between tokens, and one gap of its deadline for a request that failed: it misses any limit.
    """
    if target.metric == "itl":
        gaps = gaps_of(requests, np.flatnonzero(mask))
        return Units(missed=_beyond(gaps.ms, target) | gaps.failed, row=gaps.row, at_ns=gaps.end_ns, ms=gaps.ms)
    missed, counts = misses(requests, target)
    rows = np.flatnonzero(counts & mask)
    ms = None if target.quantile is None else requests.metric_ms(target.metric)[rows]
    return Units(missed=missed[rows], row=rows, at_ns=requests.start_ns[rows], ms=ms)


def misses(requests: Requests, target: SloTarget) -> tuple[Bools, Bools]:
    """Which requests miss the target, which is not of ITL, and which count for it (not those of undefined value).

    One that was cut off past a limit on TTFT or E2E has missed it, also where its wait is no evidence of the tail.
    """
    completed = requests.ok | requests.failed
    if target.quantile is None:
        return requests.failed.copy(), completed
    values = requests.metric_ms(target.metric)
    if target.metric in ("ttft", "e2e") and requests.cut.any():
        waiting = np.flatnonzero(requests.cut & np.isnan(values))
        waited_ms = (requests.end_ns[waiting] - requests.start_ns[waiting]) / 1e6
        values = values.copy()
        values[waiting] = np.where(_beyond(waited_ms, target), waited_ms, math.nan)
    known = ~np.isnan(values) & (completed | requests.cut)
    # The deadline that a failure counts with elsewhere may lie below the limit; failing is never within it.
    lost = requests.failed if target.metric != "ttft" else requests.failed & (requests.first_ns <= 0)
    return known & (lost | _beyond(values, target)), known


def _beyond(values: npt.NDArray[Any], target: SloTarget) -> Bools:
    with np.errstate(invalid="ignore"):
        return np.asarray(values >= target.limit if target.strict else values > target.limit)


def meets_all(requests: Requests, targets: Sequence[SloTarget]) -> Bools:
    """Which requests completed within every per-request limit: the numerator of goodput.

    ITL pools the gaps of all requests, so a target on it limits no single one.
    """
    good = requests.ok.copy()
    for target in targets:
        if target.quantile is not None and target.metric != "itl":
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
    """How many times more the count of misses varies over blocks than with independent requests; at least 1.

    `block` numbers the blocks from 0 or a little above.
    """
    share = float(missed.mean()) if missed.size else 0.0
    if not 0.0 < share < 1.0:
        return 1.0
    totals = np.zeros(int(block.max()) + 1, dtype=np.int64)
    for part in parts(len(block)):
        totals += np.bincount(block[part], minlength=len(totals))
    present = totals > 0
    totals = totals[present]
    if len(totals) < 2:
        return 1.0
    residual = np.bincount(block[missed], minlength=len(present))[present] - share * totals
    variance = float((residual**2).sum()) * len(totals) / (len(totals) - 1)
    return max(1.0, variance / (missed.size * share * (1.0 - share)))


def observed(requests: Requests, mask: Bools, target: SloTarget) -> float:
    """What the target limits, as seen: a quantile in ms, or the error rate in percent; NaN of no request.

    A quantile that falls among failures is their deadline, so at least that.
    """
    if target.quantile is None:
        counted = mask & (requests.ok | requests.failed)
        return 100.0 * float(requests.failed[counted].mean()) if counted.any() else math.nan
    if target.metric == "itl":
        return quantile(gaps_of(requests, np.flatnonzero(mask)).ms, target.quantile)
    return quantile(requests.metric_ms(target.metric)[mask], target.quantile)
