"""What a quantile would have been had no compile held a request up, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.quantiles import block_histogram, quantile, quantile_interval
from analysis.resampling import bootstrap_limits, groups_of
from analysis.run import Run
from analysis.slo import design_effect
from analysis.spikes import without_stalls_ms

_CONFIDENCE = 0.95
_DRAWS = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """A quantile without compile stalls in ms, and the share of the quantile seen that they explain in percent.

    Limits are two-sided at 95 %; NaN where the data set none.
    """

    without_ms: float
    low_ms: float
    high_ms: float
    explained_pct: float
    explained_low_pct: float
    explained_high_pct: float


def counterfactual(run: Run, arm: str, metric: str, *, q: float = 0.99) -> Counterfactual:
    """The `q` quantile of ttft or e2e over the arm's measured requests, less the time that compiles held them up.

    The quantile's limits are order statistics on a sample shrunk for bunching in blocks. The share rests on the ratio
    of two quantiles of the same requests, whose errors go together: Student's t on the standard error of a block
    bootstrap that draws each block with and without its stalls.
    """
    values, without = run.requests.metric_ms(metric), without_stalls_ms(run.requests, run.attribution, metric)
    own = run.of_arm(arm) & run.usable & ~np.isnan(values)
    seen, left, block = values[own], without[own], run.block[own]
    top, rest = quantile(seen, q), quantile(left, q)
    low, high = quantile_interval(left, q, confidence=_CONFIDENCE, design_effect=design_effect(left > rest, block))
    explained = 100.0 * (1.0 - rest / top) if top > 0 else math.nan
    shares = (math.nan, math.nan)
    if (left < seen).any():
        histogram = block_histogram(seen, block, left, block)
        first = np.array([trial.first_block for trial in run.trials])
        trial_of = np.searchsorted(first, np.unique(block), side="right")
        limits = (
            None
            if histogram.blocks < 2
            else bootstrap_limits(
                histogram,
                q,
                groups_of(trial_of),
                bound=0.0,
                alpha=(1.0 - _CONFIDENCE) / 2.0,
                draws=_DRAWS,
                rng=run.rng(3, run.arms.index(arm), ("ttft", "e2e").index(metric)),
            )
        )
        if limits is not None and limits.low is not None and limits.high is not None:
            # Stalls only add, so the share is never below 0.
            shares = (100.0 * max(0.0, 1.0 - math.exp(-limits.low)), 100.0 * max(0.0, 1.0 - math.exp(-limits.high)))
    return Counterfactual(
        without_ms=rest,
        low_ms=low,
        high_ms=high,
        explained_pct=explained,
        explained_low_pct=shares[0],
        explained_high_pct=shares[1],
    )
