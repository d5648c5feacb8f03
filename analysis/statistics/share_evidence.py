"""Whether a share of requests keeps below what is allowed: once at the end, or after every block of a run.

Misses come in bunches (docs/explanation/method.md, "Objectives and errors"). Sequential evidence is the likelihood
ratio of other shares to the allowed one, a martingale of mean 1 [12, 13], its logarithm divided by the design effect.
`python benchmarks/judging.py objectives` measures the error rates.
"""

from __future__ import annotations

import math

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints, counts_of, parts
from tailgate.analysis.statistics.sequential import Evidence, mixed

FEWEST_BLOCKS = 4  # of a PASS at any interim analysis, where the slowest request is far below the limit
FEWEST_FOR_FAIL = 3  # blocks with a miss: the misses of one or two blocks may have one cause
BLOCKS_FOR_PASS = 24  # a jam that comes every eighth block, or more often, is in 95 % of such runs (exp(-3))
_FAR, _FAR_BLOCKS = 3.0, 72.0  # how many times the slowest request must fit into the limit, and that times blocks
_TIMES = np.array([1.25, 1.6, 2.5, 5.0, 10.0, 30.0])  # how much another share is above or below the allowed one
_MOST_SHARE = 0.999
_TRIED = np.concatenate(
    (np.geomspace(1e-5, 0.3, 60), np.linspace(0.32, 0.98, 24))
)  # shares at which limits are searched
_STRETCHES, _FEWEST_STRETCHES = (1, 2, 4, 8), 2  # in blocks; and of them
_BIN, _SMALLEST_MS = 0.01, 1e-3  # in log latency; of a latency
_SLOWEST, _LEVELS = 0.2, 5  # the largest share of slow requests whose bunching counts; shares from the allowed one on


def share_evidence(
    missed: Ints,
    requests: Ints,
    *,
    allowed: float,
    tail: Floats | float = 1.0,
    far: Bools | bool = False,
    least_blocks: int = 1,
    min_blocks: int = 0,
) -> Evidence:
    """Return the evidence after each block, from the misses and the requests of each. Nothing allowed gives no safety.

    `tail` is the design effect of the slow requests after each block, where it is known. `far` says after which blocks
    the slowest request `is_far` below the limit. FAIL needs misses in three blocks. PASS needs `least_blocks`, and
    `BLOCKS_FOR_PASS` unless it is far; on fewer than `min_blocks` it must still pass by all of them.
    """
    bad, total, blocks = np.cumsum(missed), np.cumsum(requests), np.cumsum(requests > 0)
    own = [design_effect(missed[:seen], requests[:seen]) for seen in range(1, len(missed) + 1)]
    effect = np.maximum(np.array(own), tail)
    harm, safety = _evidence(bad, total, allowed=allowed, effect=effect)
    return Evidence(
        limit=allowed,
        last_block=np.arange(len(missed)),
        value=bad / np.maximum(total, 1),
        harm=harm,
        safety=safety,
        deflation=effect,
        may_fail=np.cumsum(missed > 0) >= FEWEST_FOR_FAIL,
        may_pass=blocks >= np.where(far, least_blocks, max(least_blocks, BLOCKS_FOR_PASS)),
        early=blocks < min_blocks,
    )


def _evidence(bad: Ints, total: Ints, *, allowed: float, effect: Floats) -> tuple[Floats, Floats]:
    """Return the logarithms of the evidence of harm and of safety, from the misses and the requests so far."""
    if not 0.0 < allowed < 1.0:
        nothing = np.full(len(bad), -math.inf)
        harm = np.where(bad > 0, math.inf, nothing) if allowed <= 0.0 else nothing
        return harm, nothing if allowed <= 0.0 else np.full(len(bad), math.inf)
    odds = allowed / (1.0 - allowed)
    higher = np.minimum(odds * _TIMES / (1.0 + odds * _TIMES), _MOST_SHARE)
    lower = odds / _TIMES / (1.0 + odds / _TIMES)
    return _mixed(bad, total - bad, higher, allowed, effect), _mixed(bad, total - bad, lower, allowed, effect)


def _mixed(bad: Ints, good: Ints, shares: Floats, allowed: float, effect: Floats) -> Floats:
    """Return the logarithm of the mean over `shares` of the likelihood ratio to what is allowed. Shape (blocks,)."""
    for_bad = np.log(shares / allowed)[:, None]
    for_good = (np.log1p(-shares) - math.log1p(-allowed))[:, None]
    return mixed((bad * for_bad + good * for_good) / effect)


def share_limits(
    missed: Ints, requests: Ints, evidence: Evidence, *, alpha: float, tests: int = 1
) -> tuple[float, float]:
    """Return the limits of the share by all blocks, one at least: one-sided, at level alpha over all analyses.

    The lower one is at alpha / tests, as a FAIL of one of so many shares is. They are searched at a grid of shares,
    and at what is allowed, so that they agree with the `evidence` on it.
    """
    low, high = 0.0, 1.0
    bad, total = (column.sum(keepdims=True) for column in (missed, requests))
    for share in np.append(_TRIED, np.clip(evidence.limit, _TRIED[0], _TRIED[-1])).tolist():
        harm, safety = _evidence(bad, total, allowed=share, effect=evidence.deflation[-1:])
        low = max(low, share) if harm[0] >= math.log(tests / alpha) else low
        high = min(high, share) if safety[0] >= -math.log(alpha) else high
    return low, high


def is_far(slowest_ms: float, limit_ms: float | None, *, blocks: int) -> bool:
    """Return whether the slowest request of so many blocks is so far below the limit that no jam comes near it.

    The fewer blocks there are, the farther: 18 times in 4 blocks, 4 times in 18, and 3 times from 24 blocks on.
    """
    far = max(_FAR, _FAR_BLOCKS / max(1, blocks))
    return limit_ms is not None and slowest_ms * far <= limit_ms


def bunching(values: Floats, block: Ints, *, allowed: float) -> float:
    """Return the largest design effect of the slow requests, from the allowed share up to the slowest fifth: 1 or more.

    `values` are latencies, infinite where a request failed; `block` numbers the blocks from 0.
    """
    if not len(values) or not 0.0 < allowed < 1.0:
        return 1.0
    counts = _by_bin(values, block, int(block.max()) + 1)
    return _slowest_effect(_from_bin(counts), counts.sum(axis=0), allowed)


def tail_effects(values: Floats, block: Ints, *, blocks: int, allowed: float, limit_ms: float) -> tuple[Floats, Bools]:
    """Return `bunching` after each block, and whether the slowest that met the limit so far `is_far`.

    Where it is far, its bunching does not matter, and is 1. `block` is from 0 to `blocks` - 1. Shape (blocks,) each.
    """
    counts = _by_bin(values, block, blocks)
    above, upto = _from_bin(counts), np.cumsum(counts, axis=0)
    effects = [_slowest_effect(above[:seen], upto[seen - 1], allowed) for seen in range(1, blocks + 1)]
    slowest, within = np.zeros(blocks), values <= limit_ms
    np.maximum.at(slowest, block[within], values[within])
    far = [is_far(value, limit_ms, blocks=seen) for seen, value in enumerate(np.maximum.accumulate(slowest), 1)]
    return np.where(far, 1.0, effects), np.array(far, dtype=np.bool_)


def _by_bin(values: Floats, block: Ints, blocks: int) -> Ints:
    """Count the requests of each block in each bin of log latency, (blocks, bins); failures are in the last."""
    ended = np.isfinite(values)
    ends = np.min(values, where=ended, initial=math.inf), np.max(values, where=ended, initial=_SMALLEST_MS)
    lowest, highest = np.log(np.maximum(ends, _SMALLEST_MS)).tolist() if ended.any() else (0.0, 0.0)
    last = int((highest - lowest) / _BIN) + 1
    counts = np.zeros(blocks * (last + 1), dtype=np.int64)
    for part in parts(len(values)):  # numbers of all requests at once would take much memory
        place = np.minimum((np.log(np.maximum(values[part], _SMALLEST_MS)) - lowest) / _BIN, last)
        place = np.maximum(place, 0).astype(np.int64)  # rounding may put the fastest below 0
        counts += np.bincount(block[part].astype(np.int64) * (last + 1) + place, minlength=counts.size)
    return counts.reshape(blocks, last + 1)


def _from_bin(counts: Ints) -> Ints:
    """Count the requests of each block in each bin or a slower one."""
    return np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]


def _slowest_effect(above: Ints, counts: Ints, allowed: float) -> float:
    """Return the largest design effect of slow requests, by block and bin (`_from_bin`); `counts` are by bin."""
    below, last, most = np.cumsum(counts), len(counts) - 1, 1.0
    for share in np.geomspace(allowed, max(allowed, _SLOWEST), _LEVELS if allowed < _SLOWEST else 1):
        first = int(np.searchsorted(below, (1.0 - share) * int(below[-1]))) + 1
        most = max(most, design_effect(above[:, min(first, last)], above[:, 0]))
    return most


def design_effect_of(missed: Bools, block: Ints) -> float:
    """Return the design effect of the requests that missed; `block` numbers the block of each, from 0."""
    blocks = int(block.max(initial=-1)) + 1
    return design_effect(counts_of(block[missed], blocks), counts_of(block, blocks))


def design_effect(missed: Ints, requests: Ints) -> float:
    """Return how many times more the misses of each block vary than those of independent requests would; at least 1.

    It is the largest over single blocks and stretches of several: what lasts for longer than a block shows in those.
    """
    most = 1.0
    for width in _STRETCHES:
        whole = len(missed) // width
        if whole < _FEWEST_STRETCHES:
            break
        bad, total = (column[: whole * width].reshape(whole, width).sum(axis=1) for column in (missed, requests))
        stretches, size = np.count_nonzero(total), int(total.sum())
        share = bad.sum() / max(size, 1)
        if stretches > 1 and 0.0 < share < 1.0:
            residual = bad - share * total
            most = max(most, float(residual @ residual) * stretches / (stretches - 1) / (size * share * (1.0 - share)))
    return most
