"""Service-level objectives: what the experiment promises, whether an arm keeps it, and how many requests do.

A target on a quantile is judged as a share: p99 of TTFT within 2,000 ms means that at most 1 % of the requests take
longer. A failed request counts as longer than any limit (its TTFT counts as it was, if a token had come).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from tailgate.analysis.arrays import Bools, Floats, Ints, counts_of, indices
from tailgate.analysis.records.requests import Requests
from tailgate.analysis.run.gaps import gaps_of
from tailgate.analysis.settings.slo_targets import SloTarget
from tailgate.analysis.statistics.quantiles import quantile
from tailgate.analysis.statistics.share_evidence import BLOCKS_FOR_PASS, bunching, design_effect_of, is_far

_FEWEST_FOR_FAIL = 3  # one or two bad requests may be chance


@dataclass(frozen=True, slots=True)
class Units:
    """What a target counts, one entry each: requests, or token gaps for ITL."""

    missed: Bools
    row: Ints  # the request
    at_ns: Ints | None  # when the gap ended; None for requests, which count when they were due
    ms: Floats  # how long each took, infinite where it failed or its time is unknown
    limit_ms: float | None  # beyond which `ms` is a miss: of failures the deadline; None where that is unknown


def units(requests: Requests, mask: Bools, target: SloTarget) -> Units:
    """Return what `target` counts of the requests in `mask`, and what of it missed the limit.

    ITL counts every gap between tokens, and one gap of its deadline for a request that failed: it misses any limit.
    """
    if target.metric == "itl":
        gaps = gaps_of(requests, np.flatnonzero(mask))
        ms = np.where(gaps.failed, np.inf, gaps.ms)
        return Units((gaps.ms > target.limit) | gaps.failed, gaps.row, gaps.end_ns, ms, target.limit)
    if target.quantile is None:
        return failures(requests, mask)
    missed, counts = misses(requests, target)
    rows = indices(counts & mask)
    ms = requests.metric_ms(target.metric, rows)
    ms = np.where(missed[rows] & ~(ms > target.limit), np.inf, ms)
    return Units(missed[rows], rows, None, ms, target.limit)


def failures(requests: Requests, mask: Bools) -> Units:
    """Return the requests in `mask` that completed or failed; those that failed missed. `ms` is their E2E."""
    rows = indices(mask & (requests.ok | requests.failed))
    missed, ms = requests.failed[rows], requests.e2e_ms[rows]
    ms[missed] = np.inf
    return Units(missed, rows, None, ms, requests.deadline_ms)


def misses(requests: Requests, target: SloTarget) -> tuple[Bools, Bools]:
    """Mask the requests that miss a target (not of ITL), and those that count for it (with a defined value).

    A request that was cut off past a limit on TTFT or E2E missed it, even if its wait is no evidence of the tail.
    """
    completed = requests.ok | requests.failed
    values = requests.metric_ms(target.metric)
    if target.metric in ("ttft", "e2e") and requests.cut.any():
        waiting = np.flatnonzero(requests.cut & np.isnan(values))
        waited_ms = (requests.end_ns[waiting] - requests.start_ns[waiting]) / 1e6
        values = values.copy()
        values[waiting] = np.where(waited_ms > target.limit, waited_ms, math.nan)
    known = ~np.isnan(values) & (completed | requests.cut)
    # The deadline that a failure counts with elsewhere may lie below the limit; failing is never within it.
    lost = requests.failed if target.metric != "ttft" else requests.failed & ~requests.first_ns.known
    return known & (lost | (values > target.limit)), known


def meets_all(requests: Requests, targets: Sequence[SloTarget]) -> Bools:
    """Mask the requests that completed within every per-request limit, of which an ITL target is none: the numerator of
    goodput."""
    good = requests.ok.copy()
    for target in targets:
        if target.quantile is not None and target.metric != "itl":
            good &= ~misses(requests, target)[0]
    return good


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """Whether a share of requests keeps below what is allowed. Limits are one-sided: the upper one at level alpha, the
    lower one at alpha over the number of shares that may FAIL.

    `design_effect` is that of the limit on the side of what is allowed. `needed_blocks` is set where the limits would
    allow a PASS and only blocks are missing.
    """

    missed: int
    requests: int
    allowed: float
    low: float
    high: float
    design_effect: float
    verdict: str
    blocks: int = 0
    needed_blocks: int | None = None


def judge_share(
    missed: Bools,
    block: Ints,
    *,
    allowed: float,
    alpha: float,
    ms: Floats | None = None,
    limit_ms: float | None = None,
    least_blocks: int = 0,
    tests: int = 1,
) -> ShareResult:
    """Return PASS if the share that missed is at most `allowed` by its limits, FAIL if it is above, else INCONCLUSIVE.

    Limits are Clopper and Pearson's on a sample shrunk by the design effect of the misses, and for the upper limit also
    of the slow requests, by their latencies `ms` (infinite for failures), where it is known at what latency they miss:
    see `tailgate.analysis.statistics.share_evidence`. A PASS needs `least_blocks` blocks, and `BLOCKS_FOR_PASS` unless
    the slowest request that met `limit_ms` is far below it, or all may miss. Fewer than three misses never FAIL; no
    request decides nothing. `tests` is the number of shares that may FAIL (Bonferroni). `block` numbers the block of
    each.
    """
    size, count = len(missed), int(missed.sum())
    if size == 0:
        return ShareResult(
            missed=0, requests=0, allowed=allowed, low=0.0, high=1.0, design_effect=1.0, verdict="INCONCLUSIVE"
        )
    blocks, far = int((counts_of(block, int(block.max()) + 1) > 0).sum()), True
    own = effect = design_effect_of(missed, block)
    if ms is not None and limit_ms is not None and allowed < 1.0:
        far = is_far(float(np.max(ms, where=~missed, initial=0.0)), limit_ms, blocks=blocks)
        effect = own if far else max(own, bunching(ms, block, allowed=allowed))
    low = float(betaincinv(count / own, (size - count) / own + 1.0, alpha / tests)) if count > 0 else 0.0
    high = 1.0 if count == size else float(betaincinv(count / effect + 1.0, (size - count) / effect, 1.0 - alpha))
    needed = least_blocks if far else max(least_blocks, BLOCKS_FOR_PASS)
    verdict, needed_blocks = "INCONCLUSIVE", None
    if high <= allowed and blocks >= needed:
        verdict = "PASS"
    elif high <= allowed:
        needed_blocks = needed
    elif low > allowed and count >= _FEWEST_FOR_FAIL:
        verdict = "FAIL"
    return ShareResult(
        missed=count,
        requests=size,
        allowed=allowed,
        low=low,
        high=high,
        design_effect=own if count > allowed * size else effect,
        verdict=verdict,
        blocks=blocks,
        needed_blocks=needed_blocks,
    )


def observed(requests: Requests, mask: Bools, target: SloTarget) -> float:
    """Return what the target limits: a quantile in ms, or the error rate in percent; NaN without requests.

    A quantile that falls among failures is their deadline, so at least that.
    """
    if target.quantile is None:
        counted = mask & (requests.ok | requests.failed)
        return 100.0 * float(requests.failed[counted].mean()) if counted.any() else math.nan
    if target.metric == "itl":
        return quantile(gaps_of(requests, np.flatnonzero(mask)).ms, target.quantile)
    return quantile(requests.metric_ms(target.metric, mask), target.quantile)
