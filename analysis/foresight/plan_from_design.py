"""How long a run must be, without a pilot: from its rate and design, and a model of servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.foresight.plan import Goal, Need, joined_plan, least_length, limits_for
from analysis.judging.planner import (
    LONGEST_S,
    MODEL_QUANTILES,
    MODEL_RATE,
    Noise,
    clean_requests,
    log_distance,
    model_noise,
    power_of_each,
    requests_for_share,
)
from analysis.records.tables import RecordError
from analysis.settings.gate_limits import GateLimits
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import TRIALS_FOR_T_TEST

DESIGNS = ("mirrored", "split", "switchback", "shadow", "separate")
ARRIVALS = ("steady", "wandering")
_MODEL_ERROR = 2.0  # real servers may have half or twice the model's spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A run that was not made yet. `rate` in requests/s to each arm; `searching`: the arm searches for kernels in each
    trial, and the control does not."""

    rate: float
    design: str = "mirrored"
    arrivals: str = "wandering"
    trials: int = 1
    searching: bool = False

    def __post_init__(self) -> None:
        if not 1e-6 <= self.rate <= 1e6:
            raise RecordError(f"--rate is {self.rate:g}: give requests/s to each arm above 0, from 1e-06 to 1e+06")
        if not 1 <= self.trials <= 1000:
            raise RecordError(f"--trials is {self.trials}: give 1 to 1000")


def plan_from_design(traffic: Traffic, goal: Goal, *, targets: Sequence[SloTarget] = ()) -> dict[str, Any]:
    """The plan as plain values, from the model of servers in `analysis.judging.planner`."""
    limits = limits_for(GateLimits(), goal)
    block_s = limits.block_s * (2 if traffic.design == "switchback" else 1)
    overhead_s = limits.cold_s * traffic.trials
    design = {"switchback": "separate", "shadow": "mirrored"}.get(traffic.design, traffic.design)
    if design == "mirrored" and traffic.arrivals == "steady":
        design = "mirrored, steady"
    rows = []
    for q in MODEL_QUANTILES:
        noise = model_noise(
            design,
            rate=traffic.rate,
            quantile=q,
            block_s=block_s,
            restart_spread=math.hypot(limits.restart_spread, limits.tuning_spread / math.sqrt(2.0) * traffic.searching),
            trials=traffic.trials,
        )
        if traffic.trials >= TRIALS_FOR_T_TEST:
            noise = replace(noise, degrees=traffic.trials - 1)
        rows.append(_of_noise(noise, q, traffic, goal, limits, block_s, overhead_s))
    rows.sort(key=lambda row: not row.gate)
    rows += [_of_target(target, f"slo {target.key}", traffic, goal, limits, block_s) for target in targets]
    errors = SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct)
    rows.append(_of_target(errors, "errors", traffic, goal, limits, block_s))
    least, note = least_length(limits, rate=traffic.rate, block_s=block_s)
    least = None if least is None else least + overhead_s
    rows.append(Need(arm="", what="blocks and tail", needed_s=least, note=note))
    pace = "wanders by 30 %" if traffic.arrivals == "wandering" else "is steady"
    assumed = [
        f"No pilot: spreads are those of made-up servers at 40 % load whose rate {pace}, "
        f"known to a factor of {_MODEL_ERROR:g}, so lengths to a factor of {_MODEL_ERROR**2:g}.",
        f"They were measured at {MODEL_RATE:g} requests/s over 20 minutes; four times as many requests halve them.",
        "Run 10 minutes as a pilot and plan again with `tailgate plan RUN_DIR`.",
    ]
    if traffic.trials >= TRIALS_FOR_T_TEST:
        assumed.insert(2, "How much starts differ is gates.restart_spread: only a pilot of several trials tells.")
    if traffic.design == "switchback":
        assumed.insert(1, "Switchback was not simulated: it is planned as separate hosts.")
    if traffic.design == "shadow":
        assumed.insert(1, "A shadow was not simulated: it is planned as mirrored, every request copied.")
    if not traffic.searching:
        assumed.append(
            "The arm searches for no kernels: for one that does, such as compiled-bucketed, give --searching."
        )
    return joined_plan(
        rows,
        goal,
        limits,
        source={
            "from": "model",
            "design": traffic.design,
            "arrivals": traffic.arrivals,
            "rate": traffic.rate,
            "trials": traffic.trials,
            "searching": traffic.searching,
        },
        trials=traffic.trials,
        block_s=block_s,
        assumed=assumed,
    )


def _of_noise(
    noise: Noise, quantile: float, traffic: Traffic, goal: Goal, limits: GateLimits, block_s: float, overhead_s: float
) -> Need:
    distance = log_distance(limits.margin, goal.ratio)
    gate = quantile in limits.quantiles
    power = power_of_each(limits, goal.power) if gate else goal.power
    noise = replace(noise, starts=noise.starts_for(distance, alpha=limits.alpha, power=power))
    blocks = noise.units_for(
        distance,
        alpha=limits.alpha,
        power=power,
        fewest=limits.min_blocks,
        most=int((LONGEST_S - overhead_s) / block_s),
    )
    margin = None
    if goal.duration_s is not None:
        units = (goal.duration_s - overhead_s) / block_s
        margin = noise.margin(units, alpha=limits.alpha, power=power, ratio=goal.ratio)
    seconds = None if blocks is None else blocks * block_s + overhead_s
    return Need(
        arm="",
        what=f"p{100 * quantile:.10g}",
        gate=gate,
        spread=noise.per_unit / math.sqrt(blocks) if blocks else None,
        needed_s=seconds,
        margin=margin,
        note=f"in {noise.starts} fresh starts (trials.count)" if noise.starts > traffic.trials else "",
    )


def _of_target(target: SloTarget, what: str, traffic: Traffic, goal: Goal, limits: GateLimits, block_s: float) -> Need:
    allowed = target.allowed_share
    if not 0 < allowed < 1:
        return Need(arm="", what=what, note="no run shows a share of 0 or 1")
    clean = clean_requests(allowed, alpha=limits.alpha)
    half = requests_for_share(allowed / 2, allowed, alpha=limits.alpha, power=goal.power) or clean
    seconds = math.ceil(max(half, clean) / traffic.rate / block_s - 1e-9) * block_s
    return Need(
        arm="",
        what=what,
        needed_s=seconds if seconds <= LONGEST_S else None,
        note=f"{clean:,} requests if none misses it, {half:,} if half as many do as may ({100 * allowed / 2:.3g} %)",
    )
