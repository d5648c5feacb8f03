"""How much equal arms may differ by start-to-start variance, which no single run shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.records.plain_values import mapping
from analysis.run.run import Run

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
