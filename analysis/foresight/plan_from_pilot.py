"""How long a run must be, from the spread that a pilot run saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.foresight.plan import Goal, Need, joined_plan, least_length, limits_for
from analysis.judging.gates import FAIL
from analysis.judging.judgement import judge
from analysis.judging.load_steps import is_search
from analysis.judging.planner import Noise, comparison_needed_s, decidable_margin, starts_needed
from analysis.judging.run_gates import judge_target
from analysis.judging.validity import faults_to_mend
from analysis.nouns import counted
from analysis.records.run_records import read_run
from analysis.records.tables import RecordError
from analysis.run.logged_compiles import with_lengths
from analysis.run.run import Run
from analysis.settings.metrics import quantile_label
from analysis.settings.slo_targets import SloTarget
from analysis.statistics.compare import TRIALS_FOR_T_TEST, Comparison

_MORE_MACHINES = (
    "Only more machines average out what differs between machines, and not more trials on those of the pilot."
)


def plan_from_run(directory: Path, goal: Goal) -> dict[str, Any]:
    """The plan as plain values, from the spread that the run in `directory` saw. RecordError where it shows none."""
    run = with_lengths(Run.of(read_run(directory)))
    limits = limits_for(run.limits, goal)
    run = replace(run, limits=limits)
    if is_search(run):
        raise RecordError(f"{directory} searched for the load that arms hold: plan from a run with one steady load")
    if not run.treatments:
        raise RecordError(f"{directory} holds one arm: a plan needs two arms to compare")
    judged = judge(run)
    rows = [_of_comparison(run, item, goal, gate=True) for item in judged.steady]
    # What is no gate is planned as if it were one of them.
    tests = max((item.tests for item in judged.steady), default=1)
    beside = [replace(item, tests=tests) for item in judged.beside if item.phase == "steady"]
    rows += [_of_comparison(run, item, goal, gate=False) for item in beside]
    order = {row: place for place, row in enumerate(dict.fromkeys(row.arm for row in rows))}
    rows.sort(key=lambda row: (not row.gate, order[row.arm]))
    targets = list(run.targets)
    if all(target.quantile is not None for target in targets):
        targets.append(SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct))
    for arm in run.treatments:
        rows += [*(_of_share(run, arm, target, goal) for target in targets), _floor(run, arm)]
    faults = faults_to_mend(judged.checks, judged.gates, len(run.trials))
    return joined_plan(
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
        assumed=[_MORE_MACHINES] if any(item.machine_spread > 0 for item in judged.steady) else [],
    )


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
    note = item.obstacle or ""
    if Noise.of(item) is not None and item.groups < 6:
        note = f"a guess: {counted(item.groups, 'group')} of blocks tell the spread"
    needed_s = None if item.obstacle and item.needed_blocks is None else needed(goal.ratio)
    starts = starts_needed(item, power=goal.power, ratio=goal.ratio)
    if needed_s is not None and starts > item.trials:
        # Time cannot average out what every request of a start shares.
        note = "; ".join(filter(None, (note, f"in {starts} fresh starts (trials.count)")))
    return Need(
        arm=item.arm,
        what=quantile_label(item.metric, item.quantile),
        gate=gate,
        seen=item.ratio,
        spread=item.spread,
        needed_s=needed_s,
        as_seen_s=needed(None),
        margin=margin,
        note=note,
    )


def _of_share(run: Run, arm: str, target: SloTarget, goal: Goal) -> Need:
    """What it takes to show that few enough requests miss the target, if as many do as in the pilot."""
    result, needed = judge_target(run, arm, target, power=goal.power)
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
    seconds, note = least_length(limits, rate=rate, block_s=run.block_s)
    seconds = None if seconds is None else seconds + limits.cold_s * len(run.trials)
    return Need(arm=arm, what="blocks and tail", needed_s=seconds, as_seen_s=seconds, note=note)
