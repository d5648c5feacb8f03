"""How much equal arms may differ by luck: by that of a start, before any were compared, and by that of one trial's
traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from analysis.arrays import Floats, Ints
from analysis.records.plain_values import mapping
from analysis.run.run import Run
from analysis.run.slo import design_effect
from analysis.statistics.quantiles import ordered_interval
from analysis.statistics.unpaired import Luck

FEWEST_BLOCKS = 2  # one block cannot show how much blocks differ
_CONFIDENCE = 0.95
_REACH = float(stats.norm.ppf(0.5 + _CONFIDENCE / 2.0))

# Of torch.compile and inductor: what has many kernels timed and the quickest kept. Which one that is differs from one
# compile to the next.
_SEARCHING_MODES = ("max-autotune", "max-autotune-no-cudagraphs")
_SEARCHING_OPTIONS = ("coordinate_descent_tuning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise")


def start_spread(run: Run, arm: str) -> float:
    """The standard deviation of log latency over starts that is taken for granted of the arm and of the control, as
    one figure for both: `gates.restart_spread`, and `gates.tuning_spread` beside it where kernels were searched for.

    Trials that found the code of one search share its luck: it does not fade with their number.
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


def luck_of_quantile(values: Floats, block: Ints, q: float, value: float) -> Luck:
    """The standard error of the log quantile `value` of one trial, from an interval of order statistics that allows for
    bunching."""
    blocks = len(np.unique(block))
    if blocks < FEWEST_BLOCKS:
        return Luck(spread=None)
    effect = design_effect(values > value, block)
    low, high = ordered_interval(np.sort(values), q, confidence=_CONFIDENCE, design_effect=effect)
    if math.isnan(low) or math.isnan(high) or low <= 0:
        return Luck(spread=None)
    return Luck(spread=math.log(high / low) / (2.0 * _REACH), degrees=blocks - 1.0)
