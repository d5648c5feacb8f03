"""How long a run must be: from the spread that a pilot saw, or from rate and design and a model of servers.

Both follow the rules of the gates' own advice (`analysis.statistics.planning`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.checks.applied import faults_to_fix
from analysis.judging.gates import FAIL
from analysis.judging.gates.objectives import held_to, share_of
from analysis.judging.judgement import judge
from analysis.judging.load_steps import is_search
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.client_stalls import with_lengths
from analysis.run.run import Run
from analysis.run.slo import units
from analysis.settings.gate_limits import GateLimits
from analysis.settings.metrics import quantile_label
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison
from analysis.statistics.planning import (
    LONGEST_S,
    MODEL_SPREADS,
    POWER,
    TAIL_REQUESTS,
    clean_requests,
    comparison_needed_s,
    least_length_s,
    log_distance,
    model_noise,
    power_of_each,
    requests_for_share,
    starts_needed,
)
from analysis.wording import counted

SCHEMA = 1
DESIGNS = tuple(MODEL_SPREADS)
_FEWEST_GROUPS = 6  # that tell a spread and are no guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the run is to decide. Without a `margin`, that of the pilot or the default of [gates].

    `ratio` is the true ratio to plan for: 1 is an arm as fast as the control.
    """

    margin: float | None = None
    ratio: float = 1.0

    def __post_init__(self) -> None:
        for flag, value, low, high, remedy in (
            ("--ratio", self.ratio, 0.01, 100.0, "a ratio from 0.01 to 100, such as 1 for no difference"),
            ("--margin", self.margin, 1e-4, 10.0, "a share above 0, from 0.0001 to 10, such as 0.1 for 10 %"),
        ):
            if value is not None and not low <= value <= high:
                raise RecordError(f"{flag} is {value:g}: give {remedy}")

    def limits_of(self, limits: GateLimits) -> GateLimits:
        """Return `limits` with the goal's margin."""
        return limits if self.margin is None else limits.model_copy(update={"margin": self.margin, "margins": {}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A run that was not made yet.

    `rate` is in requests/s to each arm. `searching`: the arm searches for kernels at each start, and the control does
    not.
    """

    rate: float
    design: str = "mirrored"
    searching: bool = False

    def __post_init__(self) -> None:
        if not 1e-6 <= self.rate <= 1e6:
            raise RecordError(f"--rate is {self.rate:g}: give requests/s to each arm above 0, from 1e-06 to 1e+06")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one gate needs: seconds over all trials, None where no length of up to a week is enough."""

    arm: str = ""
    what: str
    seen: float | None = None
    spread: float | None = None
    needed_s: float | None = None
    note: str = ""


def plan_from_run(directory: Path, goal: Goal) -> dict[str, Any]:
    """Plan from the spread that the run in `directory` saw; return plain values. RecordError where it shows none."""
    run = with_lengths(Run.of(read_run(directory)))
    limits = goal.limits_of(run.limits)
    run = replace(run, limits=limits)
    if is_search(run):
        raise RecordError(f"{directory} searched for the load that arms hold: plan from a run with one steady load")
    if not run.treatments:
        raise RecordError(f"{directory} holds one arm: a plan needs two arms to compare")
    judged, trials = judge(run), len(run.trials)
    rows = [_comparison_need(run, item, goal) for item in judged.steady]
    targets = list(run.targets)
    if all(target.quantile is not None for target in targets):
        targets.append(_error_target(limits))
    for arm in run.treatments:
        rate = run.rate(int((run.of_arm(arm) & run.usable).sum()))
        rows += [_share_need(run, arm, target) for target in targets]
        rows.append(_least_need(limits, arm=arm, rate=rate, block_s=run.block_s, trials=trials))
    faults = faults_to_fix(judged.checks, judged.gates, trials)
    notes = []
    failed = [arm for arm, verdict in judged.verdicts.items() if verdict == FAIL]
    if failed:
        notes.append(f"{', '.join(failed)} failed in the pilot: no length clears that, and its rows do not count.")
    if any(item.machine_spread > 0 for item in judged.steady):
        notes.append("Only more machines average out what differs between machines: more trials on the same do not.")
    source = {"from": "pilot", "run_dir": str(directory), "design": run.design, "seconds": run.seconds}
    return _plan(
        rows,
        goal,
        limits,
        source={**source, "trials": trials},
        trials=trials,
        trial_s=run.seconds / trials if trials >= TRIALS_FOR_T_TEST else None,
        block_s=run.block_s,
        failed=failed,
        mend=list(dict.fromkeys(" ".join(filter(None, (check.reason, check.remedy))) for check in faults)),
        notes=notes,
    )


def plan_from_design(traffic: Traffic, goal: Goal, *, targets: Sequence[SloTarget] = ()) -> dict[str, Any]:
    """Plan without a pilot, from the model of servers; return plain values."""
    limits = goal.limits_of(GateLimits())
    # A block of switchback holds one turn of each arm.
    block_s = limits.block_s * (2 if traffic.design == "switchback" else 1)
    rows = [
        _model_need(traffic, goal, limits, block_s),
        *(_target_need(target, traffic, limits, block_s) for target in (*targets, _error_target(limits))),
        _least_need(limits, rate=traffic.rate, block_s=block_s, trials=1),
    ]
    notes = [
        "No pilot: the spread is that of simulated servers at 40 % load, known to a factor of 2, so lengths to a "
        "factor of 4. Run 10 minutes as a pilot and plan again with `tailgate plan RUN_DIR`.",
    ]
    if not traffic.searching:
        notes.append("The arm searches for no kernels: for one that does, such as compiled-bucketed, give --searching.")
    return _plan(rows, goal, limits, source={"from": "model", **asdict(traffic)}, block_s=block_s, notes=notes)


def _comparison_need(run: Run, item: Comparison, goal: Goal) -> Need:
    limits, overhead_s = run.limits, run.limits.cold_s * len(run.trials)
    power = power_of_each(limits)
    notes = [item.obstacle] if item.obstacle else []
    if item.spread is not None and item.groups < _FEWEST_GROUPS:
        notes.append(f"a guess: {counted(item.groups, 'group')} of blocks tell the spread")
    needed_s = comparison_needed_s(
        item,
        block_s=run.block_s,
        min_blocks=limits.min_blocks,
        overhead_s=overhead_s,
        power=power,
        ratio=goal.ratio,
    )
    starts = starts_needed(item, power=power, ratio=goal.ratio)
    if needed_s is not None and starts > item.trials:
        notes.append(_starts_text(starts))
    return Need(
        arm=item.arm,
        what=quantile_label(item.metric, item.quantile),
        seen=item.ratio,
        spread=item.spread,
        needed_s=needed_s,
        note="; ".join(notes),
    )


def _model_need(traffic: Traffic, goal: Goal, limits: GateLimits, block_s: float) -> Need:
    noise = model_noise(
        traffic.design,
        rate=traffic.rate,
        block_s=block_s,
        overhead_s=limits.cold_s,
        restart_spread=math.hypot(limits.restart_spread, limits.tuning_spread / math.sqrt(2.0) * traffic.searching),
    )
    distance, power = log_distance(limits.margin, goal.ratio), power_of_each(limits)
    least_s = limits.min_blocks * block_s + noise.lost_s
    starts = noise.starts_for(distance, alpha=limits.alpha, power=power)
    return Need(
        what=f"p{100 * limits.quantile:.10g}",
        needed_s=noise.length_s(distance, alpha=limits.alpha, power=power, least_s=least_s),
        note=_starts_text(starts) if starts > 1 else "",
    )


def _starts_text(starts: int) -> str:
    """Time cannot average out what every request of a start shares."""
    return f"in {starts} fresh starts (trials.count)"


def _error_target(limits: GateLimits) -> SloTarget:
    return SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct)


def _share_label(target: SloTarget) -> str:
    return "errors" if target.quantile is None else f"slo {target.key}"


def _share_need(run: Run, arm: str, target: SloTarget) -> Need:
    """What it takes to show that few enough requests miss the target, if as many do as in the pilot."""
    own = units(run.requests, held_to(run, arm), target)
    result, needed_s = share_of(run, arm, own, target.allowed_share)
    seen = result.missed / result.requests if result.requests else None
    note = f"{result.missed} of {result.requests} missed it, {100 * result.allowed:.3g} % may"
    if seen is not None and seen > result.allowed:
        note += ": a run of this length would show a FAIL"
    return Need(arm=arm, what=_share_label(target), seen=seen, needed_s=needed_s, note=note)


def _target_need(target: SloTarget, traffic: Traffic, limits: GateLimits, block_s: float) -> Need:
    """What it takes if half as many requests miss the target as may."""
    allowed = target.allowed_share
    if not 0 < allowed < 1:
        return Need(what=_share_label(target), note="no run shows a share of 0 or 1")
    clean = clean_requests(allowed, alpha=limits.alpha)
    half = requests_for_share(allowed / 2, allowed, alpha=limits.alpha, power=POWER) or clean
    seconds = math.ceil(max(half, clean) / traffic.rate / block_s - 1e-9) * block_s
    return Need(
        what=_share_label(target),
        needed_s=seconds if seconds <= LONGEST_S else None,
        note=f"{clean:,} requests if none misses it, {half:,} if half as many do as may ({100 * allowed / 2:.3g} %)",
    )


def _least_need(limits: GateLimits, *, rate: float, block_s: float, trials: int, arm: str = "") -> Need:
    """What every verdict needs, whatever the spread: blocks, and requests beyond the quantile."""
    seconds = least_length_s(limits, rate=rate, block_s=block_s) + limits.cold_s * trials if rate > 0 else None
    note = f"{limits.min_blocks} blocks of {block_s:g} s, {TAIL_REQUESTS} requests beyond p{100 * limits.quantile:.10g}"
    return Need(arm=arm, what="blocks and tail", needed_s=seconds, note=note)


def _plan(
    rows: Sequence[Need],
    goal: Goal,
    limits: GateLimits,
    *,
    source: Mapping[str, Any],
    block_s: float,
    notes: Sequence[str],
    trials: int = 1,
    trial_s: float | None = None,
    failed: Sequence[str] = (),
    mend: Sequence[str] = (),
) -> dict[str, Any]:
    """Say what `rows` need together, and what no length mends. Rows of arms that `failed` decide nothing more.

    From six trials on, they are the unit: `trial_s` is their length, and the plan adds more of them.
    """
    counting = [row for row in rows if row.arm not in failed] or rows
    stuck = [row for row in counting if row.needed_s is None]
    longest = max(counting, key=lambda row: row.needed_s or 0.0)
    needed_s = None if stuck else longest.needed_s
    if needed_s is not None and trial_s is not None:
        trials = max(trials, math.ceil(needed_s / trial_s - 0.01))
    elif needed_s is not None:
        trial_s = math.ceil(needed_s / trials / block_s - 1e-9) * block_s
    if trials < TRIALS_FOR_T_TEST:
        short = f"from {TRIALS_FOR_T_TEST} trials on, trials are the unit."
        notes = [*notes, f"Blocks of one start say nothing of how starts differ: {short}"]
    return {
        "schema": SCHEMA,
        "source": dict(source),
        "wanted": {**asdict(goal), "margin": limits.margin, "power": POWER, "alpha": limits.alpha},
        "needed_s": needed_s,
        "decided_by": f"{longest.arm} {longest.what}".lstrip() if needed_s is not None else None,
        "out_of_reach": [f"{row.arm} {row.what}".lstrip() for row in stuck],
        "trials": trials,
        "trial_s": None if needed_s is None else trial_s,
        "rows": [asdict(row) for row in rows],
        "mend_first": list(mend),
        "notes": list(notes),
    }
