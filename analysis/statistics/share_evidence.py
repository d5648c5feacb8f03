"""Whether a share of requests keeps below what is allowed, looked at after every block: a bet on the count of misses.

Were the share p0, the likelihood ratio of any other share to p0, multiplied up request by request, is a martingale of
mean 1, and so is the mean over several other shares: it ever exceeds 1 / alpha with a chance of alpha at most [1, 2].
Of shares above p0 it is evidence of harm, of those below of safety.

Misses come in bunches. As for one look (`analysis.run.slo`), the logarithm is divided by how many times more the count
of misses varies over blocks, or over stretches of several, than independent requests would, as far as they show it. Of
latencies the slowest requests, as many as are allowed, may bunch more than the misses do (`tail_effects`): where a jam
has come, misses will come in jams. That is an estimate and no theorem: `python benchmarks/judging.py sequential` says
how often it errs.

References
----------
[1] Ville, J. (1939). Étude critique de la notion de collectif.
[2] Robbins, H. (1970). Statistical methods related to the law of the iterated logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.arrays import Floats, Ints
from analysis.statistics.sequential import Outcome, mixed

FEWEST_FOR_FAIL = 3  # blocks with a miss: those of one or two may be one piece of bad luck
_TIMES = np.array([1.25, 1.6, 2.5, 5.0, 10.0, 30.0])  # how much another share is above or below the allowed one
_MOST_SHARE = 0.999
_TRIED = np.concatenate(
    (np.geomspace(1e-5, 0.3, 60), np.linspace(0.32, 0.98, 24))
)  # shares that limits are looked for at
_STRETCHES, _FEWEST_STRETCHES = (1, 2, 4, 8), 2  # in blocks; and of them
_BIN, _SMALLEST_MS = 0.01, 1e-3  # in log latency; of a latency


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareEvidence:
    """What is known after each block, of shape (blocks,): logarithms of e-values, against a share of at most what is
    allowed (`harm`) and of at least that (`safety`); blocks with misses, share and design effect until then."""

    allowed: float
    harm: Floats
    safety: Floats
    blocks_with_misses: Ints
    share: Floats
    design_effect: Floats

    def decision(self, *, alpha: float, gates: int = 1, least_blocks: int = 1) -> tuple[Outcome, int] | None:
        """The first outcome that stands for good, and the block after which it does; None while there is none.

        FAIL needs the evidence of one of `gates` gates and misses in three blocks; PASS `least_blocks` blocks, since
        misses that come in bunches may all be still to come, and a share so far within what is allowed.
        """
        count = np.arange(1, len(self.harm) + 1)
        fails = (self.harm >= math.log(gates / alpha)) & (self.blocks_with_misses >= FEWEST_FOR_FAIL)
        passes = (self.safety >= -math.log(alpha)) & (self.share <= self.allowed) & (count >= least_blocks)
        met: list[tuple[int, Outcome]] = []
        if fails.any():
            met.append((int(np.argmax(fails)), "FAIL"))
        if passes.any():
            met.append((int(np.argmax(passes)), "PASS"))
        if not met:
            return None
        block, outcome = min(met)
        return outcome, block


def share_evidence(missed: Ints, requests: Ints, *, allowed: float, tail: Floats | float = 1.0) -> ShareEvidence:
    """The evidence after each block, from the misses and the requests of each. Nothing allowed leaves no safety.

    `tail` is the design effect of the slowest requests after each block, where it is known.
    """
    bad, total = np.cumsum(missed), np.cumsum(requests)
    effect = np.maximum(_design_effects(missed, requests), tail)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(total > 0, bad / np.maximum(total, 1), 0.0)
    if not 0.0 < allowed < 1.0:
        nothing = np.full(len(missed), -math.inf)
        harm = np.where(bad > 0, math.inf, nothing) if allowed <= 0.0 else nothing
        safety = nothing if allowed <= 0.0 else np.full(len(missed), math.inf)
    else:
        odds = allowed / (1.0 - allowed)
        higher = np.minimum(odds * _TIMES / (1.0 + odds * _TIMES), _MOST_SHARE)
        lower = odds / _TIMES / (1.0 + odds / _TIMES)
        harm, safety = (_mixed(bad, total - bad, shares, allowed, effect) for shares in (higher, lower))
    return ShareEvidence(
        allowed=allowed,
        harm=harm,
        safety=safety,
        blocks_with_misses=np.cumsum(missed > 0),
        share=np.asarray(share),
        design_effect=effect,
    )


def _mixed(bad: Ints, good: Ints, shares: Floats, allowed: float, effect: Floats) -> Floats:
    """The logarithm of the mean over `shares` of the likelihood ratio to what is allowed. Shape (blocks,)."""
    for_bad = np.log(shares / allowed)[:, None]
    for_good = (np.log1p(-shares) - math.log1p(-allowed))[:, None]
    logarithms = (bad * for_bad + good * for_good) / effect
    return mixed(logarithms)


def share_limits(missed: Ints, requests: Ints, *, alpha: float, tail: Floats | float = 1.0) -> tuple[Floats, Floats]:
    """The limits of the share after each block, (blocks,) each: one-sided, at level alpha over all looks together."""
    low, high = np.zeros(len(missed)), np.ones(len(missed))
    needed = -math.log(alpha)
    for share in _TRIED:
        evidence = share_evidence(missed, requests, allowed=float(share), tail=tail)
        low = np.where(evidence.harm >= needed, np.maximum(low, share), low)
        high = np.where(evidence.safety >= needed, np.minimum(high, share), high)
    return np.maximum.accumulate(low), np.minimum.accumulate(high)


def tail_effects(values: Floats, block: Ints, *, blocks: int, allowed: float) -> Floats:
    """The design effect after each block of the slowest requests so far, of the share `allowed`, to a bin of 1 %.

    `values` are latencies, infinite where a request failed; `block` is from 0 to `blocks` - 1. Shape (blocks,).
    """
    logs = np.log(np.maximum(values, _SMALLEST_MS))
    finite = logs[np.isfinite(logs)]
    lowest = float(finite.min()) if finite.size else 0.0
    last = int((float(finite.max()) - lowest) / _BIN) + 1 if finite.size else 0
    binned = np.where(np.isfinite(logs), (np.where(np.isfinite(logs), logs, lowest) - lowest) / _BIN, last)
    cell = block * (last + 1) + binned.astype(np.int64)
    counts = np.bincount(cell, minlength=blocks * (last + 1)).reshape(blocks, last + 1)
    total = counts.sum(axis=1)
    upto = np.zeros(last + 1, dtype=np.int64)
    effects = np.ones(blocks)
    for seen in range(1, blocks + 1):
        upto += counts[seen - 1]
        slowest = int(np.searchsorted(np.cumsum(upto), (1.0 - allowed) * int(upto.sum()), side="left")) + 1
        above = counts[:seen, slowest:].sum(axis=1)
        effects[seen - 1] = _design_effects(above, total[:seen])[-1]
    return effects


def _design_effects(missed: Ints, requests: Ints) -> Floats:
    """After each block: how many times more misses vary than with independent requests, over blocks or over stretches
    of several, whichever is most; at least 1. What lasts for longer than a block shows in stretches alone."""
    effects = np.ones(len(missed))
    for width in _STRETCHES:
        whole = len(missed) // width
        if whole < _FEWEST_STRETCHES:
            break
        bad, total = (column[: whole * width].reshape(whole, width).sum(axis=1) for column in (missed, requests))
        ends = np.arange(1, whole + 1) * width - 1
        known = np.searchsorted(ends, np.arange(len(missed)), side="right") - 1
        effect = _effects_over(bad, total)
        enough = known >= _FEWEST_STRETCHES - 1
        effects = np.where(enough, np.maximum(effects, effect[np.maximum(known, 0)]), effects)
    return effects


def _effects_over(missed: Ints, requests: Ints) -> Floats:
    """After each stretch: the variance of its count of misses over that of independent requests."""
    total, bad = np.cumsum(requests).astype(np.float64), np.cumsum(missed).astype(np.float64)
    stretches = np.cumsum(requests > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = bad / total
        # the sum over stretches of (misses - share * requests)^2, by its terms
        squares = np.cumsum(missed.astype(np.float64) ** 2)
        products = np.cumsum(missed.astype(np.float64) * requests)
        sizes = np.cumsum(requests.astype(np.float64) ** 2)
        variance = (squares - 2.0 * share * products + share**2 * sizes) * stretches / (stretches - 1)
        effect = variance / (total * share * (1.0 - share))
    return np.asarray(np.where(np.isfinite(effect), effect, 1.0))
