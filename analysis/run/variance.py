"""How much equal arms may differ: by start-to-start variance, which no single run shows, and by one trial's traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.arrays import Bools, Floats, Ints
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.statistics.dependence import cosine_variance
from analysis.statistics.distributions import normal_quantile
from analysis.statistics.quantiles import ordered_interval
from analysis.statistics.unpaired import Luck

_FEWEST_BLOCKS = 2  # one block cannot show how much blocks differ
_CONFIDENCE = 0.95
_REACH = float(normal_quantile(0.5 + _CONFIDENCE / 2.0))

# Of torch.compile and inductor: what has many kernels timed and the quickest kept. Which one that is differs from one
# compile to the next.
_SEARCHING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
_SEARCHING_OPTIONS = ("coordinate_descent_tuning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")


def start_spread(run: Run, arm: str) -> float:
    """The standard deviation of log latency over starts that is taken for granted of the arm and of the control, as
    one figure for both: `gates.restart_spread`, and `gates.tuning_spread` beside it where kernels were searched for.

    Trials that found the code of one search share its variance: it does not fade with their number.
    """
    variances = []
    for name in (arm, run.control):
        searches = searching_starts(run, name)
        shared = len(run.trials_of(name)) / searches if searches else 0.0
        variances.append(run.limits.restart_spread**2 + shared * run.limits.tuning_spread**2)
    return math.sqrt(sum(variances) / 2)


def searching_starts(run: Run, arm: str) -> int:
    """In how many trials the arm searched for kernels before it served: its policy asks for it, and tuning was seen.

    An arm that starts with an artifact does not: its kernels are those that are shipped.
    """
    if not searches_kernels(run.account(arm).config):
        return 0
    own = (event for event in run.events if event.arm == arm and not event.serving)
    return len({event.trial for event in own if event.kind == "autotune"})


def searches_kernels(config: Mapping[str, Any]) -> bool:
    """Whether an arm so configured searches for kernels where its device has any to choose from."""
    policy = mapping(config.get("compile"))
    options = mapping(policy.get("options"))
    asked = policy.get("mode") in _SEARCHING_MODES or any(options.get(name) for name in _SEARCHING_OPTIONS)
    return bool(policy.get("enabled") and asked and not policy.get("artifact"))


def quantile_error(values: Floats, block: Ints, q: float, value: float) -> Luck:
    """The standard error of the log quantile `value` of one trial, from an interval of order statistics that allows for
    bunching."""
    bunching = _bunching(values > value, block)
    if bunching is None:
        return Luck(spread=None)
    effect, degrees = bunching
    low, high = ordered_interval(np.sort(values), q, confidence=_CONFIDENCE, design_effect=effect)
    if math.isnan(low) or math.isnan(high) or low <= 0:
        return Luck(spread=None)
    return Luck(spread=math.log(high / low) / (2.0 * _REACH), degrees=degrees)


def share_error(hits: Bools, block: Ints) -> Luck:
    """The standard error of the log share of hits in one trial; where all or none are, as if half a request more were
    not."""
    bunching = _bunching(~hits, block)
    if bunching is None:
        return Luck(spread=None)
    effect, degrees = bunching
    share = (float(hits.sum()) + 0.5) / (len(hits) + 1.0)
    return Luck(spread=math.sqrt(effect * (1.0 - share) / (share * len(hits))), degrees=degrees)


def _bunching(missed: Bools, block: Ints) -> tuple[float, float] | None:
    """How many times more the count of misses varies than with independent requests, 1 at least, and the degrees of
    freedom of that; None of one block.

    By the slowest cosines of the series of blocks [1], not by the blocks as if each were by itself: nothing is paired
    here that would take away what neighbours share, and queues outlast blocks.

    References
    ----------
    [1] Lazarus, E., Lewis, D. J., Stock, J. H. and Watson, M. W. (2018). HAR inference: recommendations for practice.
        Journal of Business and Economic Statistics 36(4), 541-559: .4 n^(2/3) cosines.
    """
    _, place = np.unique(block, return_inverse=True)
    blocks = int(place.max()) + 1 if place.size else 0
    if blocks < _FEWEST_BLOCKS:
        return None
    cosines = min(max(2, round(0.4 * blocks ** (2.0 / 3.0))), blocks - 1)
    share = float(missed.mean())
    independent = missed.size * share * (1.0 - share)
    if independent <= 0.0:
        return 1.0, float(cosines)
    beyond = np.bincount(place[missed], minlength=blocks) - share * np.bincount(place)
    return max(1.0, blocks * cosine_variance(beyond, cosines) / independent), float(cosines)
