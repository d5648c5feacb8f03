"""`tailgate plan`: how long a run must be to decide its gates, from what a pilot saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    POWER,
    TAIL_REQUESTS,
    comparison_needed,
    least_length_s,
    power_of_each,
)
from analysis.wording import counted

SCHEMA = 1
_FEWEST_GROUPS = 6  # that tell a spread and are no guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one gate needs: seconds over all trials, None where no length of up to a week is enough."""

    arm: str
    what: str
    seen: float | None = None
    spread: float | None = None
    needed_s: float | None = None
    note: str = ""


def plan_of(directory: Path, *, margin: float | None = None, ratio: float = 1.0) -> dict[str, Any]:
    """Plan from the spread that the run in `directory` saw, for a true `ratio`; return plain values.

    `margin` is by default the pilot's. RecordError where the run shows no spread.
    """
    run = with_lengths(Run.of(read_run(directory)))
    if margin is not None:
        run = replace(run, limits=run.limits.model_copy(update={"margin": margin, "margins": {}}))
    if is_search(run):
        raise RecordError(f"{directory} searched for the load that arms hold: plan from a run with one steady load")
    if not run.treatments:
        raise RecordError(f"{directory} holds one arm: a plan needs two arms to compare")
    judged, trials, limits = judge(run), len(run.trials), run.limits
    rows = [_comparison_need(run, item, ratio) for item in judged.compared.gated]
    targets = list(run.targets)
    if all(target.quantile is not None for target in targets):
        targets.append(SloTarget(key="error_pct", metric="error", quantile=None, limit=limits.max_error_pct))
    for arm in run.treatments:
        rate = run.rate(int((run.of_arm(arm) & run.usable).sum()))
        rows += [_share_need(run, arm, target) for target in targets]
        rows.append(_least_need(limits, arm, rate=rate, block_s=run.block_s, trials=trials))
    failed = [arm for arm, verdict in judged.verdicts.items() if verdict == FAIL]
    notes = [
        f"Mend first: {check.reason} {check.remedy}".rstrip()
        for check in faults_to_fix(judged.checks, judged.gates, trials)
    ]
    if failed:
        notes.append(f"{', '.join(failed)} failed in the pilot: no length clears that, and its rows do not count.")
    if any(item.machine_spread > 0 for item in judged.compared.gated):
        notes.append("Only more machines average out what differs between machines: more trials on the same do not.")
    deciding = [row for row in rows if row.arm not in failed] or rows
    trial_s = run.seconds / trials if trials >= TRIALS_FOR_T_TEST else None
    return {
        "schema": SCHEMA,
        "source": {"run_dir": str(directory), "design": run.design, "seconds": run.seconds, "trials": trials},
        "wanted": {"margin": limits.margin, "ratio": ratio, "power": POWER, "alpha": limits.alpha},
        **_length_of(deciding, block_s=run.block_s, trials=trials, trial_s=trial_s),
        "rows": [asdict(row) for row in rows],
        "notes": list(dict.fromkeys(notes)),
    }


def _comparison_need(run: Run, item: Comparison, ratio: float) -> Need:
    limits = run.limits
    needed_s, starts = comparison_needed(
        item,
        block_s=run.block_s,
        min_blocks=limits.min_blocks,
        overhead_s=limits.cold_s * len(run.trials),
        power=power_of_each(limits),
        ratio=ratio,
    )
    notes = [item.obstacle] if item.obstacle else []
    if item.spread is not None and item.groups < _FEWEST_GROUPS:
        notes.append(f"a guess: {counted(item.groups, 'group')} of blocks tell the spread")
    if needed_s is not None and starts > item.trials:
        notes.append(f"in {starts} fresh starts (trials.count)")  # which time cannot average out
    return Need(
        arm=item.arm,
        what=quantile_label(item.metric, item.quantile),
        seen=item.ratio,
        spread=item.spread,
        needed_s=needed_s,
        note="; ".join(notes),
    )


def _share_need(run: Run, arm: str, target: SloTarget) -> Need:
    """What it takes to show that few enough requests miss the target, if as many do as in the pilot."""
    own = units(run.requests, held_to(run, arm), target)
    result, needed_s = share_of(run, arm, own, target.allowed_share)
    seen = result.missed / result.requests if result.requests else None
    note = f"{result.missed} of {result.requests} missed it, {100 * result.allowed:.3g} % may"
    if seen is not None and seen > result.allowed:
        note += ": a run of this length would show a FAIL"
    return Need(
        arm=arm,
        what="errors" if target.quantile is None else f"slo {target.key}",
        seen=seen,
        needed_s=needed_s,
        note=note,
    )


def _least_need(limits: GateLimits, arm: str, *, rate: float, block_s: float, trials: int) -> Need:
    """What every verdict needs, whatever the spread: blocks, and requests beyond the quantile."""
    seconds = least_length_s(limits, rate=rate, block_s=block_s) + limits.cold_s * trials if rate > 0 else None
    note = f"{limits.min_blocks} blocks of {block_s:g} s, {TAIL_REQUESTS} requests beyond p{100 * limits.quantile:.10g}"
    return Need(arm=arm, what="blocks and tail", needed_s=seconds, note=note)


def _length_of(rows: Sequence[Need], *, block_s: float, trials: int, trial_s: float | None) -> dict[str, Any]:
    """What the rows need together. From six trials on, they are the unit: of length `trial_s`, and more are added."""
    stuck = [row for row in rows if row.needed_s is None]
    longest = max(rows, key=lambda row: row.needed_s or 0.0)
    needed_s = None if stuck else longest.needed_s
    if needed_s is not None and trial_s is not None:
        trials = max(trials, math.ceil(needed_s / trial_s - 0.01))
    elif needed_s is not None:
        trial_s = math.ceil(needed_s / trials / block_s - 1e-9) * block_s
    return {
        "needed_s": needed_s,
        "decided_by": f"{longest.arm} {longest.what}".lstrip() if needed_s is not None else None,
        "out_of_reach": [f"{row.arm} {row.what}".lstrip() for row in stuck],
        "trials": trials,
        "trial_s": None if needed_s is None else trial_s,
    }
