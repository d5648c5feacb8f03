"""How the evidence on each gate grew, and when it decided, in runs with interim analyses.

A path errs with a chance of alpha at most over all analyses together. A FAIL is final; a PASS stands unless later
evidence contradicts it, and only while one analysis of all data passes at twice alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tailgate.analysis.arrays import Bools, Floats, Ints
from tailgate.analysis.records.plain_values import number, table
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.slo import ShareResult, Units
from tailgate.analysis.run.startup import start_spread
from tailgate.analysis.settings.gate_limits import MIN_BLOCKS
from tailgate.analysis.statistics.compare import Comparison, Sample, description, limits_text, seen_text
from tailgate.analysis.statistics.planning import least_share, shortest_trial_s
from tailgate.analysis.statistics.sequential import (
    FEWEST_GROUPS,
    SEGMENTS,
    SEPARATION,
    Evidence,
    Exchange,
    Outcome,
    groups_for,
)
from tailgate.analysis.statistics.share_evidence import (
    BLOCKS_FOR_PASS,
    FEWEST_BLOCKS,
    share_evidence,
    share_limits,
    tail_effects,
)
from tailgate.analysis.wording import counted, enough, fixed

GROUP_BLOCKS = 2
# Of 800 runs at the margin in jams, 7.3 % pass at twice alpha and 6.0 % at alpha, which takes equal arms 10 % longer.
AGREEING = 2.0
_STARTS = 1.645  # standard deviations

Decided = tuple[Outcome, float]
"""What was decided, after how many seconds of judged traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One gate after all groups of blocks so far: its value (shares in percent), and the evidence of harm and of safety
    as decimal logarithms of e-values. None where there is no group, or no number."""

    value: float | None
    limit: float  # of the value
    harm: float | None
    safety: float | None
    needed: float  # of evidence of harm, as a decimal logarithm
    needed_safety: float
    outcome: Outcome | None
    decided_s: float | None  # after how many seconds of judged traffic
    outlook_s: float | None  # that would decide it at its recent pace: 0 if it is decided, None if none would


def with_evidence(
    run: Run, item: Comparison, samples: tuple[Sample, Sample], *, gates: int, sooner: bool = True
) -> tuple[Comparison, Path]:
    """Return the comparison as the evidence decides it, one of `gates` gates of which any may fail by chance.

    `samples` are by segments, `SEGMENTS` to a block; `sooner`: a large effect may decide by them.
    """
    exchange, spread = exchange_of(run, item.arm), start_spread(run, item.arm)
    one, other = (replace(sample, block=sample.block // SEGMENTS) for sample in samples)
    groups = groups_for(one, other, q=item.quantile, blocks=GROUP_BLOCKS, restart_spread=spread, exchange=exchange)
    evidence = groups.evidence(item.margin)
    at_s = judged_s(run, evidence.last_block)
    decision = evidence.decision(alpha=item.alpha, gates=gates, to_the_end=True)
    decided = _decided(decision, at_s)
    # Starts that differ by as much as the nulls lie apart would decide by themselves.
    limits = groups.limits(alpha=item.alpha)
    if sooner and _STARTS * math.sqrt(2.0) * spread < math.log(SEPARATION):
        segments = groups_for(*samples, q=item.quantile, blocks=1, exchange=exchange, separation=SEPARATION)
        early = segments.evidence(item.margin)
        early_s = judged_s(run, early.last_block // SEGMENTS)
        decision = early.decision(alpha=item.alpha, gates=gates, to_the_end=True)
        decided = first_decided(decided, _decided(decision, early_s))
        if early.may_pass[-1:].all():
            low, high = segments.limits(alpha=item.alpha)
            limits = max(limits[0], low), min(limits[1], high)
    # Evidence from before the first jams passes an arm that is slow in jams alone: at the margin, 11 % of such runs.
    denied = item.p_noninferior is not None and item.p_noninferior > AGREEING * item.alpha  # by all data at once
    if exchange == "arms" and decided is not None and decided[0] == "PASS" and denied:
        decided, limits = None, (limits[0], max(limits[1], item.high or math.inf))
    path = _path(
        evidence,
        decided,
        at_s=at_s,
        alpha=item.alpha,
        gates=gates,
        wait_s=max(0.0, shortest_s(run) - run.seconds),
    )
    known = len(groups) > 0
    whole = item.whole if path.value is None else path.value
    low, high = _limits(limits, path)
    so_far = f"{counted(len(groups), 'group')} of blocks so far"
    why = so_far if known or item.needed_blocks else item.obstacle or so_far
    seen = replace(
        item,
        low=low if known and low > 0 else None,
        high=high if known and math.isfinite(high) else None,
        whole=whole,
        p_noninferior=None,
        p_inferior=None,
        autocorrelation=None,
        groups=len(groups),
        obstacle=None if known and (low > 0 or math.isfinite(high)) else why,
        # Of shares that differ, a block's own quantile is that of the larger one.
        ratio=item.ratio if exchange == "arms" else whole,
        verdict=path.outcome or "INCONCLUSIVE",
    )
    return replace(seen, reason=_reason(seen, path)), path


def shortest_s(run: Run) -> float:
    """Return the shortest run, over all trials, in whole minutes, with which every gate can PASS: if analysed while it
    runs, without a large effect. The rate is the experiment's, else that of the arm with the fewest requests."""
    rate, trials = number(table(run.records.experiment, "traffic").get("rate")) or 0.0, max(1, len(run.trials))
    if rate > 0 and not run.separate:
        rate *= least_share(run.design, tuple(run.weights.values()))
    else:
        counts = ((int(run.of_arm(arm).sum()), arm) for arm in run.arms)
        rate = min(run.rate(count, arm if run.separate else None) for count, arm in counts)
    seconds = trials * shortest_trial_s(run.limits, run.targets, rate=rate, block_s=run.block_s, trials=trials)
    groups_s = run.limits.cold_s + FEWEST_GROUPS * GROUP_BLOCKS * run.block_s if run.limits.sequential else 0.0
    return max(seconds, 60.0 * math.ceil(groups_s / 60.0))


def _limits(limits: tuple[float, float], path: Path) -> tuple[float, float]:
    """Return the limits of the value; after a decision, the decided limit holds."""
    low = max(limits[0], path.limit) if path.outcome == "FAIL" else limits[0]
    return low, min(limits[1], path.limit) if path.outcome == "PASS" else limits[1]


def _path(
    evidence: Evidence,
    decided: Decided | None,
    *,
    at_s: Floats,
    alpha: float,
    gates: int,
    wait_s: float,
    scale: float = 1.0,
) -> Path:
    """Return the path of the evidence, with value and limit in units of 1 / `scale`. A PASS has to wait for `wait_s`
    until it has the blocks that it needs."""
    outcome, decided_s = decided or (None, None)
    sides = ((evidence.harm, math.log(gates / alpha), 0.0), (evidence.safety, -math.log(alpha), wait_s))
    left = [_left_s(at_s, *side) for side in sides]
    # Evidence that is there already lacks something else.
    outlook_s = min((seconds for seconds in left if seconds), default=wait_s or None)
    return Path(
        value=scale * float(evidence.value[-1]) if len(evidence.value) else None,
        limit=scale * evidence.limit,
        harm=_last(evidence.harm),
        safety=_last(evidence.safety),
        needed=math.log10(gates / alpha),
        needed_safety=-math.log10(alpha),
        outcome=outcome,
        decided_s=decided_s,
        outlook_s=outlook_s if outcome is None else 0.0,
    )


def _left_s(at_s: Floats, evidence: Floats, needed: float, wait_s: float) -> float | None:
    """Return in how many seconds the evidence suffices at its recent pace, `wait_s` at least; None if it does not."""
    known = np.flatnonzero(np.isfinite(evidence))
    if len(known) < 2:
        return None
    recent, last = known[min(len(known) // 2, len(known) - 2)], known[-1]
    pace = (evidence[last] - evidence[recent]) / (at_s[last] - at_s[recent])
    return max(0.0, wait_s, float((needed - evidence[last]) / pace)) if pace > 0 else None


def _last(evidence: Floats) -> float | None:
    """Return the decimal logarithm of the evidence of all groups; None without a finite one."""
    return float(evidence[-1]) / math.log(10.0) if np.isfinite(evidence[-1:]).all() and len(evidence) else None


def _decided(decision: tuple[Outcome, int] | None, at_s: Floats) -> Decided | None:
    return None if decision is None else (decision[0], float(at_s[decision[1]]))


def first_decided(*found: Decided | None) -> Decided | None:
    """Return what was decided first; a FAIL takes precedence over a PASS."""
    known = [item for item in found if item is not None]
    failed = [item for item in known if item[0] == "FAIL"]
    return min(failed or known, key=lambda item: item[1], default=None)


def exchange_of(run: Run, arm: str) -> Exchange:
    """Return what a test may exchange: whole arms if both had equal shares of the traffic throughout, else requests."""
    equal = run.design != "split" or run.weights.get(arm) == run.weights.get(run.control)
    return "arms" if equal and not run.records.weights else "requests"


def _reason(item: Comparison, path: Path) -> str:
    if item.lacks or item.ratio is None:
        return description(item)
    bound = 1.0 + item.margin
    places = enough(bound, (item.ratio, item.low, item.high), fixed, 2)
    seen, limit = seen_text(item, places), fixed(bound, places)
    if path.outcome is None and item.groups < FEWEST_GROUPS:
        return f"{seen} in {counted(item.groups, 'group')} of blocks; a verdict needs {FEWEST_GROUPS} or more."
    limits = limits_text(item.low, item.high, places)
    seen = f"{seen} ({limits}, valid at every interim analysis)"
    if path.decided_s is None:
        return f"{seen}, which leaves the limit of {limit} open."
    side = "above" if path.outcome == "FAIL" else "below"
    return f"{seen}, {side} the limit of {limit} (after {path.decided_s / 60.0:.1f} minutes)."


def share_tests(run: Run) -> int:
    """Return how many shares may FAIL: the objectives and the errors of each treatment."""
    return max(1, len(run.treatments)) * (len(run.targets) + 1)


def share_path(run: Run, counted: Units, block: Ints, *, allowed: float) -> tuple[ShareResult, Path]:
    """Return whether the share of `counted` that missed keeps within what is allowed, by the evidence block by block.

    `block` is that of each request or gap.
    """
    requests = np.bincount(block, minlength=run.blocks)
    bad = np.bincount(block[counted.missed], minlength=run.blocks)
    tail: Floats = np.ones(run.blocks)
    far: Bools = np.ones(run.blocks, dtype=np.bool_)
    if counted.limit_ms is not None and len(counted.ms) and 0.0 < allowed < 1.0:
        tail, far = tail_effects(counted.ms, block, blocks=run.blocks, allowed=allowed, limit_ms=counted.limit_ms)
    tests, alpha, min_blocks = share_tests(run), run.limits.alpha, run.limits.min_blocks
    # Few blocks are enough by default; who asks for more gets them.
    least = min(min_blocks, FEWEST_BLOCKS) if min_blocks <= MIN_BLOCKS else min_blocks
    evidence = share_evidence(
        bad, requests, allowed=allowed, tail=tail, far=far, least_blocks=least, min_blocks=min_blocks
    )
    decision = evidence.decision(alpha=alpha, gates=tests, to_the_end=True)
    blocks = int((requests > 0).sum())
    needed = least if far[-1:].all() else max(least, BLOCKS_FOR_PASS)
    lacks = decision is None and blocks < needed
    at_s = judged_s(run, evidence.last_block)
    path = _path(
        evidence,
        _decided(decision, at_s),
        at_s=at_s,
        alpha=alpha,
        gates=tests,
        wait_s=(needed - blocks) * run.block_s if lacks else 0.0,
        scale=100.0,
    )
    limits = share_limits(bad, requests, evidence, alpha=alpha, tests=tests)
    low, high = _limits((100.0 * limits[0], 100.0 * limits[1]), path)
    result = ShareResult(
        missed=int(bad.sum()),
        requests=int(requests.sum()),
        allowed=allowed,
        low=low / 100.0,
        high=high / 100.0,
        design_effect=float(evidence.deflation[-1]),
        verdict=path.outcome or "INCONCLUSIVE",
        blocks=blocks,
        needed_blocks=needed if lacks and evidence.safe(alpha=alpha)[-1:].all() else None,
    )
    return result, path


def judged_s(run: Run, block: Ints) -> Floats:
    """Return the seconds judged by the end of each block, over all trials until then."""
    ends = np.zeros(max(run.blocks, int(block.max(initial=-1)) + 1))
    before = 0.0
    for trial in run.trials:
        own = np.minimum((np.arange(trial.blocks) + 1) * run.block_s, trial.seconds)
        own[-1:] = trial.seconds
        ends[trial.first_block : trial.first_block + trial.blocks] = before + own
        before += trial.seconds
    return np.asarray(ends[block])
