"""How long a run must be, before it is made: from a pilot run, or from rate and design alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.judging.checks.statistics import TAIL_REQUESTS
from analysis.judging.comparisons import blocks_at
from analysis.judging.gates import FAIL
from analysis.judging.judgement import judge
from analysis.judging.load_steps import is_search
from analysis.judging.planner import (
    LONGEST_S,
    MODEL_QUANTILES,
    MODEL_RATE,
    POWER,
    Noise,
    clean_requests,
    comparison_needed_s,
    decidable_margin,
    model_noise,
    requests_for_share,
    share_needed_s,
    starts_needed,
)
from analysis.judging.validity import LENGTH_CHECKS
from analysis.records.requests import RecordError, read_run
from analysis.run.run import Run
from analysis.run.slo import judge_share, units
from analysis.settings.gate_limits import GateLimits
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import METRIC_NAMES, TRIALS_FOR_T_TEST, Comparison

SCHEMA = 1
DESIGNS = ("mirrored", "split", "switchback", "separate")
ARRIVALS = ("steady", "wandering")
_MODEL_ERROR = 2.0  # real servers may have half or twice the model's spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the run is to decide. None takes the pilot's own setting, or the default of [gates].

    `ratio` is the true ratio to plan for: 1 is an arm as fast as the control. With `duration_s` (all trials together)
    the margins that such a run can decide are named as well.
    """

    margin: float | None = None
    power: float = POWER
    ratio: float = 1.0
    alpha: float | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 0.5 <= self.power <= 0.999:
            raise RecordError(f"--power is {self.power:g}: give a share from 0.5 to 0.999")
        if not 0.01 <= self.ratio <= 100:
            raise RecordError(f"--ratio is {self.ratio:g}: give a ratio from 0.01 to 100, such as 1 for no difference")
        if self.margin is not None and not 1e-4 <= self.margin <= 10:
            raise RecordError(
                f"--margin is {self.margin:g}: give a share above 0, from 0.0001 to 10, such as 0.1 for 10 %"
            )
        if self.alpha is not None and not 0.0001 <= self.alpha <= 0.5:
            raise RecordError(f"--alpha is {self.alpha:g}: give a probability from 0.0001 to 0.5")
        if self.duration_s is not None and not 1e-3 <= self.duration_s <= LONGEST_S:
            raise RecordError(f"--duration is {self.duration_s:g}: give seconds above 0, at most {LONGEST_S:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A run that was not made yet. `rate` in requests/s to each arm."""

    rate: float
    design: str = "mirrored"
    arrivals: str = "wandering"
    trials: int = 1

    def __post_init__(self) -> None:
        if not 1e-6 <= self.rate <= 1e6:
            raise RecordError(f"--rate is {self.rate:g}: give requests/s to each arm above 0, from 1e-06 to 1e+06")
        if not 1 <= self.trials <= 1000:
            raise RecordError(f"--trials is {self.trials}: give 1 to 1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one gate needs: seconds over all trials, None where no length of up to a week is enough.

    `needed_s` is for the true ratio that was planned for, `as_seen_s` for what the pilot saw. `margin` is the smallest
    that a run of the asked duration passes. What does not `gate` is there to be read.
    """

    arm: str
    what: str
    gate: bool = True
    seen: float | None = None
    spread: float | None = None
    needed_s: float | None = None
    as_seen_s: float | None = None
    margin: float | None = None
    note: str = ""


# --- From a pilot -----------------------------------------------------------------------------------------------------


def plan_from_run(directory: Path, goal: Goal) -> dict[str, Any]:
    """The plan as plain values, from the spread that the run in `directory` saw. RecordError where it shows none."""
    run = Run.of(read_run(directory))
    limits = _limits(run.limits, goal)
    run = replace(run, limits=limits)
    if is_search(run):
        raise RecordError(f"{directory} searched for the load that arms hold: plan from a run with one steady load")
    if not run.treatments:
        raise RecordError(f"{directory} holds one arm: a plan needs two arms to compare")
    judged = judge(run)
    rows = [_of_comparison(run, item, goal, gate=True) for item in judged.steady]
    rows += [_of_comparison(run, item, goal, gate=False) for item in judged.beside if item.phase == "steady"]
    order = {row: place for place, row in enumerate(dict.fromkeys(row.arm for row in rows))}
    rows.sort(key=lambda row: (not row.gate, order[row.arm]))
    for arm in run.treatments:
        for target in run.targets:
            rows.append(_of_share(run, arm, target, goal))
        errors = SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct)
        if all(target.quantile is not None for target in run.targets):
            rows.append(_of_share(run, arm, errors, goal))
        rows.append(_floor(run, arm))
    faults = [check for check in judged.checks if not check.ok and check.check not in LENGTH_CHECKS]
    return _plan(
        rows,
        goal,
        limits,
        source={
            "from": "pilot",
            "run_dir": str(directory),
            "design": run.design,
            "seconds": run.seconds,
            "trials": len(run.trials),
            "rate": {arm: run.rate(int((run.of_arm(arm) & run.usable).sum())) for arm in run.arms},
        },
        trials=len(run.trials),
        trial_s=run.seconds / len(run.trials) if len(run.trials) >= TRIALS_FOR_T_TEST else None,
        block_s=run.block_s,
        failed=[arm for arm, verdict in judged.verdicts.items() if verdict == FAIL],
        mend=list(dict.fromkeys(" ".join(filter(None, (check.reason, check.remedy))) for check in faults)),
    )


def _limits(limits: GateLimits, goal: Goal) -> GateLimits:
    if goal.margin is not None:
        limits = replace(limits, margin=goal.margin, margins={})
    return limits if goal.alpha is None else replace(limits, alpha=goal.alpha)


def _of_comparison(run: Run, item: Comparison, goal: Goal, *, gate: bool) -> Need:
    limits, overhead_s = run.limits, run.limits.cold_s * len(run.trials)

    def needed(ratio: float | None) -> float | None:
        return comparison_needed_s(
            item,
            block_s=run.block_s,
            min_blocks=limits.min_blocks,
            overhead_s=overhead_s,
            power=goal.power,
            ratio=ratio,
        )

    noise = Noise.of(item)
    margin = None
    if goal.duration_s is not None:
        margin = decidable_margin(
            item,
            seconds=goal.duration_s,
            block_s=run.block_s,
            overhead_s=overhead_s,
            power=goal.power,
            ratio=goal.ratio,
        )
    note = f"{item.obstacle}" if item.obstacle else ""
    if noise is not None and item.groups < 6:
        note = f"a guess: {item.groups} groups of blocks tell the spread"
    starts = starts_needed(item, power=goal.power, ratio=goal.ratio)
    if starts > item.trials:
        # Time cannot average out what every request of a start shares.
        note = "; ".join(filter(None, (note, f"in {starts} fresh starts (trials.count)")))
    return Need(
        arm=item.arm,
        what=f"p{100 * item.quantile:.10g} {METRIC_NAMES.get(item.metric, item.metric)}",
        gate=gate,
        seen=item.ratio,
        spread=item.spread,
        needed_s=None if item.obstacle and item.blocks != 1 else needed(goal.ratio),
        as_seen_s=needed(None),
        margin=margin,
        note=note,
    )


def _of_share(run: Run, arm: str, target: SloTarget, goal: Goal) -> Need:
    """What it takes to show that few enough requests miss the target, if as many do as in the pilot."""
    counted = units(run.requests, run.of_arm(arm) & run.usable, target)
    block = blocks_at(run, run.requests.trial[counted.row], counted.at_ns)
    result = judge_share(counted.missed, block, allowed=target.allowed_share, alpha=run.limits.alpha)
    needed = share_needed_s(
        result,
        requests_per_s=run.rate(len(counted.missed)),
        block_s=run.block_s,
        min_blocks=run.limits.min_blocks,
        alpha=run.limits.alpha,
        power=goal.power,
    )
    note = f"{result.missed} of {result.requests} missed it, {100 * result.allowed:.3g} % may"
    if result.requests and result.missed / result.requests > result.allowed:
        note += ": a run of this length would show a FAIL"
    return Need(
        arm=arm,
        what="errors" if target.quantile is None else f"slo {target.key}",
        seen=result.missed / result.requests if result.requests else None,
        needed_s=needed,
        as_seen_s=needed,
        note=note,
    )


def _floor(run: Run, arm: str) -> Need:
    """What every verdict needs, whatever the spread: blocks, and requests beyond the quantile."""
    limits = run.limits
    rate = run.rate(int((run.of_arm(arm) & run.usable).sum()))
    seconds, note = _least(limits, rate=rate, quantile=limits.quantile, block_s=run.block_s)
    seconds = None if seconds is None else seconds + limits.cold_s * len(run.trials)
    return Need(arm=arm, what="blocks and tail", needed_s=seconds, as_seen_s=seconds, note=note)


def _least(limits: GateLimits, *, rate: float, quantile: float, block_s: float) -> tuple[float | None, str]:
    note = f"{limits.min_blocks} blocks of {block_s:g} s, {TAIL_REQUESTS} requests beyond p{100 * quantile:.10g}"
    if rate <= 0:
        return None, note
    tail_s = TAIL_REQUESTS / (1.0 - quantile) / rate
    return max(limits.min_blocks, math.ceil(tail_s / block_s - 1e-9)) * block_s, note


# --- From rate and design ---------------------------------------------------------------------------------------------


def plan_from_design(traffic: Traffic, goal: Goal, *, targets: Sequence[SloTarget] = ()) -> dict[str, Any]:
    """The plan as plain values, from the model of servers in `analysis.judging.planner`."""
    limits = _limits(GateLimits(), goal)
    block_s = limits.block_s * (2 if traffic.design == "switchback" else 1)
    overhead_s = limits.cold_s * traffic.trials
    design = {"switchback": "separate"}.get(traffic.design, traffic.design)
    if design == "mirrored" and traffic.arrivals == "steady":
        design = "mirrored, steady"
    rows = []
    for q in MODEL_QUANTILES:
        noise = model_noise(design, rate=traffic.rate, quantile=q, block_s=block_s)
        if traffic.trials >= TRIALS_FOR_T_TEST:
            noise = replace(noise, degrees=traffic.trials - 1)
        rows.append(_of_noise(noise, q, traffic, goal, limits, block_s, overhead_s))
    rows.sort(key=lambda row: not row.gate)
    for target in targets:
        rows.append(_of_target(target, f"slo {target.key}", traffic, goal, limits, block_s))
    errors = SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct)
    rows.append(_of_target(errors, "errors", traffic, goal, limits, block_s))
    least, note = _least(limits, rate=traffic.rate, quantile=limits.quantile, block_s=block_s)
    least = None if least is None else least + overhead_s
    rows.append(Need(arm="", what="blocks and tail", needed_s=least, note=note))
    pace = "wanders by 30 %" if traffic.arrivals == "wandering" else "is steady"
    assumed = [
        f"No pilot: spreads are those of made-up servers at 40 % load whose rate {pace}, "
        f"known to a factor of {_MODEL_ERROR:g}, so lengths to a factor of {_MODEL_ERROR**2:g}.",
        f"They were measured at {MODEL_RATE:g} requests/s over 20 minutes; more requests shrink four fifths of the "
        "variance, and only time the rest.",
        "Run 10 minutes as a pilot and plan again with `tailgate plan RUN_DIR`.",
    ]
    if traffic.trials >= TRIALS_FOR_T_TEST:
        assumed.insert(2, "Restarts are taken to add nothing to the spread: only a pilot of several trials tells.")
    if traffic.design == "switchback":
        assumed.insert(1, "Switchback was not simulated: it is planned as separate hosts.")
    return _plan(
        rows,
        goal,
        limits,
        source={
            "from": "model",
            "design": traffic.design,
            "arrivals": traffic.arrivals,
            "rate": traffic.rate,
            "trials": traffic.trials,
        },
        trials=traffic.trials,
        block_s=block_s,
        assumed=assumed,
    )


def _of_noise(
    noise: Noise,
    quantile: float,
    traffic: Traffic,
    goal: Goal,
    limits: GateLimits,
    block_s: float,
    overhead_s: float,
) -> Need:
    distance = abs(math.log1p(limits.margin) - math.log(goal.ratio))
    blocks = noise.units_for(
        distance,
        alpha=limits.alpha,
        power=goal.power,
        fewest=limits.min_blocks,
        most=int((LONGEST_S - overhead_s) / block_s),
    )
    margin = None
    if goal.duration_s is not None:
        units_then = int((goal.duration_s - overhead_s) / block_s + 1e-9)
        if units_then >= 2:
            reach = noise.reach(units_then, alpha=limits.alpha, power=goal.power)
            margin = goal.ratio * math.exp(reach) - 1.0
    seconds = None if blocks is None else blocks * block_s + overhead_s
    return Need(
        arm="",
        what=f"p{100 * quantile:.10g}",
        gate=quantile in limits.quantiles,
        spread=noise.per_unit / math.sqrt(blocks) if blocks else None,
        needed_s=seconds,
        margin=margin,
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


# --- The whole --------------------------------------------------------------------------------------------------------


def _plan(
    rows: Sequence[Need],
    goal: Goal,
    limits: GateLimits,
    *,
    source: Mapping[str, Any],
    trials: int,
    block_s: float,
    trial_s: float | None = None,
    failed: Sequence[str] = (),
    mend: Sequence[str] = (),
    assumed: Sequence[str] = (),
) -> dict[str, Any]:
    gating = [row for row in rows if row.gate]
    # What else is open on an arm that has failed decides nothing more.
    gating = [row for row in gating if row.arm not in failed] or gating
    stuck = [row for row in gating if row.needed_s is None]
    longest = max(gating, key=lambda row: row.needed_s or 0.0)
    needed_s = None if stuck else longest.needed_s
    if needed_s is not None and trial_s is not None:
        # Trials are the unit: more of them, as long as they were.
        trials = max(trials, math.ceil(needed_s / trial_s - 0.01))
    elif needed_s is not None:
        trial_s = math.ceil(needed_s / trials / block_s - 1e-9) * block_s
    said = list(assumed)
    if failed:
        said.append(f"{', '.join(failed)} failed in the pilot: no length clears that, and its rows do not count.")
    compared = sum(row.spread is not None for row in gating)
    if compared > 1:
        said.append(
            f"The power is that of each gate by itself; all {compared} comparisons pass together with at least "
            f"{100 * max(0.0, 1 - compared * (1 - goal.power)):.0f} %, and more where they move together."
        )
    if trials < TRIALS_FOR_T_TEST:
        said.append(
            "Blocks of one start say nothing of how starts differ: from "
            f"{TRIALS_FOR_T_TEST} trials on, trials are the unit. `tailgate calibrate` measures it."
        )
    return {
        "schema": SCHEMA,
        "source": dict(source),
        "wanted": {
            "margin": limits.margin,
            "power": goal.power,
            "alpha": limits.alpha,
            "ratio": goal.ratio,
            "duration_s": goal.duration_s,
        },
        "needed_s": needed_s,
        "decided_by": " ".join(filter(None, (longest.arm, longest.what))) if needed_s is not None else None,
        "out_of_reach": [" ".join(filter(None, (row.arm, row.what))) for row in stuck],
        "trials": trials,
        "trial_s": None if needed_s is None else trial_s,
        "rows": [_row(row) for row in rows],
        "mend_first": list(mend),
        "assumed": said,
    }


def _row(row: Need) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in values.items()}
