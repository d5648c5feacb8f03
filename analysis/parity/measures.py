"""How far logits are from a float64 reference, position by position, and how much of it noise can be.

All arms were fed the same prompts and the same continuations (teacher forcing), so row i of every matrix of logits
answers the same question. docs/explanation/parity.md derives the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from tailgate.analysis.arrays import Bools, Floats, Ints

Matrix = npt.NDArray[Any]  # [positions, vocabulary], may be memory-mapped
Statistic = Callable[[Floats], float]

# Distance from 1 to the next number: what one rounding can cost, twice over.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

ERROR_LIMIT = 1.5  # of the control's
NOISE_SDS = 4.0
# Fewer set no interval: at the limit an arm passes 4 to 8 of 100 times with 8, and 17 with 2, where 2.5 is meant.
LEAST_REQUESTS = 8
# Fewer set no interval of a mean: with a lognormal spread of 1, 32 leave out the truth above 5 times in 100.
LEAST_TEXTS = 32
_DRAWS, _TEXT_DRAWS = 999, 1999
_ROUNDING = 1e-6  # of a mean: by which sums over like texts differ
_TAIL = 0.025  # on either side of an interval


@dataclass(frozen=True, slots=True)
class Measures:
    """How logits differ from a reference, one number a position."""

    error: Floats  # ‖logits − reference‖ / ‖reference‖, Euclidean over the vocabulary
    divergence: Floats  # KL(reference ‖ logits) in nats
    spread: Floats  # standard deviation over the vocabulary of logits − reference
    top: Ints  # the token that the logits prefer
    peak: Floats  # size of the reference's largest logit
    finite: Bools


def measure(logits: Matrix, reference: Matrix) -> Measures:
    """Return how `logits` differ from `reference`, both [positions, vocabulary], read a row at a time.

    Logits that are not finite count as infinitely wrong.
    """
    rows = [
        _measure_row(np.asarray(own, dtype=np.float64), np.asarray(true, dtype=np.float64))
        for own, true in zip(logits, reference, strict=True)
    ]
    return Measures(*map(np.array, zip(*rows, strict=True)))


def _measure_row(logits: Floats, reference: Floats) -> tuple[float, float, float, int, float, bool]:
    top = int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))
    best = float(reference.max())
    if not np.isfinite(logits).all():
        return math.inf, math.inf, math.inf, top, abs(best), False
    delta = logits - reference
    size = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(delta)) / size if size else math.inf
    weights = np.exp(reference - best)
    total = float(weights.sum())
    # KL(p ‖ q) = log Σ p·exp(delta − Σ p·delta), in the form that keeps its digits when p and q are close
    offset = delta - float(weights @ delta) / total
    divergence = math.log1p(float(weights @ np.expm1(offset)) / total) if offset.max() < 500.0 else math.inf
    # rounding may take it a hair below the least that a divergence can be
    return error, max(0.0, divergence), float(delta.std()), top, abs(best), True


def noise_bound(control: Measures, dtype: str) -> Floats:
    """Return the largest lead at each position that noise of the allowed size can turn.

    A flip needs the errors of two tokens to differ by more than the lead. Were they independent with the control's
    spread s, their difference would have a standard deviation of √2·s. An arm may err ERROR_LIMIT times as much, and
    NOISE_SDS standard deviations of that are granted, and one step of the dtype at the size of the largest logit, since
    logits that share a step are equal. A position where the control errs little counts as a typical one.
    The bound rests on the control's errors alone: an arm's own errors would explain every flip.
    """
    typical = np.maximum(control.spread, np.median(control.spread))
    step = EPSILON[dtype] * np.exp2(np.floor(np.log2(np.maximum(control.peak, np.finfo(np.float64).tiny))))
    return np.asarray(ERROR_LIMIT * NOISE_SDS * math.sqrt(2.0) * typical + step)


def ratio_interval(
    own: Floats, control: Floats, request: Ints, statistic: Statistic, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return statistic(own) / statistic(control), and its 95 % interval by resampling requests with all positions.

    Positions of a request share a context; requests are independent. One request gives an interval without width, so
    the caller asks for LEAST_REQUESTS. A ratio to nothing is infinite, of nothing to nothing 1.
    """

    def ratio(index: Ints) -> float:
        above, below = statistic(own[index]), statistic(control[index])
        if below > 0:
            return above / below
        return math.inf if above > 0 else 1.0

    groups = [np.flatnonzero(request == number) for number in np.unique(request)]
    draws = [
        ratio(np.concatenate([groups[pick] for pick in rng.integers(0, len(groups), size=len(groups))]))
        for _ in range(_DRAWS)
    ]
    low, high = np.quantile(draws, [_TAIL, 1.0 - _TAIL], method="inverted_cdf")
    return ratio(np.arange(len(own))), float(low), float(high)


def mean_interval(sums: Floats, counts: Floats, rng: np.random.Generator) -> tuple[float, float | None, float | None]:
    """Return the mean per token and its 95 % interval. `sums` [texts] add up a text's tokens, of which it has `counts`.

    The unit is the text, since its tokens share a context. The interval is BCa's (Efron 1987) at a nominal 98.5 %,
    which leaves out the truth above as often as 95 % may where texts differ as lognormally as LEAST_TEXTS allows for.
    Fewer set none, nor do texts that all lose the same but for rounding. An infinite sum makes everything infinite;
    nothing lost at all has no width.
    """
    value = float(sums.sum() / counts.sum())
    if len(sums) < LEAST_TEXTS:
        return value, None, None
    if not 0.0 < value < math.inf:
        return value, value, value
    if np.ptp(sums / counts) <= _ROUNDING * value:
        return value, None, None

    def mean(sums: Floats, counts: Floats, axis: int = -1) -> Floats:
        return np.asarray(sums.sum(axis) / counts.sum(axis))

    drawn = bootstrap((sums, counts), mean, paired=True, n_resamples=_TEXT_DRAWS, confidence_level=0.985, rng=rng)
    return value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


# Quantiles are by rank: an infinite value must not become not-a-number by interpolation.
median: Statistic = partial(np.quantile, q=0.5, method="inverted_cdf")
p99: Statistic = partial(np.quantile, q=0.99, method="inverted_cdf")
